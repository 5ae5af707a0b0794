package e2e

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// cheapAnswer is the longest that a request which needs no GPU may take (issue 2, A4).
const cheapAnswer = 50 * time.Millisecond

// longPrompt is a prompt whose work takes so many milliseconds.
func longPrompt(ms string) string {
	return `{"prompt":{"1":{"class_type":"KSampler","inputs":{"ms":` + ms + `}}}}`
}

// queuePrompt gives ComfyUI a prompt at a URL, and returns its id.
func queuePrompt(t *testing.T, url, prompt string) string {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(prompt))
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 200, resp.StatusCode, string(body))
	var doc struct {
		ID string `json:"prompt_id"`
	}
	require.NoError(t, json.Unmarshal(body, &doc))
	require.NotEmpty(t, doc.ID)
	return doc.ID
}

// times are when the events of a kind happened at a server.
func times(s *modelserver.Server, kind string) (out []time.Time) {
	for _, e := range s.Events() {
		if e.Kind == kind {
			out = append(out, e.At)
		}
	}
	return out
}

func TestNobodyElseGetsTheGPUUntilAllPromptsAreDoneAlsoThosePastTheBroker(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	comfy, voice := s.servers["comfyui"], s.servers["mvoice"]
	end := s.holdWork("comfyui")
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("100"))
	queuePrompt(t, s.url+"/comfyui/api/prompt", longPrompt("100"))
	queuePrompt(t, comfy.URL()+"/prompt", longPrompt("100"))
	speech := s.send("POST", "/mvoice/synthesize", "hello")
	s.waitQueued("mvoice", 1)
	end()
	require.Equal(t, 200, s.await(speech).status)
	done := times(comfy, modelserver.EventWorkEnd)
	require.Len(t, done, 3)
	began := times(voice, modelserver.EventLoadStart)
	require.Len(t, began, 1)
	require.True(t, began[0].After(done[2]), "mvoice loads after the last prompt")
	called := times(comfy, modelserver.EventUnloadCall)
	require.Len(t, called, 1)
	require.True(t, called[0].After(done[2]), "comfyui is told to unload after the last prompt")
	require.Empty(t, modelserver.Overlap(comfy, voice))
	require.Zero(t, comfy.Stats().Aborted)
	require.Zero(t, comfy.Stats().OOMs+voice.Stats().OOMs)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
}

func TestPromptThatWentPastTheBrokerAloneIsWaitedFor(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	comfy, voice := s.servers["comfyui"], s.servers["mvoice"]
	queuePrompt(t, s.url+"/comfyui/prompt", prompt)
	s.idle("comfyui")
	end := s.holdWork("comfyui")
	queuePrompt(t, comfy.URL()+"/prompt", prompt) // the broker holds nothing for it
	asked := busyQuestions(comfy)
	speech := s.send("POST", "/mvoice/synthesize", "hello")
	s.until("it was asked whether it works", func() bool { return busyQuestions(comfy) > asked })
	end()
	require.Equal(t, 200, s.await(speech).status)
	done := times(comfy, modelserver.EventWorkEnd)
	require.Len(t, done, 2)
	called := times(comfy, modelserver.EventUnloadCall)
	require.Len(t, called, 1)
	require.True(t, called[0].After(done[1]), "comfyui is told to unload after the prompt that nobody announced")
	require.Empty(t, modelserver.Overlap(comfy, voice))
}

func TestPromptsAreQueuedAtTheServerWhileOneRuns(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	comfy := s.servers["comfyui"]
	end := s.holdWork("comfyui")
	first := queuePrompt(t, s.url+"/comfyui/prompt", prompt)
	for range 4 { // concurrency is 1: enqueueing isn't bounded by it
		queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("0"))
	}
	require.Equal(t, 5, comfy.Stats().Queue)
	require.NotContains(t, string(s.get("/comfyui/history").body), first, "the first prompt must still run")
	end()
	s.idle("comfyui")
	require.Equal(t, 5, comfy.Stats().Worked)
	require.Zero(t, comfy.Stats().Queue)
}

func TestPromptThatFailsValidationReleasesAtOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		warm bool
	}{{"cold", false}, {"warm", true}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
			comfy := s.servers["comfyui"]
			if c.warm {
				queuePrompt(t, s.url+"/comfyui/prompt", prompt)
				s.idle("comfyui")
			}
			asked := busyQuestions(comfy)
			a := s.post("/comfyui/prompt", `{"prompt":{}}`)
			require.Equal(t, 400, a.status)
			require.Contains(t, string(a.body), "prompt_no_outputs", "the server's own answer")
			require.Empty(t, a.code())
			s.idle("comfyui")
			require.Equal(t, asked, busyQuestions(comfy), "no question whether work goes on: there is none")
			require.Zero(t, s.status().GPUs[0].Lock)
			require.Equal(t, 200, s.post("/mvoice/synthesize", "hello").status)
			require.Zero(t, comfy.Stats().OOMs+s.servers["mvoice"].Stats().OOMs)
		})
	}
}

// busyQuestions is how often a ComfyUI was asked for the length of its queue.
func busyQuestions(s *modelserver.Server) (n int) {
	for _, e := range s.Events() {
		if e.Kind == modelserver.EventRequestStart && e.Method == "GET" && e.URI == "/prompt" {
			n++
		}
	}
	return n
}

