package e2e

import (
	"context"
	"encoding/csv"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
	"github.com/gpu-broker/caddy-gpu-broker/simulate"
)

// requests are the lines of a request log, by column; nil: there are none yet.
func (s *site) requests(name string) (out []map[string]string) {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dir, name))
	if os.IsNotExist(err) {
		return nil
	}
	require.NoError(s.t, err)
	rows, err := csv.NewReader(strings.NewReader(string(text))).ReadAll()
	require.NoError(s.t, err)
	for i, row := range rows {
		if i == 0 {
			continue
		}
		line := map[string]string{}
		for i, column := range rows[0] {
			line[column] = row[i]
		}
		out = append(out, line)
	}
	return out
}

// waitRequests waits until a request log has so many lines.
func (s *site) waitRequests(name string, n int) []map[string]string {
	s.t.Helper()
	s.until(name+" has "+strconv.Itoa(n)+" lines", func() bool { return len(s.requests(name)) >= n })
	got := s.requests(name)
	require.Len(s.t, got, n)
	return got
}

func secondsOf(t *testing.T, text string) float64 {
	t.Helper()
	n, err := strconv.ParseFloat(text, 64)
	require.NoError(t, err)
	return n
}

func TestRequestLogTellsWhoWasServedWhoLeftAndWhoWasRefused(t *testing.T) {
	t.Parallel()
	const log = "request_log {env.HOME}/requests.csv"
	a := plainModel("a", 9)
	a.Route = "priority 30"
	a.Lines = "budget 1500ms"
	s := start(t, layout{Global: log, Consumers: []consumer{a, plainModel("b", 9)}})
	began := time.Now()
	require.Equal(t, 200, s.post("/a/synthesize?ms=40", "x").status)
	got := s.waitRequests("requests.csv", 1)[0]
	at, err := time.Parse(time.RFC3339, got["time"])
	require.NoError(t, err)
	require.WithinDuration(t, began, at, time.Minute)
	require.Equal(t, "a", got["consumer"])
	require.Equal(t, "200", got["code"])
	require.Equal(t, "30", got["priority"])
	require.Empty(t, got["patience"])
	require.GreaterOrEqual(t, secondsOf(t, got["service_seconds"]), 0.04)
	require.GreaterOrEqual(t, secondsOf(t, got["load_seconds"]), 0.02)

	_, end := s.works("a")
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := s.goCtx(ctx, "POST", "/b/synthesize", "x")
	s.until("it has waited for as long as the log can tell", func() bool {
		queue := s.status().Queue
		return len(queue) == 1 && queue[0].WaitedMS >= 1
	})
	leave()
	require.ErrorIs(t, s.await(left).err, context.Canceled)
	got = s.waitRequests("requests.csv", 2)[1]
	require.Equal(t, "b", got["consumer"])
	require.Equal(t, "client_left", got["code"])
	require.Equal(t, "100", got["priority"])
	require.Empty(t, got["service_seconds"])
	require.Positive(t, secondsOf(t, got["patience"]))
	require.Equal(t, got["wait_seconds"], got["patience"])

	require.Equal(t, 504, s.post("/a/synthesize", "x").status)
	got = s.waitRequests("requests.csv", 3)[2]
	require.Equal(t, "budget_exceeded", got["code"])
	require.Empty(t, got["service_seconds"])
	require.Empty(t, got["patience"], "it did not leave by itself")
	require.GreaterOrEqual(t, secondsOf(t, got["wait_seconds"]), 1.49)
	end()

	// It survives a reload, follows its path, and ends with its word.
	s.waitRequests("requests.csv", 4)
	s.reloaded(func(c string) string { return c + "\n# other\n" })
	s.serve("a")
	s.waitRequests("requests.csv", 5)
	s.reloaded(func(c string) string { return strings.Replace(c, "requests.csv", "others.csv", 1) })
	s.serve("a")
	s.waitRequests("others.csv", 1)
	s.reloaded(func(c string) string { return strings.Replace(c, "request_log {env.HOME}/others.csv", "", 1) })
	s.serve("a")
	s.reloaded(func(c string) string { return insert(c, "request_log {env.HOME}/third.csv") })
	s.serve("a")
	s.halt() // what is still in memory is written
	require.Len(t, s.requests("third.csv"), 1)
	require.Len(t, s.requests("requests.csv"), 5)
	require.Len(t, s.requests("others.csv"), 1)
	text, err := os.ReadFile(filepath.Join(s.dir, "requests.csv"))
	require.NoError(t, err)
	require.NotContains(t, string(text), "127.0.0.1", "nobody's address")
	// The simulator reads it. Who was never served gets the mean of the consumer's others, so b needs one.
	more := strings.Replace(string(text), "\n", "\n2026-01-01T00:00:00.000Z,b,2.000,100,,0.000,0.000,200\n", 1)
	replay, _, err := simulate.ReadTrace(strings.NewReader(more), "requests.csv", func(name string) (string, int, error) { return name, 100, nil })
	require.NoError(t, err)
	require.Len(t, replay, 6)
	require.Equal(t, 30, replay[1].Priority)
	require.GreaterOrEqual(t, replay[1].Service, 40*time.Millisecond)
	require.Equal(t, 2*time.Second, replay[2].Service)
	require.Positive(t, replay[2].Patience)
	s.again()
}

