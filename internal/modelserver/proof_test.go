package modelserver

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestProofShowsTheServerTheRequestAndItsBodyToTheLastByte(t *testing.T) {
	s := start(t, Options{Preloaded: true, VRAM: gpu.GiB})
	for _, size := range []string{"0", "5000"} {
		got := want(t, 200, call(bound(t), "POST", s.URL()+"/proof?id=a-1&bytes="+size, "hello"))
		n := map[string]int{"0": 0, "5000": 5000}[size]
		require.Equal(t, ProofBytes("mvoice", "a-1", []byte("hello"), n), got.body)
	}
	whole := ProofBytes("mvoice", "a-1", []byte("hello"), 5000)
	require.Len(t, whole, 5000)
	for name, other := range map[string][]byte{
		"server":  ProofBytes("mvoicf", "a-1", []byte("hello"), 5000),
		"request": ProofBytes("mvoice", "a-2", []byte("hello"), 5000),
	} {
		require.NotEqual(t, whole[4000:], other[4000:], "another %s has other bytes", name)
	}
	require.NotEqual(t, whole, ProofBytes("mvoice", "a-1", []byte("hellp"), 5000))
}

func TestProofStreamNamesServerAndRequestInEachEvent(t *testing.T) {
	s := start(t, Options{Preloaded: true, VRAM: gpu.GiB})
	got := want(t, 200, call(bound(t), "GET", s.URL()+"/proof/stream?id=a-1&events=3&ms=1", ""))
	require.Equal(t, "text/event-stream", got.header.Get("Content-Type"))
	require.Equal(t, ProofStream("mvoice", "a-1", 3), got.body)
	require.NotEqual(t, got.body, ProofStream("mvoice", "a-2", 3))
}

func TestOllamaGeneratesTheWordsOfTheRequestThatHasAnID(t *testing.T) {
	s := startOllama(t, Options{})
	got := want(t, http.StatusOK, call(bound(t), "POST", s.URL()+"/api/generate?id=q-7",
		`{"model":"tiny","prompt":"x","stream":false,"options":{"num_predict":3}}`))
	require.Equal(t, ProofWords("ollama", "q-7", 3), decode[map[string]any](t, got.body)["response"])
}
