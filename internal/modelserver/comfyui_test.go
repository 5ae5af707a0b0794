package modelserver

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func startComfy(t *testing.T, opts Options) *Server {
	t.Helper()
	opts.Name, opts.Manner, opts.VRAM = "comfyui", ComfyUI, 13*gpu.GiB
	return start(t, opts)
}

// submit queues a prompt that takes ms and returns its id.
func submit(t *testing.T, s *Server, ms int) string {
	t.Helper()
	body := fmt.Sprintf(`{"prompt":{"1":{"class_type":"KSampler","inputs":{"ms":%d}}},"client_id":"me"}`, ms)
	got := decode[map[string]any](t, want(t, 200, call(bound(t), "POST", s.URL()+"/prompt", body)).body)
	require.Equal(t, map[string]any{}, got["node_errors"])
	return got["prompt_id"].(string)
}

func get(t *testing.T, s *Server, path string) map[string]any {
	t.Helper()
	return decode[map[string]any](t, want(t, 200, call(bound(t), "GET", s.URL()+path, "")).body)
}

func remaining(t *testing.T, s *Server) any {
	t.Helper()
	return get(t, s, "/prompt")["exec_info"].(map[string]any)["queue_remaining"]
}

func worked(n int) func(Stats) bool {
	return func(s Stats) bool { return s.Worked == n && s.Queue == 0 }
}

const forever = 600_000

func TestComfyUIAnswersAPromptAtOnceAndRunsPromptsOneByOne(t *testing.T) {
	s := startComfy(t, Options{})
	first := submit(t, s, forever)
	second := submit(t, s, 1)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 && st.Queue == 2 }))
	require.EqualValues(t, 2, remaining(t, s))
	queue := get(t, s, "/api/queue")
	require.Equal(t, first, queue["queue_running"].([]any)[0].([]any)[1])
	require.Equal(t, second, queue["queue_pending"].([]any)[0].([]any)[1])
	require.Empty(t, get(t, s, "/history/"+first))
	require.Equal(t, 13*gpu.GiB, used(t, s.dir), "the first prompt loads")

	want(t, 200, call(bound(t), "POST", s.URL()+"/interrupt", ""))
	require.NoError(t, s.WaitFor(bound(t), worked(1)))
	require.EqualValues(t, 0, remaining(t, s))
	status := func(id string) any {
		return get(t, s, "/history/"+id)[id].(map[string]any)["status"].(map[string]any)["status_str"]
	}
	require.Equal(t, "error", status(first))
	require.Equal(t, "success", status(second))
	require.Len(t, get(t, s, "/history"), 2)
	stats := s.Stats()
	require.Equal(t, 1, stats.MaxConcurrent)
	require.Equal(t, 1, stats.Loads)
}

func TestComfyUIRefusesAnInvalidPromptWithoutMakingAJob(t *testing.T) {
	s := startComfy(t, Options{})
	for _, body := range []string{`{}`, `{"prompt":{}}`, `{"prompt":null}`, `{"client_id":"x"}`, `{"prompt":{"1":{}},"prompt_id":"NOT-A-UUID"}`} {
		got := decode[map[string]any](t, want(t, 400, call(bound(t), "POST", s.URL()+"/api/prompt", body)).body)
		require.Contains(t, got, "error")
		require.Contains(t, got, "node_errors")
	}
	want(t, 500, call(bound(t), "POST", s.URL()+"/prompt", `not json`))
	require.Zero(t, s.Stats().LoadsStarted)
	require.EqualValues(t, 0, remaining(t, s))
}

func TestComfyUIKeepsAClientsOwnPromptID(t *testing.T) {
	s := startComfy(t, Options{})
	const id = "0b9e3f0e-1111-4222-8333-444455556666"
	got := want(t, 200, call(bound(t), "POST", s.URL()+"/prompt", `{"prompt":{"1":{}},"prompt_id":"`+id+`","ms":1}`))
	require.Equal(t, id, decode[map[string]any](t, got.body)["prompt_id"])
	require.NoError(t, s.WaitFor(bound(t), worked(1)))
	require.Contains(t, get(t, s, "/history/"+id), id)
}

