package modelserver

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// working starts a server that is loaded and works on what is asked until it is let go or broken.
func working(t *testing.T, manner Manner, opts Options, path, body string) (*Server, <-chan answer) {
	t.Helper()
	opts.Preloaded = true
	s := startMedium(t, manner, opts)
	s.SetFaults(func(f *Faults) { f.HoldWork = true })
	work := send(bound(t), "POST", s.URL()+path, body)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	return s, work
}

func TestUnloadWithoutALockMakesRunningWorkFail(t *testing.T) {
	for manner, path := range map[Manner]string{
		A1111: "/sdapi/v1/txt2img", Forge: "/sdapi/v1/txt2img", SDNext: "/sdapi/v1/img2img", Kokoro: "/v1/audio/speech", Chatterbox: "/tts",
	} {
		t.Run(string(manner), func(t *testing.T) {
			s, work := working(t, manner, Options{AllowUnload: true}, path, `{}`)
			want(t, media[manner].status, media[manner].unload.to(t, s))
			require.Contains(t, string(want(t, 500, <-work).body), "unloaded under running work")
			require.Equal(t, 1, s.Stats().UnloadsWhileBusy)
			require.Equal(t, 1, s.Stats().Aborted)
			require.Equal(t, 512*gpu.MiB, used(t, s.dir))
		})
	}
}

func TestWebUIsAfterAnUnload(t *testing.T) {
	draw, unload, reload := posting("/sdapi/v1/txt2img", `{"prompt":"x"}`), posting("/sdapi/v1/unload-checkpoint", ""), posting("/sdapi/v1/reload-checkpoint", "")
	t.Run("a1111 fails until it is told to reload", func(t *testing.T) {
		s := startMedium(t, A1111, Options{Preloaded: true})
		want(t, 200, unload.to(t, s))
		want(t, 500, draw.to(t, s))
		want(t, 200, posting("/sdapi/v1/options", `{"sd_model_checkpoint":"m"}`).to(t, s)) // its name is the same: nothing is done
		want(t, 500, draw.to(t, s))
		require.Equal(t, 1, s.Stats().Loads)
		want(t, 200, reload.to(t, s))
		require.Equal(t, 2*gpu.GiB, used(t, s.dir))
		want(t, 200, draw.to(t, s))
		require.Equal(t, 2, s.Stats().Loads)
		want(t, 200, unload.to(t, s))
		want(t, 200, posting("/sdapi/v1/options", `{"sd_model_checkpoint":"other"}`).to(t, s))
		want(t, 200, draw.to(t, s))
	})
	t.Run("forge loads by itself, and only so", func(t *testing.T) {
		s := startMedium(t, Forge, Options{Preloaded: true})
		want(t, 200, unload.to(t, s))
		want(t, 200, reload.to(t, s))
		require.Equal(t, 512*gpu.MiB, used(t, s.dir))
		want(t, 200, draw.to(t, s))
		require.Equal(t, 2, s.Stats().Loads)
	})
	t.Run("sdnext loads by itself or when told to", func(t *testing.T) {
		s := startMedium(t, SDNext, Options{Preloaded: true})
		want(t, 204, unload.to(t, s))
		want(t, 200, draw.to(t, s))
		want(t, 204, unload.to(t, s))
		require.Empty(t, want(t, 204, reload.to(t, s)).body)
		require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	})
}

func TestWebUIsProgressDoesNotTellOfThoseWhoWaitForTheLock(t *testing.T) {
	for manner, probe := range map[Manner]struct {
		path, idle, running, queued string
	}{
		A1111:  {"/sdapi/v1/progress", `"job_count":0`, `"job_count":1`, `"job_count":1`},
		Forge:  {"/sdapi/v1/progress", `"job":""`, `"job":"scripts_txt2img"`, `"job_count":1`},
		SDNext: {"/sdapi/v1/status", `"status":"idle"`, `"status":"running"`, `"queued":1`},
	} {
		t.Run(string(manner), func(t *testing.T) {
			s, first := working(t, manner, Options{}, "/sdapi/v1/txt2img", `{}`)
			second := send(bound(t), "POST", s.URL()+"/sdapi/v1/txt2img", `{}`)
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 2 }))
			require.Contains(t, string(getting(probe.path).to(t, s).body), probe.running)
			require.Eventually(t, func() bool {
				return strings.Contains(string(getting(probe.path).to(t, s).body), probe.queued)
			}, 5*time.Second, time.Millisecond)
			letGo(s)
			want(t, 200, <-first)
			want(t, 200, <-second)
			require.Equal(t, 1, s.Stats().MaxConcurrent)
			require.Contains(t, string(getting(probe.path).to(t, s).body), probe.idle)
		})
	}
}

