package config_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

func TestN3_AnAliasMayHoldOneStarThatStandsForAnyText(t *testing.T) {
	for alias, fault := range map[string]string{
		"claude-*": "", "*-mini": "", "gpt-4*-mini": "", "My *": "",
		"*":    "alias * would stand for every name: leave it out, and write default CONSUMER any",
		"**":   "more than one *",
		"a*b*": `alias "a*b*" holds more than one *: write one`,
	} {
		err := config.CheckAlias(alias)
		if fault == "" {
			require.NoError(t, err, alias)
			require.ErrorContains(t, config.CheckSendAs(alias), "stands for many names", alias)
			continue
		}
		require.ErrorContains(t, err, fault, alias)
	}
}

func TestThePatternWithMoreTextIsAskedFirst(t *testing.T) {
	var patterns []config.NamePattern
	for _, text := range strings.Fields("*-mini claude-* claude-3* claude-*-mini c*") {
		p, ok := config.ParseNamePattern(text)
		require.True(t, ok)
		require.Equal(t, text, p.String())
		patterns = append(patterns, p)
	}
	slices.SortStableFunc(patterns, config.NamePattern.Compare)
	var order []string
	for _, p := range patterns {
		order = append(order, p.String())
	}
	require.Equal(t, strings.Fields("claude-3* claude-*-mini claude-* c* *-mini"), order)
	_, ok := config.ParseNamePattern("claude-3")
	require.False(t, ok)
}

func TestUnlistedOfAConsumerHoldsForItsModels(t *testing.T) {
	c := &config.Consumer{Models: []*config.Model{{Name: "a", Unlisted: true}, {Name: "b"}}}
	require.True(t, c.IsUnlisted("a"))
	require.False(t, c.IsUnlisted("b"))
	require.False(t, c.IsUnlisted(""))
	c.Unlisted = true
	require.True(t, c.IsUnlisted("b"))
	require.True(t, c.IsUnlisted(""))
}