func TestComfyUIFreeActsAtOnceWhenIdle(t *testing.T) {
	s := startComfy(t, Options{Residue: 512 * gpu.MiB})
	submit(t, s, 1)
	require.NoError(t, s.WaitFor(bound(t), worked(1)))
	device := func() map[string]any { return get(t, s, "/system_stats")["devices"].([]any)[0].(map[string]any) }
	require.EqualValues(t, 13*gpu.GiB-512*gpu.MiB, device()["torch_vram_total"])
	got := want(t, 200, call(bound(t), "POST", s.URL()+"/free", `{"unload_models":true,"free_memory":true}`))
	require.Empty(t, got.body)
	require.NoError(t, s.WaitFor(bound(t), holds(512*gpu.MiB)))
	require.EqualValues(t, 0, device()["torch_vram_total"])
	require.Equal(t, 1, s.Stats().UnloadCalls)

	want(t, 200, call(bound(t), "POST", s.URL()+"/free", `{}`))
	for _, body := range []string{``, `nope`} {
		want(t, 500, call(bound(t), "POST", s.URL()+"/free", body))
	}
}

func TestComfyUIFreeActsBetweenTwoPromptsWhenBusy(t *testing.T) {
	s := startComfy(t, Options{})
	submit(t, s, forever)
	submit(t, s, 1)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	want(t, 200, call(bound(t), "POST", s.URL()+"/api/free", `{"free_memory":true}`))
	require.EqualValues(t, 2, remaining(t, s))
	require.Equal(t, 13*gpu.GiB, used(t, s.dir), "the running prompt is not disturbed")
	want(t, 200, call(bound(t), "POST", s.URL()+"/interrupt", `{}`))
	require.NoError(t, s.WaitFor(bound(t), worked(1)))
	var order []string
	for _, e := range s.Events() {
		switch e.Kind {
		case EventWorkEnd, EventWorkAbort, EventUnloadStart, EventLoadEnd:
			order = append(order, e.Kind)
		}
	}
	require.Equal(t, []string{EventLoadEnd, EventWorkAbort, EventUnloadStart, EventLoadEnd, EventWorkEnd}, order)
}

func TestComfyUIUnloadFaults(t *testing.T) {
	s := startComfy(t, Options{Preloaded: true, Faults: Faults{FailUnload: true}})
	const all = `{"unload_models":true}`
	want(t, 500, call(bound(t), "POST", s.URL()+"/free", all))
	s.SetFaults(func(f *Faults) { *f = Faults{LieUnloaded: true} })
	want(t, 200, call(bound(t), "POST", s.URL()+"/free", all))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 1 }))
	require.Equal(t, 13*gpu.GiB, used(t, s.dir))
	s.SetFaults(func(f *Faults) { *f = Faults{} })
	want(t, 200, call(bound(t), "POST", s.URL()+"/free", all))
	require.NoError(t, s.WaitFor(bound(t), holds(0)))
}

func TestComfyUIPromptWithoutRoomFailsInTheHistory(t *testing.T) {
	s := startComfy(t, Options{Total: 8 * gpu.GiB})
	id := submit(t, s, 1)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.OOMs == 1 && st.Queue == 0 }))
	text, err := json.Marshal(get(t, s, "/history/"+id))
	require.NoError(t, err)
	require.Contains(t, string(text), "CUDA out of memory")
}

func TestComfyUIEditsItsQueueAndHistory(t *testing.T) {
	s := startComfy(t, Options{})
	submit(t, s, forever)
	second, third := submit(t, s, 1), submit(t, s, 1)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 && st.Queue == 3 }))
	want(t, 200, call(bound(t), "POST", s.URL()+"/queue", `{"delete":["`+second+`"]}`))
	require.EqualValues(t, 2, remaining(t, s))
	pending := get(t, s, "/queue")["queue_pending"].([]any)
	require.Equal(t, third, pending[0].([]any)[1])
	want(t, 200, call(bound(t), "POST", s.URL()+"/api/queue", `{"clear":true}`))
	require.EqualValues(t, 1, remaining(t, s), "the running one goes on")
	want(t, 200, call(bound(t), "POST", s.URL()+"/interrupt", `{"prompt_id":"another"}`))
	require.EqualValues(t, 1, remaining(t, s))
	want(t, 200, call(bound(t), "POST", s.URL()+"/interrupt", ``))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Queue == 0 }))
	want(t, 200, call(bound(t), "POST", s.URL()+"/history", `{"clear":true}`))
	require.Empty(t, get(t, s, "/history"))
}

