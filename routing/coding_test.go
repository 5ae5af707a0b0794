package routing

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// coded is a body in a content coding.
func coded(t testing.TB, coding string, body []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	var w io.WriteCloser
	var err error
	switch coding {
	case "gzip":
		w = gzip.NewWriter(&b)
	case "deflate":
		w = zlib.NewWriter(&b)
	case "raw deflate":
		w, err = flate.NewWriter(&b, 6)
	case "zstd":
		w, err = zstd.NewWriter(&b)
	case "br":
		w = brotli.NewWriter(&b)
	}
	require.NoError(t, err)
	_, err = w.Write(body)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	return b.Bytes()
}

// peekCoded is Peek of a body in codings, and what the server would get.
func peekCoded(t testing.TB, p *Plan, header string, body []byte, change func(*Body)) (Facts, http.Header, []byte, error) {
	t.Helper()
	r, y := post(t, jsonType, body)
	r.Header.Set("Content-Encoding", header)
	facts, err := y.Peek(r.Context(), r.Header, p)
	if err != nil {
		return facts, nil, nil, err
	}
	if change != nil {
		change(y)
	}
	y.Rewind(r)
	rest, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.EqualValues(t, len(rest), r.ContentLength)
	require.Equal(t, fmt.Sprint(len(rest)), r.Header.Get("Content-Length"))
	return facts, r.Header, rest, nil
}

func TestK4_AnEncodedBodyIsReadAndPassedOnAsItCame(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	text := []byte(`{"messages":"` + strings.Repeat("a few words ", 1000) + `","model":"qwen"}`)
	once := func(coding string) []byte { return coded(t, coding, text) }
	for header, body := range map[string][]byte{
		"gzip": once("gzip"), "GZip": once("gzip"), "x-gzip": once("gzip"), " zstd\t": once("zstd"), "br": once("br"), "deflate": once("deflate"),
		"Deflate": once("raw deflate"), "identity": text, "": text, "identity, gzip": once("gzip"), ",gzip,": once("gzip"),
		"gzip, br": coded(t, "br", once("gzip")), "zstd,deflate": coded(t, "deflate", once("zstd")),
	} {
		facts, h, rest, err := peekCoded(t, p, header, body, nil)
		require.NoError(t, err, header)
		require.Equal(t, []string{"qwen"}, facts.Names, header)
		require.True(t, bytes.Equal(body, rest), header)
		require.Equal(t, header, h.Get("Content-Encoding"))
	}
	r, y := post(t, jsonType, coded(t, "br", once("gzip")))
	r.Header["Content-Encoding"] = []string{"gzip", "br"}
	facts, err := y.Peek(r.Context(), r.Header, p)
	require.NoError(t, err, "in two lines")
	require.Equal(t, []string{"qwen"}, facts.Names)
}

func TestK4_AnEncodedBodyThatIsChangedIsPassedOnDecoded(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	for coding := range map[string]bool{"gzip": true, "zstd": true, "br": true, "deflate": true} {
		_, h, rest, err := peekCoded(t, p, coding, coded(t, coding, []byte(`{"x_keep_alive":5,"model":"qwen"}`)), nil)
		require.NoError(t, err)
		require.Equal(t, `{"model":"qwen"}`, string(rest), coding)
		require.NotContains(t, h, "Content-Encoding")

		_, h, rest, err = peekCoded(t, p, coding, coded(t, coding, []byte(`{"model":"qwen"}`)), func(y *Body) { y.Change(p, "other", nil) })
		require.NoError(t, err)
		require.Equal(t, `{"model":"other"}`, string(rest), coding)
		require.NotContains(t, h, "Content-Encoding")
	}
}

func TestK4_WhatCantBeDecodedIsAnError(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	text := []byte(`{"model":"qwen","x":"` + strings.Repeat("some words ", 100) + `"}`)
	for _, header := range []string{"compress", "snappy", "gzip, lz4", "gzip;q=1", strings.Repeat("gzip,", maxCodings+1), "aws-chunked"} {
		_, _, _, err := peekCoded(t, p, header, text, nil)
		require.ErrorIs(t, err, ErrEncoding, header)
	}
	for _, coding := range []string{"gzip", "deflate", "zstd", "br"} {
		whole := coded(t, coding, text)
		for what, body := range map[string][]byte{
			"not encoded": text, "cut short": whole[:len(whole)-3], "cut in half": whole[:len(whole)/2], "a byte": whole[:1],
			"garbage behind":       append(bytes.Clone(whole), "garbage"...),
			"another model behind": append(bytes.Clone(whole), `{"model":"other"}`...),
		} {
			_, _, _, err := peekCoded(t, p, coding, body, nil)
			var fault *BadBody
			require.ErrorAs(t, err, &fault, "%s, %s", coding, what)
			require.ErrorContains(t, err, "the request body can't be read")
		}
	}
}

