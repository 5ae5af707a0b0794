//go:build linux && real

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/test/real"
)

// realConsumer is a real server: where it is or what starts it, and its preset.
type realConsumer struct {
	name   string
	preset string
	server string // its URL; else the broker starts it
	starts string // its command
	lines  string // of the consumer
}

// realSite is a site of real servers. The simulated card is as large as what the claims need; the servers compute on the CPU.
func realSite(t *testing.T, total string, all ...realConsumer) *site {
	t.Helper()
	var consumers, routes strings.Builder
	for _, c := range all {
		where := "upstream " + strings.TrimPrefix(c.server, "http://")
		if c.starts != "" {
			where = fmt.Sprintf("process %s {\nports %s\ngrace 3s\n}", c.starts, portRange(t))
		}
		fmt.Fprintf(&consumers, "consumer %s {\npreset %s\n%s\n%s\n}\n", c.name, c.preset, where, c.lines)
		fmt.Fprintf(&routes, "handle_path /%s/* {\ngpu_broker %s\nreverse_proxy {http.gpu_broker.upstream}\n}\n", c.name, c.name)
	}
	return start(t, layout{Total: total, Global: consumers.String(), Routes: routes.String()})
}

// aModel is a consumer's line for a model that takes 6 GiB.
func aModel(name string) string { return "model " + name + " {\nvram 6GiB\n}\n" }

// commandOf is a program and its arguments, as a Caddyfile has them; port stands for the port that the broker gives.
func commandOf(program string, port int, arguments []string) string {
	line := program + " " + strings.Join(arguments, " ")
	return strings.Replace(line, fmt.Sprintf("--port %d", port), "--port {gpu_broker.port}", 1)
}

// startedLlama is the command of a llama-server, and a text that only its command line has.
func startedLlama(t *testing.T, model string) (command, mark string) {
	t.Helper()
	folder := t.TempDir()
	arguments := real.LlamaArguments(1, "--metrics", "--model", real.LlamaModel(t, folder, model))
	return commandOf(real.LlamaServer(t), 1, arguments), folder
}

// startedWhisper is the command of a whisper-server, and a text that only its command line has.
func startedWhisper(t *testing.T) (command, mark string) {
	t.Helper()
	folder := t.TempDir()
	return commandOf(real.WhisperServer(t), 1, real.WhisperArguments(1, real.WhisperModel(t, folder, 1))), folder
}

func chatBody(model string, tokens int, stream bool) string {
	return fmt.Sprintf(`{"model":%q,"max_tokens":%d,"stream":%t,"messages":[{"role":"user","content":"hello"}]}`, model, tokens, stream)
}

// isChat tells what is wrong with an answer to a chat; empty: nothing.
func isChat(a answer) string {
	var doc struct {
		Choices []struct {
			FinishReason string `json:"finish_reason"`
			Message      struct{ Content string }
		}
	}
	if a.err != nil || a.status != http.StatusOK || json.Unmarshal(a.body, &doc) != nil || len(doc.Choices) != 1 || doc.Choices[0].Message.Content == "" {
		return fmt.Sprintf("want a chat's answer, found status %d, error %v: %s", a.status, a.err, a.body)
	}
	return ""
}

// tell sends a body and reads the whole answer, however long that takes; also for goroutines.
func (s *site) tell(path, contentType string, body io.Reader) (a answer) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", s.url+path, body)
	if err != nil {
		return answer{err: err}
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := s.client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	a.status, a.header = resp.StatusCode, resp.Header
	a.body, a.err = io.ReadAll(resp.Body)
	return a
}

func (s *site) tellJSON(path, body string) answer {
	return s.tell(path, "application/json", strings.NewReader(body))
}

func (s *site) sendJSON(path, body string) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- s.tellJSON(path, body) }()
	return out
}

// noneFailed says that every load and unload went well: none ran out of memory, either.
func (s *site) noneFailed() {
	s.t.Helper()
	require.Empty(s.t, append(s.decisions("load_failed"), s.decisions("unload_failed")...))
}

func (s *site) chats(path, model string) {
	s.t.Helper()
	require.Empty(s.t, isChat(s.tellJSON(path, chatBody(model, 8, false))))
}

// hears sends two seconds of sound to a whisper-server.
func (s *site) hears(path string) answer {
	form, contentType := real.Form(real.Sound(2), "response_format", "text", "temperature_inc", "0")
	return s.tell(path, contentType, form)
}

func isTranscript(a answer) string {
	if a.err != nil || a.status != http.StatusOK || len(strings.TrimSpace(string(a.body))) < 20 {
		return fmt.Sprintf("want a transcript, found status %d, error %v: %s", a.status, a.err, a.body)
	}
	return ""
}

// realStream is a chat whose answer comes in pieces.
type realStream struct{ rest chan string }

// streamsChat starts a chat and returns once its first piece is there.
func (s *site) streamsChat(path, model string, tokens int) realStream {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	s.t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, "POST", s.url+path, strings.NewReader(chatBody(model, tokens, true)))
	require.NoError(s.t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		s.t.Fatalf("want a stream, found status %d: %s", resp.StatusCode, text)
	}
	lines := bufio.NewReader(resp.Body)
	first, err := lines.ReadString('\n')
	require.NoError(s.t, err)
	out := realStream{rest: make(chan string, 1)}
	go func() {
		defer resp.Body.Close()
		var rest bytes.Buffer
		rest.WriteString(first)
		_, _ = rest.ReadFrom(lines) // a cut one lacks its end
		out.rest <- rest.String()
	}()
	return out
}

// whole wants the stream to come to its own end.
func (s *site) whole(st realStream) {
	s.t.Helper()
	text := <-st.rest // its context bounds it
	require.Contains(s.t, text, `"finish_reason":"length"`)
	require.Contains(s.t, text, "[DONE]")
}

// askReal asks a server past the broker and reads its JSON.
func askReal[T any](t *testing.T, url string) (out T) {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&out))
	return out
}

// holdsOnly waits until a server has exactly these models loaded, by its own list.
func (s *site) holdsOnly(list func() []string, want ...string) {
	s.t.Helper()
	s.until(fmt.Sprintf("its models are %q", want), func() bool { return slices.Equal(want, list()) })
}

// routerHas lists what a llama router has loaded.
func routerHas(t *testing.T, url string) func() []string {
	return func() (loaded []string) {
		for _, m := range askReal[struct {
			Data []struct {
				ID     string
				Status struct{ Value string }
			}
		}](t, url+"/models").Data {
			if m.Status.Value != "unloaded" {
				loaded = append(loaded, m.ID)
			}
		}
		return loaded
	}
}
