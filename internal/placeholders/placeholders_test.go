package placeholders

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadNamesThePlaceholderThatIsNotSet(t *testing.T) {
	t.Setenv("UNIT", "llama")
	v := Values{}
	value, err := v.Read("unit", "{env.UNIT}.service")
	require.NoError(t, err)
	require.Equal(t, "llama.service", value)
	_, err = v.Read("unit", "{env.NOT_SET_ANYWHERE}")
	require.ErrorContains(t, err, "unit")
	require.ErrorContains(t, err, "env.NOT_SET_ANYWHERE")
}