func TestWebUISaysThatItWorksWhileItLoadsForAPicture(t *testing.T) {
	s := startMedium(t, A1111, Options{Faults: Faults{HangLoad: true}})
	work := send(bound(t), "POST", s.URL()+"/sdapi/v1/txt2img", `{}`)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.LoadsStarted == 1 }))
	require.Contains(t, string(getting("/sdapi/v1/progress").to(t, s).body), `"job_count":1`)
	s.SetFaults(func(f *Faults) { f.HangLoad = false })
	want(t, 200, <-work)
}

func TestImmichFreesEverythingAfterItsIdleTimeAndIsNotToldTo(t *testing.T) {
	s := startMedium(t, ImmichML, Options{KeepAlive: time.Hour})
	predict := formed("/predict", nil, "entries", `{"ocr":{}}`)
	want(t, 200, predict.to(t, s))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	s.SetOptions(func(o *Options) { o.KeepAlive = time.Millisecond })
	want(t, 200, predict.to(t, s))
	require.NoError(t, s.WaitFor(bound(t), holds(0)), "the context goes with the worker")
	require.Zero(t, s.Stats().Deaths)
	want(t, 200, predict.to(t, s))
	want(t, 422, formed("/predict", nil, "text", "x").to(t, s))
	require.GreaterOrEqual(t, s.Stats().Loads, 2)
}

func TestWhisperSwapsItsModelBehindTheLockAndDiesOfABadFile(t *testing.T) {
	died := make(chan struct{})
	s := startMedium(t, WhisperCpp, Options{OnDeath: func() { close(died) }, Faults: Faults{HoldWork: true}})
	hear := formed("/inference", []byte("sound"))
	work := later(t, s, hear)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	swapped := later(t, s, formed("/load", nil, "model", "ggml-tiny.bin"))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 2 }))
	want(t, 200, getting("/health").to(t, s))
	require.Zero(t, s.Stats().UnloadCalls, "it waits for the lock")
	s.SetFaults(func(f *Faults) { f.HangLoad, f.HoldWork = true, false })
	want(t, 200, <-work)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.LoadsStarted == 2 }))
	require.Contains(t, string(want(t, 503, getting("/health").to(t, s)).body), "loading model")
	next := later(t, s, hear)
	s.SetFaults(func(f *Faults) { f.HangLoad = false })
	want(t, 200, <-swapped)
	want(t, 200, <-next)
	require.Zero(t, s.Stats().UnloadsWhileBusy)

	want(t, 400, formed("/load", nil, "other", "x").to(t, s))
	want(t, 400, formed("/inference", nil, "model", "x").to(t, s))
	require.Error(t, formed("/load", nil, "model", "notes.txt").to(t, s).err)
	mustEnd(t, died)
	require.Zero(t, used(t, s.dir))
}

func TestWhisperDiesOfALoadThatFails(t *testing.T) {
	died := make(chan struct{})
	s := startMedium(t, WhisperCpp, Options{OnDeath: func() { close(died) }})
	s.SetFaults(func(f *Faults) { f.OOMLoads = 1 })
	require.Error(t, formed("/load", nil, "model", "ggml-large.bin").to(t, s).err)
	mustEnd(t, died)
}

func TestSpeachesForgetsAModelThatItCouldNotUnload(t *testing.T) {
	const name = "Systran/faster-whisper"
	s := start(t, Options{Manner: Speaches, KeepAlive: -1, Models: map[string]gpu.Bytes{name: gpu.GiB, "other": gpu.GiB}})
	for _, path := range []string{"/api/ps/" + name, "/api/ps/Systran%2Ffaster-whisper"} {
		want(t, 201, posting(path, "").to(t, s))
		want(t, 409, posting(path, "").to(t, s))
		require.JSONEq(t, `{"models":["`+name+`"]}`, string(getting("/api/ps").to(t, s).body))
		want(t, 200, (&question{"DELETE", path, ""}).to(t, s))
		want(t, 404, (&question{"DELETE", path, ""}).to(t, s))
	}
	want(t, 404, posting("/api/ps/nobody/here", "").to(t, s))

	speak := `{"model":"` + name + `","input":"x"}`
	s.SetFaults(func(f *Faults) { f.HoldWork = true })
	work := send(bound(t), "POST", s.URL()+"/v1/audio/speech", speak)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	remove := &question{"DELETE", "/api/ps/" + name, ""}
	want(t, 409, remove.to(t, s))
	require.JSONEq(t, `{"models":[]}`, string(getting("/api/ps").to(t, s).body))
	letGo(s)
	want(t, 200, <-work)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 0 }))
	want(t, 404, remove.to(t, s))
	require.Equal(t, gpu.GiB, used(t, s.dir), "it is there all the same")

	s.SetOptions(func(o *Options) { o.KeepAlive = time.Millisecond })
	want(t, 200, posting("/v1/audio/speech", speak).to(t, s))
	require.NoError(t, s.WaitFor(bound(t), holds(0)))
	require.Equal(t, 3, s.Stats().Loads)
}

