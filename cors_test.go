package gpubroker

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTheOriginsThatAServerAllowedAreRememberedWithinBounds(t *testing.T) {
	var o origins
	o.forbidden("a", "https://x.example") // nothing is known yet
	require.False(t, o.has("a", "https://x.example"))
	o.allowed("a", "https://x.example")
	require.True(t, o.has("a", "https://x.example"))
	require.False(t, o.has("b", "https://x.example"))
	for i := range 3 * maxOrigins {
		o.allowed("a", fmt.Sprintf("https://%d.example", i))
	}
	require.Len(t, o.all["a"], maxOrigins)
	require.False(t, o.has("a", "https://x.example"), "the oldest went")
	o.allowed("a", "null")
	require.False(t, o.has("a", "null"))
	o.allowed("a", "*")
	require.True(t, o.has("a", "https://anybody.example"))
	o.forbidden("a", "https://47.example")
	require.False(t, o.has("a", "https://anybody.example"))
	require.False(t, o.has("a", "https://47.example"))
	require.True(t, o.has("a", "https://46.example"))
}
