package modelserver

import (
	"encoding/base64"
	"net/http"
	"strings"
	"time"
)

// How a KoboldCpp reloads: after koboldWait its manager ends the server's
// process, whatever that does, and starts a fresh one; its port is closed for
// koboldPause and, if it loads, until it has loaded.
const (
	koboldWait  = 500 * time.Millisecond
	koboldPause = 50 * time.Millisecond
)

// kobold is a KoboldCpp with its admin routes. It does one job at a time. To
// unload and to load it starts anew, which breaks what runs; if a load fails, as
// it was started at first. It also answers as an ollama and a ComfyUI would, with made-up numbers.
type kobold struct {
	*shape
	begun  time.Time
	leaves bool // its process is about to end: it says what it said until then; guarded by Server.mu
}

func newKobold(l *life) http.Handler {
	k := &kobold{shape: newShape(l), begun: time.Now()}
	if l.turns == nil {
		l.turns = make(chan struct{}, 1)
	}
	k.join = k.ifLoaded
	k.healthy(map[string]any{"result": "KoboldCpp", "version": "1.103", "admin": 2}, "GET /api/extra/version")
	k.healthy(map[string]string{}, "GET /ping")
	k.handle(k.model, "GET /api/v1/model")
	k.handle(k.perf, "GET /api/extra/perf")
	k.fixed([]string{k.m.name + ".kcpps", "unload_model"}, "GET /api/admin/list_options")
	k.handle(k.reload, "POST /api/admin/reload_config")
	k.modelNames("GET /v1/models")

	// Not what it is.
	k.fixed(map[string]any{"models": []any{map[string]any{"name": "koboldcpp", "model": "koboldcpp:latest", "size": 394998579, "size_vram": 394998579}}}, "GET /api/ps")
	k.fixed(map[string]any{"models": []any{map[string]any{"name": "koboldcpp", "model": "koboldcpp:latest", "size": 394998579}}}, "GET /api/tags")
	k.fixed(map[string]string{"version": "0.7.0"}, "GET /api/version")
	k.fixed(map[string]any{"system": map[string]string{"os": "posix"}, "devices": []any{map[string]any{"name": "koboldcpp", "vram_total": 12345, "vram_free": 12345}}}, "GET /system_stats")
	k.fixed(map[string]any{}, "GET /object_info", "GET /history")

	k.v1("/v1")
	k.gpu(k.say(koboldSpeech), "POST /api/v1/generate")
	streamed := koboldSpeech
	streamed.streams = always
	k.gpu(k.say(streamed), "POST /api/extra/generate/stream")
	k.gpu(k.say(ollamaSpeech(generateForm)), "POST /api/generate")
	k.gpu(k.say(ollamaSpeech(chatForm)), "POST /api/chat")
	k.gpu(k.embed, "POST /api/extra/embeddings")
	k.gpu(k.hear, "POST /v1/audio/transcriptions", "POST /api/extra/transcribe")
	k.gpu(k.speak, "POST /v1/audio/speech", "POST /api/extra/tts")
	k.gpu(func(j *job) error {
		return k.whole(j, func() any {
			drawn := base64.StdEncoding.EncodeToString(picture(j.ask.Prompt, 64, 64))
			return map[string]any{"images": []string{drawn}, "data": []any{map[string]string{"b64_json": drawn}}}
		})
	}, "POST /sdapi/v1/txt2img", "POST /sdapi/v1/img2img", "POST /v1/images/generations")
	k.gpu(k.fixedWork(map[string]string{"caption": "a boat"}), "POST /sdapi/v1/interrogate")
	k.gpu(k.fixedWork(map[string]any{"prompt_id": "12345678-0000-0000-0000-000000000001", "number": 0}), "POST /prompt")
	return k.mux
}

var koboldSpeech = speech{
	whole: func(_ *job, text, finish string) any {
		return map[string]any{"results": []any{map[string]string{"text": text, "finish_reason": finish}}}
	},
	piece: func(_ *job, word string) []byte {
		return append([]byte("event: message\n"), sse(map[string]any{"token": word, "finish_reason": nil})...)
	},
	last: func(_ *job, _, finish string) []byte {
		return append([]byte("event: message\n"), sse(map[string]any{"token": "", "finish_reason": finish})...)
	},
	streams: func(*job) bool { return false },
}

func (k *kobold) model(w http.ResponseWriter, _ *http.Request) {
	name := "inactive"
	k.l.s.mu.Lock()
	there := k.m.phase == loaded || k.leaves
	k.l.s.mu.Unlock()
	if there {
		name = "koboldcpp/" + k.m.name
	}
	writeJSON(w, http.StatusOK, map[string]string{"result": name})
}

func (k *kobold) perf(w http.ResponseWriter, _ *http.Request) {
	k.l.s.mu.Lock()
	running, waiting := k.busy()
	k.l.s.mu.Unlock()
	idle := 1
	if running > 0 {
		idle = 0
	}
	writeJSON(w, http.StatusOK, map[string]any{"idle": idle, "queue": waiting, "uptime": time.Since(k.begun).Seconds()})
}

func (k *kobold) reload(w http.ResponseWriter, r *http.Request) {
	var in struct{ Filename string }
	if !k.readJSON(w, r, &in) {
		return
	}
	load := in.Filename != "unload_model"
	ok := true
	if load {
		name := in.Filename
		for _, end := range []string{".kcpps", ".kcppt", ".gguf"} {
			name = strings.TrimSuffix(name, end)
		}
		ok = name == k.m.name
	} else {
		k.l.unloadCalled(k.m)
		ok = !k.l.faults().FailUnload
	}
	writeJSON(w, http.StatusOK, map[string]bool{"success": ok}) // always 200
	if ok {
		k.l.spawn(func() { k.startAnew(load) })
	}
}

func (k *kobold) startAnew(load bool) {
	if k.l.sleep(k.l.ctx, koboldWait) != nil {
		return // it has died meanwhile
	}
	k.leave(k.phase(k.m) == loaded)
	defer k.leave(false)
	if k.l.unload(k.l.ctx, k.m) != nil {
		return // so it has
	}
	if k.phase(k.m) != loaded { // else it was told to lie
		k.l.reincarnate("", koboldPause, load, k.l.s.options().Preloaded)
	}
}

func (k *kobold) leave(on bool) {
	k.l.s.mu.Lock()
	defer k.l.s.mu.Unlock()
	k.leaves = on
}
