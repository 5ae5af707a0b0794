package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// engine is a server of a preset beside another that can hold the lock; both fit on the card.
func engine(name modelserver.Manner, lines string, models ...string) consumer {
	o := modelserver.Options{Name: string(name), Manner: name, VRAM: gib(4), LoadTime: 10 * time.Millisecond, UnloadTime: 10 * time.Millisecond, RunTime: time.Millisecond}
	lines = "lifecycle_by_hand\npreset " + string(name) + "\nvram 4GiB\n" + lines
	for _, m := range models {
		if o.Models == nil {
			o.Models = map[string]gpu.Bytes{}
		}
		o.Models[m] = gib(2)
		lines += "\nmodel " + m + " {\nvram 2GiB\n}"
	}
	return consumer{Options: o, Lines: lines}
}

// queued waits until so many requests wait.
func (s *site) queued(n int) {
	s.t.Helper()
	s.until(fmt.Sprintf("%d requests wait", n), func() bool { return s.status().Scheduler.QueueDepth == n })
}

// waitsForTheLock requires that a request gets no answer while another server computes, and returns its answer after that.
func (s *site) waitsForTheLock(method, path, body string) answer {
	s.t.Helper()
	s.serve("mvoice")
	busy, end := s.works("mvoice")
	waits := s.send(method, path, body)
	s.queued(1)
	end()
	require.Equal(s.t, 200, s.await(busy).status)
	return s.await(waits)
}

// passesTheLock requires that a request is answered while another server computes.
func (s *site) passesTheLock(method, path, body string) answer {
	s.t.Helper()
	s.serve("mvoice")
	busy, end := s.works("mvoice")
	a := s.await(s.send(method, path, body))
	end()
	require.Equal(s.t, 200, s.await(busy).status)
	require.Empty(s.t, a.header.Get("X-Gpu-Broker-Consumer"), "it took no turn")
	return a
}

func TestK2_LocalAIsRoutesWithoutV1TakeATurnAndItsManagementDoesNot(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.LocalAI, "", "one")}})
	a := s.waitsForTheLock("POST", "/localai/chat/completions", `{"model":"one","messages":[]}`)
	require.Equal(t, "localai", a.header.Get("X-Gpu-Broker-Consumer"))
	require.Equal(t, "READY", s.slotOf("localai"), "a listed route loads the model that it names")
	s.waitsForTheLock("POST", "/localai/v1/engines/one/embeddings", `{"model":"one"}`)
	s.passesTheLock("POST", "/localai/api/show", `{"model":"one"}`)
	s.passesTheLock("POST", "/localai/models/apply", `{"id":"two"}`)
}

func TestK2_AnUnlistedRequestAtAConsumerWithModelsTakesTheLockAndLoadsNothing(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.LocalAI, "", "one", "two")}})
	for _, body := range []string{`{"query":"x"}`, `{"model":"one"}`, `{"model":"of-another-kind"}`, `[]`} {
		a := s.waitsForTheLock("POST", "/localai/api/router/decide", body)
		require.Equal(t, 404, a.status, "the server's own answer")
	}
	require.Equal(t, "IDLE", s.slotOf("localai"), "nothing was loaded")
	require.Zero(t, s.servers["localai"].Stats().LoadsStarted)
	require.Len(t, s.decisions("unlisted"), 1, "it is told once")
	require.Zero(t, s.metric(`passed_total{consumer="localai"}`))
	require.Len(t, s.status().Consumers["localai"].Slots, 2, "what takes turns alone is no slot that people see")

	s.post("/localai/v1/chat/completions", `{"model":"two"}`)
	s.waitsForTheLock("POST", "/localai/api/router/decide", `{"model":"two"}`)
	require.Equal(t, 1, s.servers["localai"].Stats().LoadsStarted)
}

