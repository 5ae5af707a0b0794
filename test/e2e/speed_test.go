package e2e

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// throughput sends n requests, a GET or with a body a POST, over so many connections and returns requests a second.
func (s *site) throughput(url, body string, connections, n int) float64 {
	s.t.Helper()
	var left, bad atomic.Int64
	left.Store(int64(n))
	var clients sync.WaitGroup
	began := time.Now()
	for range connections {
		clients.Go(func() {
			for left.Add(-1) >= 0 {
				resp, err := s.fetch(url, body)
				if err != nil {
					bad.Add(1)
					continue
				}
				if _, err = io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
					bad.Add(1)
				}
				_ = resp.Body.Close()
			}
		})
	}
	clients.Wait()
	require.Zero(s.t, bad.Load())
	return float64(n) / time.Since(began).Seconds()
}

func (s *site) fetch(url, body string) (*http.Response, error) {
	if body == "" {
		return s.client.Get(url)
	}
	return s.client.Post(url, "application/json", strings.NewReader(body))
}

// Each way is a site of its own, so that none stands behind another's matchers. Rounds are short and many, so that what else the
// machine does falls on both sides alike. A bound is broken if the whole confidence interval lies below it; the median is shown.
func TestAlone_ThroughputByPlainReverseProxysHasALowerBound(t *testing.T) {
	fast := consumer{Options: modelserver.Options{Name: "fast", VRAM: gib(1), Quiet: true}, Lines: "concurrency 32"}
	plain, fixed, named := "http://"+freeAddr(t), "http://"+freeAddr(t), "http://"+freeAddr(t)
	s := start(t, layout{Consumers: []consumer{fast}, Sites: plain + ` {
		reverse_proxy UPSTREAM_OF_fast
	}
	` + fixed + ` {
		gpu_broker fast
		reverse_proxy UPSTREAM_OF_fast
	}
	` + named + ` {
		gpu_broker {
			model_from body
		}
		reverse_proxy UPSTREAM_OF_fast
	}`})
	require.Equal(t, 200, s.get("/fast/work").status)
	chat := `{"model":"fast","temperature":0.7,"messages":[{"role":"system","content":"You are a helpful assistant. Answer briefly."},` +
		`{"role":"user","content":"` + strings.Repeat("What is the capital of France, and why is it not Lyon? ", 8) + `"}],"stream":false}`
	for _, c := range []struct {
		name, ours, path, body string
		connections            int
		bound                  float64
	}{
		{"a fixed consumer", fixed, "/audio/big?bytes=2000", "", 32, 0.95},
		{"the model from the body", named, "/v1/chat/completions", chat, 32, 0.95},
		{"the model from the body, few connections", named, "/v1/chat/completions", chat, 8, 0.95},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.t = t
			median, doubt := s.compare(plain+c.path, c.ours+c.path, c.body, c.connections)
			t.Logf("%s, %d connections: median ratio %.3f ± %.3f", c.name, c.connections, median, doubt)
			require.GreaterOrEqual(t, median+doubt, c.bound, "median ratio %.3f, give or take %.3f", median, doubt)
		})
	}
	s.t = t
}

// compare returns the median over interleaved pairs of the broker's throughput by plain reverse_proxy's, and half the width of
// its 95 % confidence interval, estimated from the quartiles.
func (s *site) compare(plainURL, brokerURL, body string, connections int) (median, doubt float64) {
	const pairs, requests = 150, 400
	urls := [2]string{plainURL, brokerURL}
	for _, url := range urls {
		s.throughput(url, body, connections, 5*requests) // to be warm
	}
	var ratios []float64
	for i := range pairs {
		var rates [2]float64
		for _, which := range [2]int{i % 2, 1 - i%2} {
			rates[which] = s.throughput(urls[which], body, connections, requests)
		}
		ratios = append(ratios, rates[1]/rates[0])
	}
	slices.Sort(ratios)
	median = (ratios[pairs/2-1] + ratios[pairs/2]) / 2
	return median, 1.57 * (ratios[pairs*3/4] - ratios[pairs/4]) / math.Sqrt(pairs)
}

func TestAlone_SwapTakesAtMost10MillisecondsBeyondTheServersOwnTime(t *testing.T) {
	a := consumer{Options: modelserver.Options{Name: "a", VRAM: gib(10)}}
	b := consumer{Options: modelserver.Options{Name: "b", VRAM: gib(10)}}
	s := start(t, layout{Consumers: []consumer{a, b}})
	require.Equal(t, 200, s.get("/a/work").status)
	warm := func(name string) time.Duration {
		var all []time.Duration
		for range 20 {
			r := s.get("/" + name + "/work")
			require.Equal(t, 200, r.status)
			all = append(all, r.took)
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	own := warm("a")
	var swaps []time.Duration
	for i := range 40 {
		r := s.get(fmt.Sprintf("/%s/work", []string{"b", "a"}[i%2]))
		require.Equal(t, 200, r.status)
		swaps = append(swaps, r.took-own)
	}
	slices.Sort(swaps)
	t.Logf("a swap takes %s in the median, %s at most, beyond a warm request of %s", swaps[len(swaps)/2], swaps[len(swaps)-1], own)
	require.LessOrEqual(t, swaps[len(swaps)/2], 10*time.Millisecond)
	require.EqualValues(t, 40, s.status().Scheduler.Evictions)
}
