package routing

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWhatIsNoJSONStringIsNotUnquoted(t *testing.T) {
	for _, text := range []string{``, `"`, `x`, `"x`, `x"`} {
		_, err := unquote(text)
		require.Error(t, err, text)
	}
	got, err := unquote(`""`)
	require.NoError(t, err)
	require.Empty(t, got)
}