func TestK2_ASleepingVLLMGetsNoUnlistedRequestWithoutATurn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.VLLM, "")}})
	vllm := s.servers["vllm"]
	for _, path := range []string{"/vllm/invocations", "/vllm/v1/of-tomorrow"} {
		s.doByHand("/consumers/vllm/unload")
		s.until("it sleeps", func() bool { return s.slotOf("vllm") == "IDLE" })
		before := vllm.Stats().Requests["/wake_up"]
		s.post(path, `{"messages":[]}`)
		require.Equal(t, before+1, vllm.Stats().Requests["/wake_up"], path)
		require.Equal(t, "READY", s.slotOf("vllm"))
	}
	s.doByHand("/consumers/vllm/unload")
	s.until("it sleeps", func() bool { return s.slotOf("vllm") == "IDLE" })
	s.post("/vllm/tokenize", `{}`)
	require.Equal(t, "IDLE", s.slotOf("vllm"), "what is listed as free wakes nothing")
}

func TestK2_WhereListsDecideAnUnlistedRequestPassesOnlyWhileItsServerIsLoaded(t *testing.T) {
	t.Parallel()
	own := whisper()
	own.Options.VRAM = gib(4)
	own.Lines += "\nvram 4GiB\ngpu_routes POST /v1/audio/transcriptions"
	s := start(t, layout{Consumers: []consumer{mvoice(), own}})
	require.Equal(t, "IDLE", s.slotOf("whisper"))
	require.Equal(t, 200, s.get("/whisper/health").status)
	require.Equal(t, "IDLE", s.slotOf("whisper"), "a GET needs nothing")
	require.Equal(t, 200, s.post("/whisper/echo", "x").status)
	require.Equal(t, "READY", s.slotOf("whisper"), "it was loaded for it")
	s.passesTheLock("POST", "/whisper/echo", "x")
	s.passesTheLock("PUT", "/whisper/settings/12345678", "x")
	s.passesTheLock("PUT", "/whisper/settings/87654321", "x")
	require.EqualValues(t, 3, s.metric(`passed_total{consumer="whisper"}`))
	told := s.decisions("unlisted")
	require.Len(t, told, 2)
	require.Contains(t, told[1].Reason, "PUT /settings/*", "an ID makes no route of its own")
}

func TestK2_BypassOfTheUserWins(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.VLLM, "bypass POST /v1/rerank POST /of-mine")}})
	s.passesTheLock("POST", "/vllm/v1/rerank", `{}`)
	s.passesTheLock("POST", "/vllm/of-mine", `{}`)
	free := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.VLLM, "unlisted_requests free")}})
	free.passesTheLock("POST", "/vllm/of-tomorrow", `{}`)
}

func TestK2_LlamaSwapsProfilesAndRunningRequestsAreNotForClients(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.LlamaSwap, "", "one")}})
	for _, c := range []string{"POST /api/inflight/7/cancel", "PUT /api/profiles/active", "GET /unload", "HEAD /unload", "POST /upstream/one/v1/chat/completions"} {
		method, path, _ := strings.Cut(c, " ")
		a := s.do(context.Background(), method, "/llama-swap"+path, nil)
		require.Equal(t, 403, a.status, c)
		require.Zero(t, s.servers["llama-swap"].Stats().Requests[path], c)
	}
	s.waitsForTheLock("POST", "/llama-swap/sdapi/v1/txt2img", `{"model":"one"}`)
	s.waitsForTheLock("POST", "/llama-swap/v/chat/completions", `{"model":"one"}`)
}

