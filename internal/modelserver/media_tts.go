package modelserver

import (
	"context"
	"net/http"
	"strconv"
)

// newChatterbox is devnen's Chatterbox-TTS-Server. It speaks only while it is
// loaded, which /restart_server alone does. Its unload takes no lock.
func newChatterbox(l *life) http.Handler {
	s := newShape(l)
	s.fail = failDetail
	s.join = s.ifLoaded
	s.health(func(w http.ResponseWriter, _ *http.Request) {
		s.l.s.mu.Lock()
		there := s.m.saysLoaded()
		s.l.s.mu.Unlock()
		writeJSON(w, http.StatusOK, map[string]any{"loaded": there, "type": "original", "class_name": "ChatterboxTTS", "device": "cuda"})
	}, "GET /api/model-info")
	s.handle(func(w http.ResponseWriter, r *http.Request) {
		if s.unloadNow(w, r) {
			writeJSON(w, http.StatusOK, map[string]string{"status": "unloaded"})
		}
	}, "POST /api/unload")
	s.handle(func(w http.ResponseWriter, r *http.Request) {
		if s.reload(w, r) {
			writeJSON(w, http.StatusOK, map[string]any{"message": "model reloaded", "restart_needed": false})
		}
	}, "POST /restart_server")
	s.gpu(s.told(s.speak), "POST /tts", "POST /v1/audio/speech")
	return s.mux
}

// newChatterboxAPI is travisvn's chatterbox-tts-api. It answers while it loads,
// and tells of the work that runs.
func newChatterboxAPI(l *life) http.Handler {
	s := newShape(l)
	s.fail, s.notLoaded = failDetail, http.StatusInternalServerError
	s.join = s.ifLoaded
	s.health(func(w http.ResponseWriter, _ *http.Request) {
		status, state := "healthy", "ready"
		there := s.phase(s.m) == loaded
		if !there {
			status, state = "initializing", "initializing"
		}
		writeJSON(w, http.StatusOK, map[string]any{"status": status, "model_loaded": there, "device": "cuda", "initialization_state": state})
	}, "GET /health")
	s.handle(func(w http.ResponseWriter, _ *http.Request) {
		s.l.s.mu.Lock()
		running, waiting := s.busy()
		s.l.s.mu.Unlock()
		status := "idle"
		if running+waiting > 0 {
			status = "generating_audio"
		}
		writeJSON(w, http.StatusOK, map[string]any{"status": status, "is_processing": running+waiting > 0})
	}, "GET /status", "GET /v1/status")
	// It clears caches, and frees nothing that counts.
	s.fixed(map[string]any{"cleanup_performed": true}, "GET /memory")
	s.modelNames("GET /v1/models")
	for _, path := range []string{"/audio/speech", "/v1/audio/speech", "/tts"} {
		s.gpu(s.speak, "POST "+path, "POST "+path+"/upload")
	}
	return s.mux
}

// allTalk is an AllTalk. With its low VRAM setting on, the model is in host RAM
// between two jobs.
type allTalk struct {
	*shape
	low bool // guarded by Server.mu
}

func newAllTalk(l *life) http.Handler {
	a := &allTalk{shape: newShape(l)}
	a.fail = failDetail
	a.join = a.orParked
	a.healthy("Ready", "GET /api/ready")
	a.handle(a.lowVRAM, "POST /api/lowvramsetting")
	a.handle(func(w http.ResponseWriter, r *http.Request) {
		if a.reload(w, r) {
			writeJSON(w, http.StatusOK, map[string]string{"status": "model-success"})
		}
	}, "POST /api/reload")
	a.gpu(a.fixedWork(map[string]string{
		"status": "generate-success", "output_file_path": "/outputs/a.wav", "output_file_url": "/audio/a.wav",
	}), "POST /api/tts-generate", "POST /api/previewvoice", "POST /api/previewvoice/{$}")
	a.gpu(a.speak, "GET /api/tts-generate-streaming", "POST /api/tts-generate-streaming", "POST /v1/audio/speech")
	return a.mux
}

func (a *allTalk) orParked(ctx context.Context, m *model) (func(), error) {
	release, err := a.lazily(ctx, m)
	if err != nil {
		return nil, err
	}
	return func() {
		release()
		a.park()
	}, nil
}

// park puts the model into host RAM, if it is set so and nothing runs.
func (a *allTalk) park() {
	a.l.s.mu.Lock()
	defer a.l.s.mu.Unlock()
	if a.low && !a.l.dead && a.m.phase == loaded && a.m.users == 0 && a.m.waiters == 0 {
		a.l.beginUnload(a.m, nil)
	}
}

func (a *allTalk) lowVRAM(w http.ResponseWriter, r *http.Request) {
	low, err := strconv.ParseBool(r.URL.Query().Get("new_low_vram_value"))
	if err != nil {
		a.fail(w, r, http.StatusUnprocessableEntity, "new_low_vram_value: want true or false")
		return
	}
	a.l.s.mu.Lock()
	a.low = low
	a.l.s.mu.Unlock()
	if low {
		a.park()
	} else if err := a.load(r.Context(), a.m); err != nil {
		a.loadError(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "lowvram-success"})
}

// newOpenedAI is an openedai-speech: tts-1-hd is spoken by XTTS, which loads
// lazily and goes after KeepAlive; tts-1 by Piper, on the CPU.
func newOpenedAI(l *life) http.Handler {
	s := newShape(l)
	s.healthy(map[string]string{"status": "ok"}, "GET /health")
	s.fixed(v1Models([]string{"tts-1", "tts-1-hd"}, "openedai-speech"), "GET /v1/models")
	s.handle(func(w http.ResponseWriter, r *http.Request) {
		j := s.read(w, r)
		switch {
		case j == nil:
		case j.ask.Model == "tts-1-hd":
			s.work(j, s.speak)
		case l.sleep(r.Context(), l.runTime(r)) != nil || l.answer(w, "audio/wav", SynthesizeBytes(j.body)) != nil:
			panic(http.ErrAbortHandler)
		}
	}, "POST /v1/audio/speech")
	return s.mux
}

// newXTTS is daswer123's xtts-api-server.
func newXTTS(l *life) http.Handler {
	s := newShape(l)
	s.fail = failDetail
	s.healthy([]string{"female"}, "GET /speakers_list")
	s.fixed(map[string]any{"languages": map[string]string{"English": "en"}}, "GET /languages")
	s.gpu(s.speak, "POST /tts_to_audio/{$}", "GET /tts_stream", "POST /tts_stream")
	s.gpu(s.fixedWork(map[string]string{"message": "The audio was made and stored.", "output_path": "/output/a.wav"}), "POST /tts_to_file")
	s.handle(func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Name string `json:"model_name"`
		}
		if s.readJSON(w, r, &in) && s.reload(w, r) {
			writeJSON(w, http.StatusOK, map[string]string{"message": "Model switched to " + in.Name})
		}
	}, "POST /switch_model")
	return s.mux
}
