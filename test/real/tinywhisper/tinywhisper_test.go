package tinywhisper

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
)

func write(t *testing.T, size Size, seed uint64) []byte {
	t.Helper()
	var file bytes.Buffer
	require.NoError(t, Write(&file, size, seed))
	return file.Bytes()
}

func TestTheSameSeedGivesTheSameModel(t *testing.T) {
	require.True(t, bytes.Equal(write(t, Tiny(), 1), write(t, Tiny(), 1)))
	require.False(t, bytes.Equal(write(t, Tiny(), 1), write(t, Tiny(), 2)))
}

func TestTheFileBeginsWithWhatItsReaderMeasuresTheRestBy(t *testing.T) {
	header := make([]uint32, 12)
	_, err := binary.Decode(write(t, Size{State: 8, Heads: 2, Layers: 3, Text: 10}, 1), binary.LittleEndian, header)
	require.NoError(t, err)
	require.Equal(t, []uint32{magic, vocabulary, audio, 8, 2, 3, 10, 8, 2, 3, spectrum, typeFloat32}, header)
}

func TestEveryTensorHasANameOfItsOwn(t *testing.T) {
	size := Tiny()
	names := map[string]bool{}
	for _, tensor := range layout(size) {
		require.False(t, names[tensor.name], tensor.name)
		names[tensor.name] = true
	}
	// What whisper.cpp counts for itself: 7 + 15 a layer that hear, 4 + 24 a layer that write.
	require.Len(t, names, 7+15*size.Layers+4+24*size.Layers)
}

func TestASizeThatCannotBeIsRefused(t *testing.T) {
	for _, size := range []Size{{}, {State: 8, Heads: 3, Layers: 1, Text: 8}, {State: -8, Heads: 2, Layers: 1, Text: 8}} {
		var file bytes.Buffer
		require.Error(t, Write(&file, size, 1))
		require.Zero(t, file.Len())
	}
}
