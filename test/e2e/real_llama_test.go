//go:build linux && real

package e2e

import (
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/test/real"
)

const llamaChats = "/v1/chat/completions"

func TestRealLlamaServerIsStartedStoppedAndNeverCut(t *testing.T) {
	t.Parallel()
	slow, slowMark := startedLlama(t, real.Slow)
	rival, rivalMark := startedLlama(t, real.Tiny)
	s := realSite(t, "8GiB",
		realConsumer{name: "llm", preset: "llamacpp", starts: slow, lines: "vram 6GiB"},
		realConsumer{name: "rival", preset: "llamacpp", starts: rival, lines: "vram 6GiB"})
	require.Empty(t, alive(t, slowMark), "nobody has asked yet")
	began := time.Now()
	s.chats("/llm"+llamaChats, "any")
	t.Logf("first answer of a cold llama-server: %s", time.Since(began))
	require.Len(t, alive(t, slowMark), 1)

	// Its answer is whole while a rival waits for the card.
	running := s.streamsChat("/llm"+llamaChats, "any", 150)
	waits := s.sendJSON("/rival"+llamaChats, chatBody("any", 8, false))
	s.waitQueued("rival", 1)
	require.Empty(t, alive(t, rivalMark), "the card is taken")
	s.whole(running)
	require.Empty(t, isChat(s.await(waits)))
	require.Empty(t, alive(t, slowMark), "it made way by its end")
	require.Len(t, alive(t, rivalMark), 1)

	s.chats("/llm"+llamaChats, "any")
	require.Equal(t, 2, s.process("llm").Starts)
	require.Empty(t, alive(t, rivalMark))

	// It dies; the next request is served.
	require.NoError(t, syscall.Kill(s.process("llm").PID, syscall.SIGKILL))
	s.until("its death is known", func() bool { return s.slotOf("llm") == "IDLE" })
	s.chats("/llm"+llamaChats, "any")
	require.Equal(t, 3, s.process("llm").Starts)
	s.noneFailed()
	s.halt()
	require.Empty(t, append(alive(t, slowMark), alive(t, rivalMark)...), "Caddy has stopped what it had started")
}

// Somebody who knows its address uses it past the broker: its own metrics tell that, and it is not stopped before it is done.
func TestRealLlamaServerThatIsBusyPastTheBrokerIsNotStopped(t *testing.T) {
	t.Parallel()
	slow, mark := startedLlama(t, real.Slow)
	rival, _ := startedLlama(t, real.Tiny)
	s := realSite(t, "8GiB",
		realConsumer{name: "llm", preset: "llamacpp", starts: slow, lines: "vram 6GiB"},
		realConsumer{name: "rival", preset: "llamacpp", starts: rival, lines: "vram 6GiB"})
	s.chats("/llm"+llamaChats, "any")
	past := *s
	past.url = "http://" + s.process("llm").Address
	running := past.streamsChat(llamaChats, "any", 150)
	waits := s.sendJSON("/rival"+llamaChats, chatBody("any", 8, false))
	s.waitQueued("rival", 1)
	s.whole(running)
	require.Empty(t, isChat(s.await(waits)))
	require.Empty(t, alive(t, mark))
}

func TestRealLlamaRouterMakesWayModelByModel(t *testing.T) {
	t.Parallel()
	router := real.StartLlamaRouter(t, "--no-models-autoload")
	has := routerHas(t, router.URL)
	s := realSite(t, "8GiB", realConsumer{name: "router", preset: "llamacpp-router", server: router.URL, lines: aModel(real.Tiny) + aModel(real.Slow)})
	s.holdsOnly(has)
	s.chats("/router"+llamaChats, real.Tiny)
	s.holdsOnly(has, real.Tiny)
	require.Equal(t, "READY", s.slot("router", real.Tiny).State)

	s.chats("/router"+llamaChats, real.Slow)
	s.holdsOnly(has, real.Slow)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)

	// The router would cut what runs: the broker waits for its end.
	running := s.streamsChat("/router"+llamaChats, real.Slow, 150)
	waits := s.sendJSON("/router"+llamaChats, chatBody(real.Tiny, 8, false))
	s.until("a chat waits", func() bool { return s.status().Consumers["router"].Waiting == 1 })
	s.whole(running)
	require.Empty(t, isChat(s.await(waits)))
	s.holdsOnly(has, real.Tiny)
	s.noneFailed()

	// Its own routes for that are not for clients.
	require.Equal(t, http.StatusForbidden, s.askJSON("/router/models/unload", `{"model":"tiny"}`).status)
	s.holdsOnly(has, real.Tiny)
}

// TestRealLlamaServerColdStart tells what the broker adds to llama-server's own start.
func TestRealLlamaServerColdStart(t *testing.T) {
	const tries = 3
	command, _ := startedLlama(t, real.Tiny)
	s := realSite(t, "8GiB", realConsumer{name: "llm", preset: "llamacpp", starts: command, lines: "vram 6GiB"})
	body := chatBody("any", 1, false)
	var own, through time.Duration
	for range tries {
		own += ownLlamaStart(t, command, body)
		began := time.Now()
		s.chats("/llm"+llamaChats, "any")
		through += time.Since(began)
		s.doByHand("consumers/llm/unload")
	}
	t.Logf("cold start of llama-server: %s to the answer through the broker, %s its own (means of %d)", through/tries, own/tries, tries)
	require.Less(t, through, own+tries*2*time.Second, "two seconds more each would be no noise")
}

// ownLlamaStart is how long the server takes from its start to its first answer, with nothing in between.
func ownLlamaStart(t *testing.T, command, body string) time.Duration {
	t.Helper()
	addr := freeAddr(t)
	words := strings.Fields(strings.Replace(command, "{gpu_broker.port}", addr[strings.LastIndexByte(addr, ':')+1:], 1))
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Dir = filepath.Dir(words[0])
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	began := time.Now()
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for {
		resp, err := http.Post("http://"+addr+llamaChats, "application/json", strings.NewReader(body))
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return time.Since(began)
			}
		}
		require.Less(t, time.Since(began), patience)
		time.Sleep(time.Millisecond)
	}
}