func TestInvokeAIPausesItsQueueAndSkipsModelsInUse(t *testing.T) {
	s := startMedium(t, InvokeAI, Options{})
	const queue = "/api/v1/queue/default"
	put := func(path string) answer {
		return call(bound(t), "PUT", s.URL()+queue+path, "")
	}
	s.SetFaults(func(f *Faults) { f.HoldWork = true })
	got := decode[struct {
		Enqueued int
		Batch    struct {
			ID string `json:"batch_id"`
		}
		Items []int `json:"item_ids"`
	}](t, want(t, 201, posting(queue+"/enqueue_batch", `{"batch":{"graph":{},"runs":2}}`).to(t, s)).body)
	require.Equal(t, 2, got.Enqueued)
	require.Equal(t, []int{1, 2}, got.Items)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 && st.Queue == 2 }))
	status := func() map[string]any { return get(t, s, queue+"/status")["queue"].(map[string]any) }
	require.EqualValues(t, 1, status()["in_progress"])
	require.EqualValues(t, 1, status()["pending"])
	want(t, 200, posting("/api/v2/models/empty_model_cache", "").to(t, s))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir), "in use, so left out, and nothing said")
	require.Zero(t, s.Stats().UnloadsWhileBusy)

	require.JSONEq(t, `{"is_started":false,"is_processing":true}`, string(want(t, 200, put("/processor/pause")).body))
	letGo(s)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Worked == 1 && st.Queue == 1 }))
	want(t, 200, posting("/api/v2/models/empty_model_cache", "").to(t, s))
	require.Equal(t, 512*gpu.MiB, used(t, s.dir), "what waits holds nothing")
	require.Equal(t, "pending", get(t, s, queue+"/i/2")["status"])
	want(t, 200, put("/processor/resume"))
	require.NoError(t, s.WaitFor(bound(t), worked(2)))
	batch := get(t, s, queue+"/b/"+got.Batch.ID+"/status")
	require.EqualValues(t, 2, batch["completed"])
	require.EqualValues(t, 2, batch["total"])

	want(t, 422, posting(queue+"/enqueue_batch", `{}`).to(t, s))
	want(t, 404, getting(queue+"/i/99").to(t, s))
}

func TestSDCppsJobsShareItsLockAndAreToldOfForAWhile(t *testing.T) {
	s := startMedium(t, SDCpp, Options{})
	s.SetFaults(func(f *Faults) { f.HoldWork = true })
	submit := func() string {
		t.Helper()
		got := decode[map[string]any](t, want(t, 202, posting("/sdcpp/v1/img_gen", `{"prompt":"boat"}`).to(t, s)).body)
		require.Contains(t, got, "queue_position")
		return got["id"].(string)
	}
	status := func(id string) any { return get(t, s, "/sdcpp/v1/jobs/"+id)["status"] }
	first := submit()
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	require.Equal(t, "generating", status(first))
	sync := send(bound(t), "POST", s.URL()+"/v1/images/generations", `{"prompt":"x"}`)
	second := submit()
	require.Equal(t, "queued", status(second))
	want(t, 409, posting("/sdcpp/v1/jobs/"+first+"/cancel", "").to(t, s))
	want(t, 200, posting("/sdcpp/v1/jobs/"+second+"/cancel", "").to(t, s))
	require.Equal(t, "cancelled", status(second))
	for range sdcppMost {
		want(t, 202, posting("/sdcpp/v1/vid_gen", `{"ms":0}`).to(t, s))
	}
	want(t, 429, posting("/sdcpp/v1/vid_gen", `{}`).to(t, s))
	letGo(s)
	want(t, 200, <-sync)
	require.NoError(t, s.WaitFor(bound(t), worked(sdcppMost+2)))
	require.Equal(t, 1, s.Stats().MaxConcurrent)
	require.Equal(t, 1, s.Stats().Loads, "at the start")
	require.Equal(t, "completed", status(first))
	want(t, 404, getting("/sdcpp/v1/jobs/job_x").to(t, s))
	s.SetOptions(func(o *Options) { o.KeepJobs = time.Nanosecond })
	want(t, 410, getting("/sdcpp/v1/jobs/"+first).to(t, s))
	want(t, 400, posting("/v1/images/generations", `{"size":"huge"}`).to(t, s))
}

