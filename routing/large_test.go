package routing

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// filler is n times the letter a, made as it is read.
func filler(n int64) io.Reader { return io.LimitReader(letters{}, n) }

type letters struct{}

func (letters) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}

func TestABodyOf256MiBDoesNotEnterMemory(t *testing.T) {
	var size int64 = 256 << 20
	if testing.Short() { // under the race detector it takes minutes, and nothing else is found
		size = 32 << 20
	}
	const header = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n"
	const field = "\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nqwen\r\n--b--\r\n"
	for _, c := range []struct{ name, kind, before, after, left string }{
		{"JSON", jsonType, `{"x_priority":1,"image":"`, `","model":"qwen","x_cooldown":5}`, `{"image":"","model":"qwen"}`},
		{"a metadata field of this size", jsonType, `{"model":"qwen","x_mine":"`, `"}`, `{"model":"qwen"}`},
		{"multipart", "multipart/form-data; boundary=b", header, field, header + field},
		{"form", "application/x-www-form-urlencoded", "image=", "&model=qwen", "image=&model=qwen"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodPost, "/", io.MultiReader(strings.NewReader(c.before), filler(size), strings.NewReader(c.after)))
			r.Header.Set("Content-Type", c.kind)
			b := NewBuffers(t.TempDir())
			p := plan(t, []string{"model"}, []string{"x_mine"}, true)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			y, err := b.Read(r, Limits{Body: 2 * size, Total: 4 * size})
			require.NoError(t, err)
			defer y.Close()
			facts, err := y.Peek(r.Context(), r.Header, p)
			require.NoError(t, err)
			require.Equal(t, []string{"qwen"}, facts.Names)
			y.Rewind(r)
			var got counted
			_, err = io.CopyBuffer(struct{ io.Writer }{&got}, r.Body, make([]byte, 32<<10))
			require.NoError(t, err)
			runtime.ReadMemStats(&after)
			require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(16<<20), "bytes that were allocated in all, freed ones too")
			require.Equal(t, c.left, got.rest.String())
			require.EqualValues(t, got.size, r.ContentLength)
		})
	}
}

// counted keeps what is no filler.
type counted struct {
	size int64
	rest bytes.Buffer
	run  int // of letters a
}

func (c *counted) Write(p []byte) (int, error) {
	c.size += int64(len(p))
	for i := 0; i < len(p); {
		n := len(p[i:]) - len(bytes.TrimLeft(p[i:], "a"))
		switch {
		case n > 0:
			c.run += n
			i += n
		default:
			c.flush()
			c.rest.WriteByte(p[i])
			i++
		}
	}
	return len(p), nil
}

// flush keeps a short run: it is part of a word.
func (c *counted) flush() {
	if c.run < 100 {
		c.rest.WriteString(strings.Repeat("a", c.run))
	}
	c.run = 0
}

func BenchmarkPeek(b *testing.B) {
	for _, size := range []int{1 << 10, 1 << 20} {
		message := `{"role":"user","content":"` + strings.Repeat("words and \\\"words\\\" ", 10) + `"},`
		text := strings.Repeat(message, size/len(message))
		for name, body := range map[string]string{
			"chat":  `{"messages":[` + strings.TrimSuffix(text, ",") + `],"x_priority":1,"model":"qwen"}`,
			"image": `{"image":"` + strings.Repeat("a", size) + `","x_priority":1,"model":"qwen"}`,
		} {
			b.Run(fmt.Sprintf("%s/%dKiB", name, size>>10), func(b *testing.B) {
				p := plan(b, []string{"model"}, nil, true)
				h := http.Header{"Content-Type": {jsonType}}
				y := &Body{memory: []byte(body), size: int64(len(body))}
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := y.Peek(b.Context(), h, p); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
