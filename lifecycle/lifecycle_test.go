package lifecycle

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNamesWithoutATagMeanTheTag(t *testing.T) {
	for _, c := range []struct {
		a, b, tag string
		same      bool
	}{
		{"a", "a", "", true}, {"a", "b", "", false}, {"a", "a:latest", "", false},
		{"a", "a:latest", "latest", true}, {"a:latest", "a", "latest", true}, {"a:latest", "a:latest", "latest", true},
		{"a", "a:7b", "latest", false}, {"a:7b", "a:latest", "latest", false}, {"alatest", "a", "latest", false}, {"a:", "a", "latest", false},
	} {
		require.Equal(t, c.same, Same(c.a, c.b, c.tag), "%q and %q with %q", c.a, c.b, c.tag)
	}
	var same bool
	allocs := testing.AllocsPerRun(100, func() { same = Same("a-name-that-is-longer-than-any-buffer-on-the-stack", "another:latest", "latest") })
	require.False(t, same)
	require.Zero(t, allocs)
}