func TestH3_NoSpellingReachesWhatIsBlockedOrComputesWithoutATurn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.KoboldCpp, "model_name koboldcpp")}})
	kobold := s.servers["koboldcpp"]
	raw := func(method, target string) string {
		return s.raw(method + " /koboldcpp" + target + " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
	}
	for _, target := range []string{"/api/admin/reload_config", "/x/api/admin/reload_config", "/api/admin/reload_config/", "//api/admin/reload_config", "/api%2Fadmin%2Freload_config", "/a/../api/admin/reload_config",
		"/api/admin/%72eload_config", "/api/admin/reload_config;x=1", "/x?y=/api/admin/reload_config", "/api/./admin/reload_config", `/api\admin\reload_config`, "/api/%252e/admin/reload_config"} {
		for _, method := range []string{"POST", "PUT"} {
			require.Contains(t, raw(method, target), " 403 ", "%s %s", method, target)
		}
	}
	require.Zero(t, kobold.Stats().UnloadCalls)

	s.serve("mvoice")
	busy, end := s.works("mvoice")
	targets := []string{"/x/v1/chat/completions", "//api/v1/generate", "/api/latest/generate", "/api/extra/tokencount/../../v1/generate", "/api/v1/generate/", "/api/extra/tokencount?x=/api/v1/generate"}
	done := make(chan string, len(targets))
	for _, target := range targets {
		go func() { done <- raw("POST", target) }()
	}
	s.queued(len(targets))
	require.Contains(t, raw("POST", "/api/extra/abort"), "HTTP/1.1", "to abort needs no turn")
	require.Empty(t, done)
	end()
	require.Equal(t, 200, s.await(busy).status)
	for range targets {
		require.Contains(t, <-done, "X-Gpu-Broker-Consumer: koboldcpp")
	}
}

func TestH3_APathThatOnlyLooksFreeTakesATurn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.Ollama, "", "llama3:8b")}})
	for _, target := range []string{"/api/blobs/../generate", "/api/blobs/%2e%2e/generate", "/api/blobs/..%2fgenerate", "/api/blobs/..%5cgenerate", "/api/blobs/..;/generate"} {
		require.Contains(t, s.raw("POST /ollama"+target+" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 21\r\nConnection: close\r\n\r\n{\"model\":\"llama3:8b\"}"), "X-Gpu-Broker-Consumer: ollama", target)
	}
	s.passesTheLock("POST", "/ollama/api/show", `{"model":"llama3:8b"}`)
}

func TestH8_HEADOfAGPURouteCountsAsGET(t *testing.T) {
	t.Parallel()
	own := whisper()
	own.Options.VRAM = gib(4)
	own.Lines += "\nvram 4GiB\ngpu_routes POST /v1/audio/transcriptions GET /stats\nblocked GET /secret"
	s := start(t, layout{Consumers: []consumer{mvoice(), own}})
	s.waitsForTheLock("HEAD", "/whisper/stats", "")
	s.waitsForTheLock("GET", "/whisper/stats", "")
	s.passesTheLock("HEAD", "/whisper/health", "")
	require.Equal(t, 403, s.do(context.Background(), http.MethodHead, "/whisper/secret", nil).status)
	require.Equal(t, 200, s.do(context.Background(), http.MethodHead, "/mvoice/health", nil).status)
}

func TestK2_AWebSocketThatNoListNamesTakesATurn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.VLLM, "")}})
	for _, upgrade := range []string{"Upgrade: websocket", "Upgrade: websocket\r\nUpgrade: h2c"} {
		s.serve("mvoice")
		busy, end := s.works("mvoice")
		done := make(chan string, 1)
		go func() {
			done <- s.raw("GET /vllm/v1/of-tomorrow HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, Upgrade\r\n" + upgrade + "\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
		}()
		s.queued(1)
		require.Empty(t, done)
		end()
		require.Equal(t, 200, s.await(busy).status)
		s.until("it has had its turn", func() bool { return s.status().Scheduler.QueueDepth == 0 })
	}
}

func TestH3_WhatLooksLikeAListOfModelsAndComputesTakesATurn(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{mvoice(), engine(modelserver.LocalAI, "", "one", "two")}})
	for _, upgrade := range []string{"", "\r\nConnection: Upgrade\r\nUpgrade: websocket"} {
		answer := s.raw("GET /localai/v1/models/v1/realtime HTTP/1.0\r\nHost: localhost\r\nX-Forwarded-Prefix: /v1/models" + upgrade + "\r\n\r\n")
		require.Contains(t, answer, "names no model")
	}
	require.Zero(t, s.servers["localai"].Stats().Requests["/v1/models/v1/realtime"])
	require.Equal(t, 200, s.get("/localai/v1/models").status)
}