func TestRequestLogTellsHowLongWorkTookThatOutlivedItsAnswer(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "request_log {env.HOME}/requests.csv", Consumers: []consumer{comfyui()}})
	end := s.holdWork("comfyui")
	queuePrompt(t, s.url+"/comfyui/prompt", prompt)
	queuePrompt(t, s.url+"/comfyui/prompt", prompt)
	s.working("comfyui")
	asked := busyQuestions(s.servers["comfyui"])
	s.until("it was asked whether it works", func() bool { return busyQuestions(s.servers["comfyui"]) > asked+2 })
	require.Empty(t, s.requests("requests.csv"), "its work is not over")
	end()
	s.idle("comfyui")
	for _, got := range s.waitRequests("requests.csv", 2) {
		require.Equal(t, "200", got["code"])
		require.Greater(t, secondsOf(t, got["service_seconds"]), 0.2, "an equal share of half a second and more")
	}
	require.Equal(t, 2, s.servers["comfyui"].Stats().Worked)
}

func TestRequestsOfServersThatCannotBeReachedAreLoggedOnce(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "request_log {env.HOME}/requests.csv\nprobe_interval 1h", Consumers: []consumer{plainModel("a", 4)}})
	s.serve("a")
	s.servers["a"].SetFaults(func(f *modelserver.Faults) { f.DieOnRequest = true })
	require.Equal(t, 502, s.post("/a/synthesize", "x").status)
	require.Equal(t, 503, s.post("/a/synthesize", "x").status)
	got := s.waitRequests("requests.csv", 3)
	require.Equal(t, "server_died", got[1]["code"])
	require.Equal(t, "unhealthy", got[2]["code"])
	require.Empty(t, got[2]["service_seconds"])
}

// N4: the model is the primary's, the consumer that served another.
func TestN4_TheLogsNameWhoServedAfterAFallback(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	fallback := plainModel("small", 4)
	fallback.Lines = "alias gpt-4o"
	s := start(t, layout{
		Global: "request_log {env.HOME}/requests.csv\nconsumer sky {\ncloud\nupstream " + up.addr() + "\n}",
		Consumers: []consumer{
			shelf("ollama", modelserver.Ollama, "fallback sky\nmodel llama3.1:8b {\nvram 9GiB\nalias gpt-4o-mini\n}", map[string]float64{"llama3.1:8b": 9}),
			plainModel("large", 9, "fallback small"), fallback, plainModel("other", 9),
		},
		Routes: "handle_path /all/* {\ngpu_broker {\nmodel_from body\n}\nreverse_proxy {http.gpu_broker.upstream}\n}",
	})
	ask := func(model, want string) {
		t.Helper()
		a := s.askJSON("/all/v1/chat/completions", `{"model":"`+model+`","messages":[{"role":"user","content":"a"}]}`)
		require.Equal(t, want, a.header.Get("X-Gpu-Broker-Consumer"), "%s", a.body)
	}
	ask("gpt-4o-mini", "ollama")
	s.serve("small")
	s.serve("other") // llama3.1:8b makes way
	ask("gpt-4o-mini", "sky")
	ask("large", "small")
	s.serve("large")
	ask("other", "other")
	var consumers []string
	for _, line := range s.waitRequests("requests.csv", 7) {
		consumers = append(consumers, line["consumer"])
	}
	require.Equal(t, []string{"ollama/llama3.1:8b", "small", "other", "sky", "small", "small", "other"}, consumers)
	s.fallbackTold("ollama", "sky", 1)
	s.fallbackTold("large", "small", 2)

	// The log can be replayed by the configuration that wrote it.
	text, err := os.ReadFile(filepath.Join(s.dir, "requests.csv"))
	require.NoError(t, err)
	known := map[string]bool{"ollama/llama3.1:8b": true, "small": true, "other": true, "sky": true}
	replay, _, err := simulate.ReadTrace(strings.NewReader(string(text)), "requests.csv", func(name string) (string, int, error) {
		require.True(t, known[name], name)
		return name, 100, nil
	})
	require.NoError(t, err)
	require.Len(t, replay, 7)
}

// N4: who left while he waited for a fallback waited for the fallback.
func TestN4_TheLogsNameTheFallbackThatWasWaitedFor(t *testing.T) {
	t.Parallel()
	s := start(t, layout{
		Global:    "request_log {env.HOME}/requests.csv\nmax_queue 1",
		Consumers: []consumer{plainModel("large", 9, "fallback small"), plainModel("small", 4), plainModel("other", 9)},
		Routes:    "log {\noutput file {env.XDG_DATA_HOME}/access.log\n}",
	})
	s.serve("small")
	s.serve("other")
	_, end := s.works("small")
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := s.goCtx(ctx, "POST", "/large/synthesize?left", "x")
	s.waitQueued("small", 1)
	full := s.post("/large/synthesize?full", "x")
	require.Equal(t, 503, full.status)
	require.Equal(t, "small", s.refusal(full).Consumer)
	leave()
	require.Error(t, s.await(left).err)
	for i, code := range []string{"queue_full", "client_left"} {
		got := s.waitRequests("requests.csv", 4)[2+i]
		require.Equal(t, "small", got["consumer"])
		require.Equal(t, code, got["code"])
		require.Equal(t, "small", s.logged("/large/synthesize?"+[]string{"full", "left"}[i]).Consumer)
	}
	require.EqualValues(t, 1, s.metric(`errors_total{code="queue_full",consumer="small"}`))
	s.fallbackTold("large", "small", 2)
	end()
}
