package routing

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

const total = 64 << 20

// random is n bytes without a pattern that a mistaken offset would keep.
func random(n int) []byte {
	b := make([]byte, n)
	x := uint32(2463534242)
	for i := range b {
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		b[i] = byte(x)
	}
	return b
}

func TestBodiesOfEverySizeAreReadAgainByteForByte(t *testing.T) {
	for _, size := range []int{0, 1, SmallBody, SmallBody + 1, memoryBody - 1, memoryBody, memoryBody + 1, 3 * memoryBody} {
		for _, known := range []bool{true, false} {
			b := NewBuffers(filepath.Join(t.TempDir(), "bodies"))
			want := random(size)
			r := httptest.NewRequest(http.MethodPost, "/", iotest.HalfReader(bytes.NewReader(want)))
			if r.ContentLength = -1; known {
				r.ContentLength = int64(size)
			}
			r.TransferEncoding = []string{"chunked"}
			body, err := b.Read(r, total, total)
			require.NoError(t, err)
			require.EqualValues(t, size, r.ContentLength)
			require.Empty(t, r.TransferEncoding)
			for range 2 {
				got, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				require.True(t, bytes.Equal(want, got), "size %d", size)
				body.Rewind(r)
			}
			again, err := r.GetBody()
			require.NoError(t, err)
			got, err := io.ReadAll(again)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got))
			require.EqualValues(t, size, b.Held())
			body.Close()
			require.Zero(t, b.Held())
			left, err := os.ReadDir(b.dir)
			require.True(t, err == nil || os.IsNotExist(err))
			require.Empty(t, left, "no file is left over")
		}
	}
}

func TestBodyAboveItsLimitIsRefusedAndGivenBack(t *testing.T) {
	b := NewBuffers(t.TempDir())
	for _, length := range []int64{2000, -1} {
		r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(random(2000)))
		r.ContentLength = length
		_, err := b.Read(r, 1999, total)
		require.ErrorIs(t, err, ErrTooLarge)
		require.Zero(t, b.Held())
	}
}

func TestBodiesTogetherAreBounded(t *testing.T) {
	b := NewBuffers(t.TempDir())
	post := func(n int) (*Body, error) {
		return b.Read(httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(random(n))), total, 3000)
	}
	first, err := post(2000)
	require.NoError(t, err)
	_, err = post(2000)
	require.ErrorIs(t, err, ErrNoRoom)
	require.EqualValues(t, 2000, b.Held())
	first.Close()
	second, err := post(2000)
	require.NoError(t, err)
	second.Close()
}

func TestBodyThatBreaksOffIsTheClientsError(t *testing.T) {
	b := NewBuffers(t.TempDir())
	broken := errors.New("connection reset")
	r := httptest.NewRequest(http.MethodPost, "/", io.MultiReader(bytes.NewReader(random(2*memoryBody)), iotest.ErrReader(broken)))
	r.ContentLength = -1
	_, err := b.Read(r, total, total)
	require.ErrorIs(t, err, broken)
	require.Zero(t, b.Held())
	left, err := os.ReadDir(b.dir)
	require.NoError(t, err)
	require.Empty(t, left)
}
