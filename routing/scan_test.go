package routing

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEightBytesArePlainIfEachIs(t *testing.T) {
	for _, other := range []byte{' ', '!', '#', '[', ']', 'a', 0x7F, 0x80, 0xFF} {
		for place := range 8 {
			for c := range 256 {
				eight := [8]byte{other, other, other, other, other, other, other, other}
				eight[place] = byte(c)
				require.Equal(t, plain[c], allPlain(binary.LittleEndian.Uint64(eight[:])), "%#x at %d, beside %#x", c, place, other)
			}
		}
	}
}
