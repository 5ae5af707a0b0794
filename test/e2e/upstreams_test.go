package e2e

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// twin starts a second server of a consumer's kind, which the broker doesn't know.
func twin(t *testing.T) *modelserver.Server {
	t.Helper()
	srv, err := modelserver.Start(modelserver.Options{Name: "twin", SimDir: t.TempDir(), Lazy: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = srv.Close() })
	return srv
}

func TestFixedUpstreamsAreBalancedByCaddyAndTheConsumersOwnIsProbed(t *testing.T) {
	t.Parallel()
	second := twin(t)
	voice := mvoice()
	voice.Addr = freeAddr(t)
	voice.Proxy = "reverse_proxy " + voice.Addr + " " + second.Addr() + " {\nlb_policy round_robin\n}"
	s := start(t, layout{Consumers: []consumer{voice, image()}})
	first := s.servers["mvoice"]
	for range 6 {
		require.Equal(t, 200, s.post("/mvoice/synthesize", "hello").status)
	}
	require.Equal(t, 3, first.Stats().Requests["/synthesize"])
	require.Equal(t, 3, second.Stats().Requests["/synthesize"])

	before := first.Stats().HealthProbes
	s.until("the consumer's own server is probed again", func() bool { return first.Stats().HealthProbes > before+1 })
	require.Zero(t, second.Stats().HealthProbes)
	require.Equal(t, 200, s.post("/image/generate", "a picture").status)
	require.Equal(t, 1, first.Stats().UnloadCalls)
	require.Zero(t, second.Stats().UnloadCalls)
	require.EqualValues(t, 7, s.status().Scheduler.TotalJobs)
}

func TestOneLockGuardsAllUpstreamsOfAConsumer(t *testing.T) {
	t.Parallel()
	second := twin(t)
	voice := mvoice()
	voice.Addr = freeAddr(t)
	voice.Proxy = "reverse_proxy " + voice.Addr + " " + second.Addr() + " {\nlb_policy round_robin\n}"
	s := start(t, layout{Consumers: []consumer{voice}})
	var jobs []<-chan answer
	for range 6 {
		jobs = append(jobs, s.send("POST", "/mvoice/synthesize?ms=20", "hello"))
	}
	for _, j := range jobs {
		require.Equal(t, 200, s.await(j).status)
	}
	require.Empty(t, modelserver.Overlap(s.servers["mvoice"], second), "concurrency is 1, whichever server does the work")
}

func TestUpstreamByPlaceholder(t *testing.T) {
	t.Parallel()
	voice := mvoice()
	voice.Proxy = "header X-Served-At {http.gpu_broker.upstream}\nheader X-Served-By {http.gpu_broker.consumer}\nreverse_proxy {http.gpu_broker.upstream}"
	s := start(t, layout{Consumers: []consumer{voice, whisper()}})
	a := s.post("/mvoice/synthesize", "hello")
	require.Equal(t, 200, a.status)
	require.Equal(t, modelserver.SynthesizeBytes([]byte("hello")), a.body)
	require.Equal(t, "mvoice", a.header.Get("X-Modelserver"))
	require.Equal(t, 200, s.post("/whisper/inference", "hello").status)
	require.Equal(t, 1, s.servers["whisper"].Stats().Requests["/inference"])
	require.Zero(t, s.servers["whisper"].Stats().Requests["/synthesize"])
}

func TestUpstreamByDynamicSource(t *testing.T) {
	t.Parallel()
	voice, ear := mvoice(), whisper()
	voice.Proxy = "reverse_proxy {\ndynamic gpu_broker\n}"
	voice.Route = "bypass GET /audio/*"
	ear.Proxy = voice.Proxy
	s := start(t, layout{Consumers: []consumer{voice, ear}, Routes: "handle /nobody {\nreverse_proxy {\ndynamic gpu_broker\n}\n}"})
	for range 2 {
		for name, path := range map[string]string{"mvoice": "/mvoice/synthesize", "whisper": "/whisper/inference"} {
			a := s.post(path, "hello")
			require.Equal(t, 200, a.status)
			require.Equal(t, name, a.header.Get("X-Modelserver"))
		}
	}
	require.Equal(t, modelserver.AudioBytes(1000), s.get("/mvoice/audio/big?bytes=1000").body, "a bypassed request is passed to its consumer too")
	require.Equal(t, 503, s.get("/nobody").status, "no gpu_broker before it has named an upstream")
}

