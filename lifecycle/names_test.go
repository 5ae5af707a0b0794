package lifecycle_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

var ollama = lifecycle.Names{Fold: true, Prefix: "registry.ollama.ai/library/", Tag: "latest"}

func TestK1_NamesAreComparedAsTheServerComparesThem(t *testing.T) {
	runner := lifecycle.Names{Prefix: "ai/", Tag: "latest"}
	for _, c := range []struct {
		names lifecycle.Names
		a, b  string
		same  bool
	}{
		{ollama, "llama3.1:8b", "Llama3.1:8b", true},
		{ollama, "llama3.1:8b", "library/llama3.1:8b", true},
		{ollama, "llama3.1:8b", "registry.ollama.ai/library/llama3.1:8b", true},
		{ollama, "llama3.1:8b", "https://Registry.Ollama.AI/Library/LLAMA3.1:8B", true},
		{ollama, "mike/mistral", "registry.ollama.ai/mike/mistral:latest", true},
		{ollama, "llama3.1", "llama3.1:LATEST", true},
		{ollama, "llama3.1", "llama3.1:8b", false},
		{ollama, "llama3.1", "mike/llama3.1", false},
		{ollama, "registry.ollama.ai/llama3.1", "llama3.1", false}, // a namespace of that name
		{ollama, "hf.co/library/llama3.1", "llama3.1", false},
		{ollama, "hf.co/org/name:Q4", "hf.co/org/name:q4", true},
		{ollama, "hf.co/org/name:Q4", "org/name:Q4", false},
		{ollama, "hf.co/org/name:Q4", "hf.co/org/name", false},
		{ollama, "localhost:5000/library/x", "x", false},
		{ollama, "localhost:5000/library/x", "localhost:5000/library/x:latest", true},
		{ollama, "a/b/c/d", "a/b/c/D", true},
		{ollama, "library/library/x", "library/x", false},
		{ollama, "", "latest", false},
		{runner, "smollm2", "ai/smollm2:latest", true},
		{runner, "ai/SmolLM2", "ai/smollm2", false},
		{runner, "hf.co/ai/smollm2", "smollm2", false},
		{lifecycle.Names{}, "m", "M", false},
		{lifecycle.Names{}, "m", "m:latest", false},
		{lifecycle.Names{Fold: true}, "Org/M", "org/m", true},
		{ollama, "maß:ſ", "maß:S", true}, // the long s
		{ollama, "λόγος", "ΛΌΓΟΣ", true}, // the final sigma
		{ollama, "\u212a", "k", true},    // the sign of Kelvin
		{ollama, "\xff", "\xfe", true},   // no text, and no name either
	} {
		require.Equal(t, c.same, c.names.Same(c.a, c.b), "%q and %q", c.a, c.b)
		require.Equal(t, c.same, c.names.Same(c.b, c.a), "%q and %q", c.b, c.a)
		require.Equal(t, c.same, c.names.Key(c.a) == c.names.Key(c.b), "keys %q and %q", c.names.Key(c.a), c.names.Key(c.b))
		require.True(t, c.names.Same(c.a, c.a))
	}
}

func TestComparingNamesDoesNotAllocate(t *testing.T) {
	long := strings.Repeat("x", 200)
	a, b := "Registry.ollama.ai/library/"+long, "library/"+long+":latest"
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if !ollama.Same(a, b) {
			t.Error("they are the same")
		}
	}))
}

func FuzzNamesOfOneModelHaveOneKey(f *testing.F) {
	f.Add("Llama3.1:8b", "library/llama3.1:8b")
	f.Add("https://a/b/c:d", "A/B/c:D")
	f.Add("///", ":/:")
	f.Fuzz(func(t *testing.T, a, b string) {
		if ollama.Same(a, b) != (ollama.Key(a) == ollama.Key(b)) {
			t.Errorf("%q and %q: keys %q and %q", a, b, ollama.Key(a), ollama.Key(b))
		}
		if !ollama.Same(a, a) || ollama.Same(a, b) != ollama.Same(b, a) {
			t.Errorf("%q and %q: no equivalence", a, b)
		}
	})
}

func TestN3_APatternIsComparedAsTheServerComparesNames(t *testing.T) {
	for _, c := range []struct {
		names         lifecycle.Names
		pattern, name string
		fits          bool
	}{
		{lifecycle.Names{}, "claude-*", "claude-3", true},
		{lifecycle.Names{}, "claude-*", "claude-", true},
		{lifecycle.Names{}, "claude-*", "Claude-3", false},
		{lifecycle.Names{}, "claude-*", "x/claude-3", false},
		{lifecycle.Names{}, "gpt-4*-mini", "gpt-4-mini", true},
		{lifecycle.Names{}, "gpt-4*-mini", "gpt-4o-mini", true},
		{lifecycle.Names{}, "gpt-4-*-mini", "gpt-4-mini", false}, // the two overlap
		{lifecycle.Names{Fold: true}, "claude-*", "CLAUDE-3", true},
		{lifecycle.Names{Fold: true}, "*-MINI", "gpt-mini", true},
		{ollama, "claude-*", "registry.ollama.ai/library/Claude-3", true},
		{ollama, "claude-*", "mike/claude-3", false},
		{ollama, "claude-*-mini", "claude-3-mini:latest", true},
		{ollama, "claude-*-mini", "claude-3-mini:7b", false},
		{ollama, "claude-*:latest", "claude-3", true},
		{ollama, "*:7b", "library/x:7B", true},
	} {
		before, after, _ := strings.Cut(c.pattern, "*")
		require.Equal(t, c.fits, c.names.Match(before, after, c.name), "%s and %s", c.pattern, c.name)
	}
}