func TestComfyUICheapRoutesAnswerWhileItWorks(t *testing.T) {
	s := startComfy(t, Options{})
	submit(t, s, forever)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	for _, path := range []string{"/", "/queue", "/api/queue", "/history", "/system_stats", "/object_info", "/api/object_info", "/view?bytes=10", "/api/view", "/features"} {
		want(t, 200, call(bound(t), "GET", s.URL()+path, ""))
	}
	require.Equal(t, 1, s.Stats().MaxConcurrent)
}

// listenTo opens a websocket and returns a function that reads messages until
// one is of the kind and cond accepts its data.
func listenTo(t *testing.T, s *Server, path string) (await func(kind string, cond func(map[string]any) bool) map[string]any) {
	t.Helper()
	ctx := bound(t)
	conn, response, err := websocket.Dial(ctx, s.URL()+path, nil)
	require.NoError(t, err)
	if response.Body != nil {
		_ = response.Body.Close()
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	return func(kind string, cond func(map[string]any) bool) map[string]any {
		t.Helper()
		for {
			_, text, err := conn.Read(ctx)
			require.NoError(t, err, "waiting for %s", kind)
			message := decode[struct {
				Type string
				Data map[string]any
			}](t, text)
			if message.Type == kind && (cond == nil || cond(message.Data)) {
				return message.Data
			}
		}
	}
}

func leaves(n float64) func(map[string]any) bool {
	return func(data map[string]any) bool {
		return data["status"].(map[string]any)["exec_info"].(map[string]any)["queue_remaining"] == n
	}
}

func TestComfyUIWebsocketTellsOfTheQueue(t *testing.T) {
	s := startComfy(t, Options{})
	mine := listenTo(t, s, "/ws?clientId=me")
	other := listenTo(t, s, "/api/ws")
	require.Equal(t, "me", mine("status", leaves(0))["sid"])
	other("status", leaves(0))
	id := submit(t, s, 1)
	other("status", leaves(1))
	other("status", leaves(0))
	require.Equal(t, id, mine("execution_start", nil)["prompt_id"])
	done := mine("executing", func(data map[string]any) bool { return data["node"] == nil })
	require.Equal(t, id, done["prompt_id"])
	mine("execution_success", nil)
	require.Equal(t, 2, s.Stats().Sockets)
}

func TestComfyUIClientIDThatIsUsedAgainDisplacesTheOldSocket(t *testing.T) {
	s := startComfy(t, Options{})
	first := listenTo(t, s, "/ws?clientId=me")
	first("status", nil)
	second := listenTo(t, s, "/ws?clientId=me")
	second("status", nil)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Sockets == 1 }))
	submit(t, s, 1)
	second("execution_success", nil)
}

func TestComfyUIKillEndsSocketsAndForgetsTheQueue(t *testing.T) {
	s := startComfy(t, Options{})
	ctx := bound(t)
	conn, response, err := websocket.Dial(ctx, s.URL()+"/ws", nil)
	require.NoError(t, err)
	if response.Body != nil {
		_ = response.Body.Close()
	}
	defer func() { _ = conn.CloseNow() }()
	submit(t, s, forever)
	require.NoError(t, s.WaitFor(ctx, func(st Stats) bool { return st.Working == 1 }))
	s.Kill()
	for err = nil; err == nil; {
		_, _, err = conn.Read(ctx)
	}
	require.NoError(t, ctx.Err(), "the socket must end, not the wait")
	require.Zero(t, s.Stats().Sockets)
	require.NoError(t, s.Restart())
	require.EqualValues(t, 0, remaining(t, s))
	require.Zero(t, used(t, s.dir))
}

func TestComfyUIDiesOnAPrompt(t *testing.T) {
	died := make(chan struct{})
	s := startComfy(t, Options{Faults: Faults{DieOnRequest: true}, OnDeath: func() { close(died) }})
	call(bound(t), "POST", s.URL()+"/prompt", `{"prompt":{"1":{"class_type":"KSampler","inputs":{"ms":1}}}}`) // its answer may come, or die with it
	select {
	case <-died:
	case <-time.After(20 * time.Second):
		t.Fatal("it lives")
	}
	require.False(t, s.Stats().Alive)
	require.Zero(t, used(t, s.dir))
}