func TestAllThreeWaysPassAWebsocketOn(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	for name, proxy := range map[string]string{
		"fixed":       "reverse_proxy " + addr,
		"placeholder": "reverse_proxy {http.gpu_broker.upstream}",
		"dynamic":     "reverse_proxy {\ndynamic gpu_broker\n}",
	} {
		t.Run(name, func(t *testing.T) {
			comfy := comfyui()
			comfy.Addr = addr
			comfy.Proxy = proxy
			s := start(t, layout{Consumers: []consumer{comfy}})
			conn := s.socket("/comfyui/ws?clientId=ui")
			defer func() { _ = conn.CloseNow() }()
			require.Contains(t, readSocket(t, conn), `"sid":"ui"`)
			require.Zero(t, s.status().Scheduler.TotalJobs)
		})
	}
}

func TestWebsocketOnAGPURouteHoldsThePlaceUntilItCloses(t *testing.T) {
	t.Parallel()
	comfy := comfyui()
	comfy.Lines = "lifecycle_by_hand\nhealth /system_stats"
	s := start(t, layout{Consumers: []consumer{comfy, whisper()}, Total: "32GiB"})
	conn := s.socket("/comfyui/ws?clientId=ui")
	require.Contains(t, readSocket(t, conn), `"sid":"ui"`)
	require.Equal(t, 1, s.status().Consumers["comfyui"].Active)
	waits := s.send("POST", "/whisper/inference", "x")
	s.waitQueued("whisper", 1)
	require.NoError(t, conn.CloseNow())
	require.Equal(t, 200, s.await(waits).status)
	s.idle("comfyui")
	s.nothingRuns()
}

func TestRoutesAreThosePathsThatTheServerSees(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, site string }{
		{"rewrite in handle", "handle /x/* {\nrewrite * /audio{path}?{query}\n%s\n}"},
		{"rewrite in route", "route /x/* {\nrewrite * /audio{path}?{query}\n%s\n}"},
		{"uri replace in route", "route /x/* {\nuri strip_prefix /x\nuri path_regexp ^/ /audio/\n%s\n}"},
		{"handle_path and rewrite", "handle_path /x/* {\nrewrite * /audio{path}\n%s\n}"},
		{"rewrite by method and matcher", "@x path /x/*\nroute @x {\nuri strip_prefix /x\nuri path_regexp ^ /audio\n%s\n}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			voice := mvoice()
			voice.Lines = "bypass GET /audio/*"
			inner := "gpu_broker mvoice\nreverse_proxy {http.gpu_broker.upstream}"
			s := start(t, layout{Consumers: []consumer{voice, whisper()}, Routes: strings.ReplaceAll(c.site, "%s", inner)})
			release := s.hold("whisper")
			a := s.get("/x/speech")
			require.Equal(t, 503, a.status, "passed on at once: the server says that it isn't loaded")
			require.Contains(t, a.header.Get("X-Received-Uri"), "/audio/", "it needs no GPU, by the path that the server sees")
			require.Zero(t, s.status().Consumers["mvoice"].Waiting)
			release()
		})
	}
}

func TestAPathThatIsBypassedOnlyBeforeARewriteWaits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, site string }{
		{"in handle", "handle /audio/* {\nrewrite * /synthesize\n%s\n}"},
		{"in route", "route /audio/* {\nrewrite * /synthesize\n%s\n}"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			voice := mvoice()
			voice.Lines = "bypass POST /audio/*"
			inner := "gpu_broker mvoice\nreverse_proxy {http.gpu_broker.upstream}"
			s := start(t, layout{Consumers: []consumer{voice, whisper()}, Routes: strings.ReplaceAll(c.site, "%s", inner)})
			release := s.hold("whisper")
			job := s.send("POST", "/audio/speech", "hello")
			s.waitQueued("mvoice", 1)
			require.Equal(t, 200, release().status)
			require.Equal(t, 200, s.await(job).status)
		})
	}
}

func TestGPURoutesAreThosePathsThatTheServerSees(t *testing.T) {
	t.Parallel()
	inner := "gpu_broker comfyui\nreverse_proxy {http.gpu_broker.upstream}"
	s := start(t, layout{Consumers: []consumer{comfyui(), whisper()},
		Routes: "route /v1/images/* {\nuri strip_prefix /v1/images\n" + inner + "\n}\nhandle /make {\nrewrite * /prompt\n" + inner + "\n}"})
	release := s.hold("whisper")
	for _, path := range []string{"/v1/images/queue", "/v1/images/history", "/comfyui/queue"} {
		require.Equal(t, 200, s.get(path).status, path)
	}
	var jobs []<-chan answer
	for i, path := range []string{"/v1/images/prompt", "/make", "/comfyui/prompt", "/comfyui/api/prompt"} {
		jobs = append(jobs, s.send("POST", path, prompt))
		s.waitQueued("comfyui", i+1)
	}
	require.Zero(t, s.servers["comfyui"].Stats().Queue)
	require.Equal(t, 200, release().status)
	for _, j := range jobs {
		require.Equal(t, 200, s.await(j).status)
	}
	s.idle("comfyui")
	require.Equal(t, 4, s.servers["comfyui"].Stats().Worked)
}