func TestFirstPromptAfterAStartMakesRoomForItself(t *testing.T) {
	t.Parallel()
	voice := mvoice()
	voice.Preloaded = true
	s := start(t, layout{Consumers: []consumer{voice, comfyui()}})
	s.waitState("mvoice", "READY")
	require.Equal(t, "IDLE", s.state("comfyui"), "comfyui can't tell, and isn't taken for loaded")
	queuePrompt(t, s.url+"/comfyui/prompt", prompt)
	s.idle("comfyui")

	comfy := s.servers["comfyui"]
	gone := times(s.servers["mvoice"], modelserver.EventUnloadEnd)
	require.Len(t, gone, 1)
	arrived, err := comfy.WaitForEvent(t.Context(), func(e modelserver.Event) bool {
		return e.Kind == modelserver.EventRequestStart && e.Method == "POST" && e.URI == "/prompt"
	})
	require.NoError(t, err)
	require.True(t, arrived.At.After(gone[0]), "the prompt is passed on once mvoice is gone")
	require.Equal(t, 1, comfy.Stats().Worked)
	require.Zero(t, comfy.Stats().OOMs)
	require.EqualValues(t, 1, s.status().Scheduler.Evictions)
}

func TestUploadsAndInterruptsNeedNoGPU(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("60000"))
	require.NoError(t, s.servers["comfyui"].WaitFor(t.Context(), func(now modelserver.Stats) bool { return now.Working == 1 }))
	speech := s.send("POST", "/mvoice/synthesize", "hello")
	s.waitQueued("mvoice", 1)
	require.Equal(t, 200, s.post("/comfyui/upload/image", "an image").status)
	require.Equal(t, 200, s.post("/comfyui/interrupt", "").status) // it is what frees the GPU: it must not wait for it
	require.Equal(t, 200, s.await(speech).status)
	require.Equal(t, 1, s.servers["comfyui"].Stats().Aborted)
}

func TestAlone_TheUIAnswersWithin50msWhilePromptsRunAndOthersWait(t *testing.T) {
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	comfy := s.servers["comfyui"]
	for _, path := range cheapPaths { // connections are there, code is in memory
		require.Equal(t, 200, s.get(path).status, path)
	}

	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("500"))
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("500"))
	queuePrompt(t, comfy.URL()+"/prompt", longPrompt("500"))
	speech := s.send("POST", "/mvoice/synthesize", "hello")
	s.waitQueued("mvoice", 1)

	rounds := 0
	for ; comfy.Stats().Queue > 0; rounds++ {
		for _, path := range cheapPaths {
			a := s.get(path)
			require.NoError(t, a.err, path)
			require.Equal(t, 200, a.status, path)
			require.Less(t, a.took, cheapAnswer, path)
		}
		began := time.Now()
		conn := s.socket("/comfyui/ws?clientId=ui")
		require.Contains(t, readSocket(t, conn), `"sid":"ui"`)
		require.Less(t, time.Since(began), cheapAnswer, "/ws")
		require.NoError(t, conn.CloseNow())
	}
	require.GreaterOrEqual(t, rounds, 3, "the three prompts must have run meanwhile")
	require.Equal(t, 200, s.await(speech).status)
}

var cheapPaths = []string{
	"/comfyui/", "/comfyui/queue", "/comfyui/history", "/comfyui/view?filename=a.png&bytes=65536", "/comfyui/api/queue",
}

func TestAlone_WebsocketHearsOfTheQueueWithin50ms(t *testing.T) {
	s := start(t, layout{Consumers: []consumer{mvoice(), comfyui()}})
	comfy := s.servers["comfyui"]
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("60000"))
	speech := s.send("POST", "/mvoice/synthesize", "hello")
	s.waitQueued("mvoice", 1)
	conn := s.socket("/comfyui/ws?clientId=ui")
	defer func() { _ = conn.CloseNow() }()
	require.Contains(t, readSocket(t, conn), `"queue_remaining":1`)
	for i, word := range []string{`"queue_remaining":2`, `"queue_remaining":3`, `"queue_remaining":4`} {
		began := time.Now()
		queuePrompt(t, comfy.URL()+"/prompt", longPrompt("0"))
		require.Contains(t, readSocket(t, conn), word)
		require.Less(t, time.Since(began), cheapAnswer, "message %d", i)
	}
	require.Equal(t, 1, comfy.Stats().Sockets)
	require.Equal(t, 200, s.post("/comfyui/interrupt", "").status)
	require.Equal(t, 200, s.await(speech).status)
	for message := ""; !strings.Contains(message, `"queue_remaining":0`); {
		message = readSocket(t, conn)
	}
	queuePrompt(t, comfy.URL()+"/prompt", longPrompt("60000"))
	require.Contains(t, readSocket(t, conn), `"queue_remaining":1`, "the websocket outlives the hand-over")
}

// socket opens a websocket through the site.
func (s *site) socket(path string) *websocket.Conn {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, s.url+path, &websocket.DialOptions{HTTPClient: s.client})
	require.NoError(s.t, err)
	return conn
}

func readSocket(t *testing.T, conn *websocket.Conn) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, text, err := conn.Read(ctx)
	require.NoError(t, err)
	return string(text)
}
