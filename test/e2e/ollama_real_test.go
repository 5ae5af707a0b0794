//go:build linux && real

package e2e

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	realollama "github.com/gpu-broker/caddy-gpu-broker/test/ollama"
)

// A real ollama with a tiny model, behind our Caddy over HTTPS, asked by
// OpenAI's own Node SDK.
func TestRealOllamaMakesWayAndComesBackAndIsNeverCut(t *testing.T) {
	srv := realollama.Start(t)
	client := realollama.NewClient(t)
	u, err := url.Parse(srv.URL)
	require.NoError(t, err)
	s := start(t, layout{
		Total: "8GiB", HTTPS: true, Consumers: []consumer{mvoice()},
		Global: fmt.Sprintf("consumer llm {\npreset ollama\nupstream %s\nvram 6GiB\n}", u.Host),
		Routes: "handle_path /llm/* {\ngpu_broker llm\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	ask := realollama.Chat{BaseURL: s.url + "/llm/v1", CACert: filepath.Join(s.dir, "data", "caddy", "pki", "authorities", "local", "root.crt"),
		Model: realollama.Tiny, Prompt: "say something", MaxTokens: 20}
	resident := func() int {
		models, err := srv.PS()
		require.NoError(t, err)
		return len(models)
	}

	// A streamed chat loads the model.
	a, err := client.NodeChat(ctx, ask)
	require.NoError(t, err)
	require.Greater(t, len(a.Chunks), 5, "it is a stream")
	require.Equal(t, 1, resident())

	// Another consumer's request unloads it, through its preset.
	require.Equal(t, 200, s.post("/mvoice/synthesize", "hello").status)
	require.Zero(t, resident())
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)

	// The next chat loads it again.
	_, err = client.NodeChat(ctx, ask)
	require.NoError(t, err)
	require.Equal(t, 1, resident())
	require.EqualValues(t, 2, s.status().Scheduler.Evictions, "mvoice made way")

	// A chat in flight is never cut.
	ask.Model, ask.MaxTokens = realollama.Slow, 200
	running, err := client.Start(ctx, ask)
	require.NoError(t, err)
	select {
	case <-running.First():
	case <-running.Done():
		_, err := running.Wait()
		t.Fatalf("the chat ended before its first token: %v", err)
	}
	other := s.send("POST", "/mvoice/synthesize", "hello")
	s.waitQueued("mvoice", 1)
	whole, err := running.Wait()
	require.NoError(t, err)
	require.Equal(t, "length", whole.FinishReason, "it came to its own end")
	require.GreaterOrEqual(t, len(whole.Chunks), 200)
	require.Equal(t, 200, s.await(other).status)
	require.Zero(t, resident())
	unloads := s.decisions("unload")
	last := unloads[len(unloads)-1]
	require.Equal(t, "llm", last.Consumer)
	require.False(t, last.At.Before(whole.Chunks[len(whole.Chunks)-1].At.Add(-100*time.Millisecond)), "no unload while the chat ran")
}