func TestKokoroUnloadsOnlyWhereThatIsAllowed(t *testing.T) {
	s := startMedium(t, Kokoro, Options{Preloaded: true})
	want(t, 403, posting("/dev/unload", "").to(t, s))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	want(t, 200, call(bound(t), "POST", s.URL()+"/control", `{"set":{"allow-unload":"true"}}`))
	want(t, 200, posting("/dev/unload", "").to(t, s))
	want(t, 200, posting("/v1/audio/speech", `{"input":"x"}`).to(t, s))
	require.Equal(t, 2, s.Stats().Loads, "the next request loads")
}

func TestChatterboxSpeaksOnlyAfterItsRestart(t *testing.T) {
	s := startMedium(t, Chatterbox, Options{Preloaded: true})
	want(t, 200, posting("/api/unload", "").to(t, s))
	want(t, 503, posting("/tts", `{"text":"x"}`).to(t, s))
	want(t, 503, posting("/v1/audio/speech", `{"input":"x"}`).to(t, s))
	require.Equal(t, 1, s.Stats().LoadsStarted)
	want(t, 200, posting("/restart_server", "").to(t, s))
	want(t, 200, posting("/tts", `{"text":"x"}`).to(t, s))
	require.Zero(t, s.Stats().Deaths, "the process goes on")
}

func TestChatterboxTTSAPIAnswersWhileItLoadsAndTellsOfItsWork(t *testing.T) {
	s := startMedium(t, ChatterboxTTSAPI, Options{Faults: Faults{HangLoad: true}})
	require.Contains(t, string(want(t, 200, getting("/health").to(t, s)).body), `"initialization_state":"initializing"`)
	want(t, 500, posting("/v1/audio/speech", `{"input":"x"}`).to(t, s))
	s.SetFaults(func(f *Faults) { f.HangLoad, f.HoldWork = false, true })
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Loads == 1 }))
	require.Contains(t, string(want(t, 200, getting("/status").to(t, s)).body), `"is_processing":false`)
	work := send(bound(t), "POST", s.URL()+"/v1/audio/speech", `{"input":"x"}`)
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Working == 1 }))
	require.Contains(t, string(want(t, 200, getting("/status").to(t, s)).body), `"is_processing":true`)
	letGo(s)
	want(t, 200, <-work)
}

func TestAllTalkParksItsModelBetweenJobsIfItIsToldTo(t *testing.T) {
	s := startMedium(t, AllTalk, Options{})
	want(t, 422, posting("/api/lowvramsetting", "").to(t, s))
	want(t, 200, posting("/api/lowvramsetting?new_low_vram_value=true", "").to(t, s))
	require.NoError(t, s.WaitFor(bound(t), holds(512*gpu.MiB)))
	want(t, 200, posting("/api/tts-generate", "").to(t, s))
	require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Unloads == 2 && st.Held == 512*gpu.MiB }))
	want(t, 200, posting("/api/lowvramsetting?new_low_vram_value=false", "").to(t, s))
	want(t, 200, posting("/api/reload?tts_method=xtts", "").to(t, s))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
}

func TestOpenedAISpeechNeedsTheGPUForOneOfItsVoicesOnly(t *testing.T) {
	s := startMedium(t, OpenedAISpeech, Options{KeepAlive: time.Hour})
	require.Contains(t, string(want(t, 200, posting("/v1/audio/speech", `{"model":"tts-1","input":"x"}`).to(t, s)).body), "RIFF")
	require.Zero(t, s.Stats().LoadsStarted)
	require.Zero(t, s.Stats().Worked)
	want(t, 200, posting("/v1/audio/speech", `{"model":"tts-1-hd","input":"x"}`).to(t, s))
	require.Equal(t, 2*gpu.GiB, used(t, s.dir))
	s.SetOptions(func(o *Options) { o.KeepAlive = time.Millisecond })
	want(t, 200, posting("/v1/audio/speech", `{"model":"tts-1-hd","input":"x"}`).to(t, s))
	require.NoError(t, s.WaitFor(bound(t), holds(512*gpu.MiB)))
}
