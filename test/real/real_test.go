//go:build linux && real

package real

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = time.Minute

// ask wants a status and gives the answer.
func ask(t *testing.T, s *Server, method, path string, body any, want int, header ...string) []byte {
	t.Helper()
	status, answer, err := s.Ask(t.Context(), method, path, body, header...)
	require.NoError(t, err, "%s %s", method, path)
	require.Equal(t, want, status, "%s %s: %s", method, path, answer)
	return answer
}

// askJSON wants status 200 and an answer in JSON.
func askJSON[T any](t *testing.T, s *Server, method, path string, body any) T {
	t.Helper()
	answer := ask(t, s, method, path, body, http.StatusOK)
	var parsed T
	require.NoError(t, json.Unmarshal(answer, &parsed), "%s %s: %s", method, path, answer)
	return parsed
}

// eventually waits until what a server tells is as wanted.
func eventually[T any](t *testing.T, want T, found func() T) {
	t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	poll := time.NewTicker(50 * time.Millisecond)
	defer poll.Stop()
	for {
		last := found()
		if assert.ObjectsAreEqual(want, last) {
			return
		}
		select {
		case <-poll.C:
		case <-deadline.C:
			require.Equal(t, want, last)
		}
	}
}

// A stream is a chat whose answer comes piece by piece.
type stream struct {
	leave context.CancelFunc
	done  chan []byte // what came after the first piece
}

// stream starts a chat and returns when its first piece has come.
func startStream(t *testing.T, s *Server, path, model string, tokens int) *stream {
	t.Helper()
	ctx, leave := context.WithTimeout(t.Context(), patience)
	t.Cleanup(leave)
	response, err := s.Open(ctx, http.MethodPost, path, chat(model, tokens, true))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode)
	piece := make([]byte, 1)
	_, err = response.Body.Read(piece)
	require.NoError(t, err)
	running := &stream{leave: leave, done: make(chan []byte, 1)}
	go func() {
		defer response.Body.Close()
		var rest bytes.Buffer
		_, _ = rest.ReadFrom(response.Body) // cut, in some tests
		running.done <- rest.Bytes()
	}()
	return running
}

// rest gives what came until the stream's end.
func (s *stream) rest() []byte { return <-s.done }

func chat(model string, tokens int, stream bool) map[string]any {
	return map[string]any{
		"model": model, "max_tokens": tokens, "stream": stream,
		"messages": []any{map[string]any{"role": "user", "content": "hello"}},
	}
}

type chatAnswer struct {
	Choices []struct {
		FinishReason string `json:"finish_reason"`
		Message      struct{ Content string }
	}
}

func wantChat(t *testing.T, s *Server, path, model string) {
	t.Helper()
	answer := askJSON[chatAnswer](t, s, http.MethodPost, path, chat(model, 8, false))
	require.Len(t, answer.Choices, 1)
	require.Equal(t, "length", answer.Choices[0].FinishReason)
	require.Regexp(t, "^[ a-z]{8}$", answer.Choices[0].Message.Content)
}
