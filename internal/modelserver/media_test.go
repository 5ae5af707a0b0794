package modelserver

import (
	"bytes"
	"mime/multipart"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// formed is a request whose body is a form: fields by name and value in turn,
// and a part "file" if there is one.
func formed(path string, file []byte, fields ...string) *formQuestion {
	return &formQuestion{path, file, fields}
}

type formQuestion struct {
	path   string
	file   []byte
	fields []string
}

func (q *formQuestion) to(t *testing.T, s *Server) answer {
	t.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	for i := 0; i+1 < len(q.fields); i += 2 {
		require.NoError(t, form.WriteField(q.fields[i], q.fields[i+1]))
	}
	if q.file != nil {
		part, err := form.CreateFormFile("file", "a.wav")
		require.NoError(t, err)
		_, err = part.Write(q.file)
		require.NoError(t, err)
	}
	require.NoError(t, form.Close())
	return callAs(bound(t), form.FormDataContentType(), "POST", s.URL()+q.path, body.String())
}

// asker is a question of either form.
type asker interface {
	to(t *testing.T, s *Server) answer
}

// A medium is how one manner is driven from empty to loaded to empty. Its model
// and its server are named m.
var media = map[Manner]struct {
	health, state asker
	loaded, gone  string // parts of the state's answer
	work          map[string]asker
	unload        *question // nil: there is no such route
	status        int       // of the unload
	again         int       // of one more unload; 0: as the first
}{
	A1111: {
		health: getting("/internal/ping"), state: getting("/sdapi/v1/memory"), loaded: `"current":1610612736`, gone: `"current":0`,
		work: map[string]asker{
			"m drew: boat": posting("/sdapi/v1/txt2img", `{"prompt":"boat","steps":20}`), `"steps":20`: posting("/sdapi/v1/img2img", `{"steps":20}`),
			`"caption"`: posting("/sdapi/v1/interrogate", `{}`), `"image":"`: posting("/sdapi/v1/extra-single-image", `{}`),
			"null": posting("/sdapi/v1/options", `{"sd_model_checkpoint":"m"}`), `"job_count":0`: getting("/sdapi/v1/progress?skip_current_image=true"),
		},
		unload: posting("/sdapi/v1/unload-checkpoint", ""), status: 200,
	},
	Forge: {
		health: getting("/internal/ping"), state: getting("/sdapi/v1/memory"), loaded: `"current":1610612736`, gone: `"current":0`,
		work:   map[string]asker{"m drew: boat": posting("/sdapi/v1/txt2img", `{"prompt":"boat"}`), `"current_task"`: getting("/sdapi/v1/progress")},
		unload: posting("/sdapi/v1/unload-checkpoint", ""), status: 200,
	},
	SDNext: {
		health: getting("/sdapi/v1/status"), state: getting("/sdapi/v1/memory"), loaded: `"current":1610612736`, gone: `"current":0`,
		work:   map[string]asker{"m drew: boat": posting("/sdapi/v1/txt2img", `{"prompt":"boat"}`), `"processed":["`: posting("/sdapi/v1/control", `{}`)},
		unload: posting("/sdapi/v1/unload-checkpoint", ""), status: 204,
	},
	ImmichML: {
		health: getting("/ping"),
		work: map[string]asker{
			`"clip":"[`:               formed("/predict", nil, "entries", `{"clip":{"textual":{"modelName":"m"}}}`, "text", "a boat"),
			`"facial-recognition":[]`: formed("/predict", nil, "entries", `{"facial-recognition":{}}`, "image", "jpeg"),
		},
	},
	WhisperCpp: {
		health: getting("/health"),
		work:   map[string]asker{"m heard 3 bytes": formed("/inference", []byte("abc"), "response_format", "json"), "Load was successful!": formed("/load", nil, "model", "/models/ggml-base.bin")},
	},
	Speaches: {
		health: getting("/health"), state: getting("/api/ps"), loaded: `{"models":["m"]}`, gone: `{"models":[]}`,
		work: map[string]asker{
			"m heard 3 bytes": formed("/v1/audio/transcriptions", []byte("abc"), "model", "m"), "RIFF": posting("/v1/audio/speech", `{"model":"m","input":"x"}`),
			`"delta":"heard "`: formed("/v1/audio/transcriptions", []byte("abc"), "model", "m", "stream", "true"),
			said:               posting("/v1/chat/completions", chat), "embedding": posting("/v1/audio/speech/embedding", `{"model":"m"}`),
		},
		unload: &question{"DELETE", "/api/ps/m", ""}, status: 200, again: 404,
	},
	InvokeAI: {
		health: getting("/api/v1/app/version"), state: getting("/api/v2/models/stats"), loaded: `"m":2147483648`, gone: `"loaded_model_sizes":{}`,
		unload: posting("/api/v2/models/empty_model_cache", ""), status: 200,
	},
	SDCpp: {
		health: getting("/v1/models"),
		work: map[string]asker{
			"m drew: boat": posting("/v1/images/generations", `{"prompt":"boat","size":"64x64"}`), `"images":["`: posting("/sdapi/v1/txt2img", `{"prompt":"boat"}`),
			"m drew: form": formed("/v1/images/edits", nil, "prompt", "form"),
		},
	},
	Kokoro: {
		health: getting("/health"),
		work: map[string]asker{
			"RIFF": posting("/v1/audio/speech", `{"input":"x"}`), `"timestamps":[]`: posting("/dev/captioned_speech", `{"input":"x"}`), "WAVE": posting("/dev/ssml", `{}`),
		},
		unload: posting("/dev/unload", ""), status: 200,
	},
	Chatterbox: {
		health: getting("/api/model-info"), state: getting("/api/model-info"), loaded: `"loaded":true`, gone: `"loaded":false`,
		work:   map[string]asker{"RIFF": posting("/tts", `{"text":"x"}`), "WAVE": posting("/v1/audio/speech", `{"input":"x"}`)},
		unload: posting("/api/unload", ""), status: 200,
	},
	ChatterboxTTSAPI: {
		health: getting("/health"), state: getting("/health"), loaded: `"model_loaded":true`,
		work: map[string]asker{"RIFF": posting("/v1/audio/speech", `{"input":"x"}`), "WAVE": posting("/audio/speech", `{"input":"x"}`), "cleanup": getting("/memory?cleanup=true&force_cuda_clear=true")},
	},
	AllTalk: {
		health: getting("/api/ready"),
		work: map[string]asker{
			"generate-success": posting("/api/tts-generate", ""), "RIFF": posting("/v1/audio/speech", `{"input":"x"}`), "lowvram-success": posting("/api/lowvramsetting?new_low_vram_value=false", ""),
		},
	},
	OpenedAISpeech: {
		health: getting("/health"),
		work:   map[string]asker{"RIFF": posting("/v1/audio/speech", `{"model":"tts-1-hd","input":"x"}`), `"tts-1-hd"`: getting("/v1/models")},
	},
	XTTS: {
		health: getting("/speakers_list"),
		work: map[string]asker{
			"RIFF": posting("/tts_to_audio/", `{"text":"x","language":"en"}`), "WAVE": getting("/tts_stream?text=x"), "output_path": posting("/tts_to_file", `{"text":"x"}`),
			"Model switched to other": posting("/switch_model", `{"model_name":"other"}`),
		},
	},
}

// later asks in the background.
func later(t *testing.T, s *Server, q asker) <-chan answer {
	out := make(chan answer, 1)
	go func() { out <- q.to(t, s) }()
	return out
}

func startMedium(t *testing.T, manner Manner, opts Options) *Server {
	t.Helper()
	opts.Name, opts.Manner = "m", manner
	opts.VRAM, opts.Residue, opts.Total = 2*gpu.GiB, 512*gpu.MiB, 16*gpu.GiB
	return start(t, opts)
}

// TestEachServerOfMediaLoadsWorksAndUnloadsByItsOwnRoutes drives the kinds once round.
func TestEachServerOfMediaLoadsWorksAndUnloadsByItsOwnRoutes(t *testing.T) {
	for manner, medium := range media {
		t.Run(string(manner), func(t *testing.T) {
			atStart := manners[manner].atStart
			s := startMedium(t, manner, Options{AllowUnload: true})
			says := func(part string) {
				t.Helper()
				if medium.state != nil {
					require.Contains(t, string(want(t, 200, medium.state.to(t, s)).body), part)
				}
			}
			want(t, 200, medium.health.to(t, s))
			require.Equal(t, 1, s.Stats().HealthProbes)
			if atStart {
				require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Loads == 1 }))
			} else {
				says(medium.gone)
				require.Zero(t, s.Stats().LoadsStarted, "health and state load nothing")
			}
			switch manner {
			case InvokeAI:
				want(t, 201, posting("/api/v1/queue/default/enqueue_batch", `{"batch":{"graph":{}}}`).to(t, s))
				require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.Worked == 1 && st.Queue == 0 }))
			case Chatterbox:
				want(t, 200, posting("/restart_server", "").to(t, s))
			}
			for part, work := range medium.work {
				require.Contains(t, string(want(t, 200, work.to(t, s)).body), part)
			}
			says(medium.loaded)
			require.Equal(t, 2*gpu.GiB, used(t, s.dir))
			require.Positive(t, s.Stats().Worked)
			if medium.unload == nil {
				for _, path := range []string{"/unload", "/api/unload", "/dev/unload", "/free"} {
					require.Equal(t, 404, posting(path, "").to(t, s).status)
				}
				return
			}
			require.NoError(t, s.WaitFor(bound(t), func(st Stats) bool { return st.InFlight == 0 }))
			want(t, medium.status, medium.unload.to(t, s))
			require.Equal(t, 512*gpu.MiB, used(t, s.dir), "it answers when it is done")
			says(medium.gone)
			want(t, max(medium.status, medium.again), medium.unload.to(t, s))
			require.Equal(t, 1, s.Stats().Unloads)
			require.Equal(t, 2, s.Stats().UnloadCalls)
			s.SetFaults(func(f *Faults) { f.FailUnload = true })
			want(t, 500, medium.unload.to(t, s))
		})
	}
}