func TestK4_BombsAreRefusedAndHeldMemoryIsGivenBack(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	bomb := []byte(`{"model":"qwen","x":"` + strings.Repeat("a", 12<<20) + `"}`)
	for _, codings := range [][]string{{"gzip"}, {"zstd"}, {"br"}, {"deflate"}, {"gzip", "gzip"}, {"zstd", "br"}} {
		body := bomb
		for _, coding := range codings {
			body = coded(t, coding, body)
		}
		r, y := post(t, jsonType, body)
		r.Header.Set("Content-Encoding", strings.Join(codings, ","))
		_, err := y.Peek(r.Context(), r.Header, p)
		require.ErrorIs(t, err, ErrTooLarge, codings)
		held := y.buffers.Held()
		require.LessOrEqual(t, held, int64(len(body)))
		y.Close()
		require.Zero(t, y.buffers.Held())
	}
	// A stage in the middle is bounded, too: what it comes to at last is small.
	inner := bytes.Repeat(coded(t, "gzip", nil), 400<<10)
	_, _, _, err := peekCoded(t, p, "gzip,gzip", coded(t, "gzip", inner), nil)
	require.ErrorIs(t, err, ErrTooLarge)
}

func TestK4_TextThatRepeatsItselfIsNoBomb(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	body := []byte(`{"model":"qwen","x":"` + strings.Repeat("a", freeSize-100) + `"}`)
	for _, coding := range []string{"gzip", "zstd", "br"} {
		facts, _, _, err := peekCoded(t, p, coding, coded(t, coding, body), nil)
		require.NoError(t, err, coding)
		require.Equal(t, []string{"qwen"}, facts.Names)
	}
}

func TestK4_WhatABodyDecodesToIsBoundedByMaxBodyAndMaxBuffered(t *testing.T) {
	text := []byte(`{"model":"qwen","x":"` + strings.Repeat("ab", 45000) + `"}`)
	body := coded(t, "gzip", text)
	b := NewBuffers(t.TempDir())
	for _, c := range []struct {
		limit, total int64
		want         error
	}{{80000, total, ErrTooLarge}, {100000, 100000, ErrNoRoom}, {100000, 200000, nil}} {
		r, _ := post(t, jsonType, body)
		y, err := b.Read(r, Limits{Body: c.limit, Total: c.total})
		require.NoError(t, err)
		r.Header.Set("Content-Encoding", "gzip")
		_, err = y.Peek(r.Context(), r.Header, plan(t, []string{"model"}, nil, false))
		require.ErrorIs(t, err, c.want)
		y.Close()
		require.Zero(t, b.Held())
	}
}

// What a client that has left sent is not decoded, nor waited for.
func TestK4_NothingIsDecodedForAClientThatHasLeft(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	body := coded(t, "gzip", []byte(`{"model":"qwen","x":"`+strings.Repeat("ab", 200<<10)+`"}`))
	gone := errors.New("its client has left")
	for name, busy := range map[string]int{"others are decoded": cap(decoders), "its turn has come": 0} {
		t.Run(name, func(t *testing.T) {
			for range busy {
				decoders <- struct{}{}
			}
			r, y := post(t, jsonType, body)
			r.Header.Set("Content-Encoding", "gzip")
			ctx, leave := context.WithCancelCause(t.Context())
			leave(gone)
			_, err := y.Peek(ctx, r.Header, p)
			require.ErrorIs(t, err, gone)
			for range busy {
				<-decoders
			}
			require.Empty(t, decoders)
			y.Close()
			require.Zero(t, y.buffers.Held())
		})
	}
}

func TestADecoderGivesNothingOnceItsRequestHasEnded(t *testing.T) {
	ctx, leave := context.WithCancel(t.Context())
	d, err := newDecoder(ctx, "gzip", bytes.NewReader(coded(t, "gzip", []byte("{}"))))
	require.NoError(t, err)
	d.left = 10
	leave()
	n, err := d.Read(make([]byte, 10))
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, n)
}

func TestAsManyBodiesAreDecodedAtOnceAsThereAreCores(t *testing.T) {
	require.Equal(t, max(2, runtime.GOMAXPROCS(0)), cap(decoders))
}

func TestADecodedBodyThatCantBeReadBackIsOurFault(t *testing.T) {
	words := hex.EncodeToString(random(memoryBody))
	r, y := post(t, jsonType, coded(t, "gzip", []byte(`{"x_client_id":"me","messages":"`+words+`","model":"qwen"}`)))
	r.Header.Set("Content-Encoding", "gzip")
	_, err := y.Peek(r.Context(), r.Header, plan(t, []string{"model"}, nil, false))
	require.NoError(t, err)
	y.Rewind(r)
	_, err = io.ReadAll(r.Body)
	require.NoError(t, err)
	require.NoError(t, y.Fault())
	y.Rewind(r)
	require.NoError(t, y.decoded.file.Close())
	_, err = io.ReadAll(r.Body)
	require.Error(t, err)
	require.ErrorIs(t, y.Fault(), ErrSpill)
}
