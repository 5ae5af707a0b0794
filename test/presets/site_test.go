package presets_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/test/caddytest"
)

func TestMain(m *testing.M) { caddytest.Exit(m.Run()) }

// The card holds one of its two consumers' models, and no second.
const (
	card  = 10 * gpu.GiB
	model = 6 * gpu.GiB
	rest  = 512 * gpu.MiB // stays of a server while its process lives
)

// layout is what a site is made of.
type layout struct {
	options modelserver.Options // of the server; its name is server
	lines   string              // of its consumer's block
	global  string              // more lines of the global option
	process bool                // the broker starts it
}

// site is a running Caddy with a server and its rival for the card.
type site struct {
	*caddytest.Caddy
	t      *testing.T
	url    string
	server *modelserver.Server // nil if the broker starts it
	rival  *modelserver.Server
}

// start runs a site until the test ends.
func start(t *testing.T, l layout) *site {
	t.Helper()
	s := &site{Caddy: caddytest.New(t, t.TempDir()), t: t, url: "http://" + caddytest.FreeAddr(t)}
	s.Broker = s.url + "/gpu"
	run := func(o modelserver.Options) *modelserver.Server {
		o.Total, o.LoadTime, o.UnloadTime, o.RunTime = card, 20*time.Millisecond, 10*time.Millisecond, 5*time.Millisecond
		return s.Pretend(o)
	}
	s.rival = run(modelserver.Options{Name: "rival", VRAM: model})
	lines := l.lines
	if l.process {
		lines += s.process(l.options)
	} else {
		l.options.Name = "server"
		s.server = run(l.options)
		lines += "\nupstream " + s.server.Addr()
	}
	s.Run("Caddyfile", fmt.Sprintf(`{
	admin off
	gpu_broker {
		gpu simulated %d {
			dir %s
		}
		%s
		consumer server {
			%s
		}
		consumer rival {
			upstream %s
			vram %d
			health /health {
				loaded $.loaded
			}
			load POST /api/admin/load
			unload POST /api/admin/unload
		}
	}
}
%s {
	handle_path /server/* {
		gpu_broker server
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle_path /rival/* {
		gpu_broker rival
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle /gpu/* {
		gpu_broker_status
	}
}
`, card, s.Sim, settings(l.global), lines, s.rival.Addr(), model, s.url))
	return s
}

// settings are the site's, with times that real servers need made short, unless a test wants them otherwise.
func settings(own string) string {
	lines := []string{own}
	for _, line := range []string{"hold 0", "overtake 0", "overtake_min 0", "probe_interval 100ms", "probe_timeout 5s", "outsider_wait 5s"} {
		if word, _, _ := strings.Cut(line, " "); !strings.Contains(own, word+" ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n")
}

// process is the line by which the broker starts the server.
func (s *site) process(o modelserver.Options) string {
	bin, err := caddytest.Modelserver()
	require.NoError(s.t, err)
	return fmt.Sprintf("\nprocess %s -name server -manner %s -vram %d -addr 127.0.0.1:{gpu_broker.port} -sim-dir %s -total %d -load 20ms -unload 10ms -run 5ms {\nports %s\ngrace 2s\n}",
		bin, o.Manner, model, s.Sim, card, caddytest.PortRange(s.t))
}

// answer is what a request got.
type answer struct {
	status int
	body   []byte
	err    error
}

// to sends a request to a consumer, or, as somebody would who gets past the broker, to base.
func (s *site) to(base string, a ask) answer {
	req, err := http.NewRequest(a.method, base+a.path, strings.NewReader(a.body))
	if err != nil {
		return answer{err: err}
	}
	if a.body != "" {
		req.Header.Set("Content-Type", a.kind)
	}
	resp, err := s.Client.Do(req)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, body, err}
}

func (s *site) ask(a ask) answer { return s.to(s.url+"/server", a) }

// send is to in the background.
func (s *site) send(base string, a ask) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- s.to(base, a) }()
	return out
}

func (s *site) sendRival() <-chan answer { return s.send(s.url+"/rival", synthesize) }

var synthesize = ask{"POST", "/synthesize", "text/plain", "hello"}

// await takes an answer that must come, and be good.
func (s *site) await(what string, ch <-chan answer) answer {
	s.t.Helper()
	select {
	case a := <-ch:
		a.good(s.t, what)
		return a
	case <-time.After(caddytest.Patience):
		s.t.Fatalf("%s: no answer", what)
		return answer{}
	}
}

// good requires an answer of a server, whole.
func (a answer) good(t *testing.T, what string) {
	t.Helper()
	require.NoError(t, a.err, what)
	require.Contains(t, []int{200, 201, 202}, a.status, "%s: %.500s", what, a.body)
}

// slot is the slot of the server, or of one of its models.
func (s *site) slot(model string) broker.Slot {
	s.t.Helper()
	for _, slot := range s.Status().Consumers["server"].Slots {
		if slot.Model == model {
			return slot
		}
	}
	s.t.Fatalf("there is no slot of %q", model)
	return broker.Slot{}
}

// failures are the decisions that say that something did not go as it should. That blocked requests are refused is as it should be.
func (s *site) failures() (found []string) {
	s.t.Helper()
	var doc struct {
		Decisions []struct{ Kind, Consumer, Code, Reason string }
	}
	a := s.to(s.url, ask{method: "GET", path: "/gpu/decisions"})
	require.NoError(s.t, a.err)
	require.NoError(s.t, json.Unmarshal(a.body, &doc))
	for _, d := range doc.Decisions {
		switch {
		case d.Code == "blocked":
		case slices.Contains([]string{"unload_failed", "load_failed", "unhealthy", "refuse", "busy_unknown", "reopen"}, d.Kind):
			found = append(found, fmt.Sprintf("%s of %s: %s %s", d.Kind, d.Consumer, d.Code, d.Reason))
		}
	}
	return found
}
