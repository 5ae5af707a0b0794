package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// servedBy sends a request to a path of the site, which a consumer must serve, by its own word and by the broker's.
func (s *site) servedBy(want, path string) answer {
	s.t.Helper()
	before := s.servers[want].Stats().Worked
	a := s.post(path, "hello")
	s.came(want, a)
	require.Equal(s.t, before+1, s.servers[want].Stats().Worked)
	return a
}

// came is an answer that must have come from a consumer.
func (s *site) came(want string, a answer) {
	s.t.Helper()
	require.NoError(s.t, a.err)
	require.Equal(s.t, http.StatusOK, a.status, "%s", a.body)
	require.Equal(s.t, want, a.header.Get("X-GPU-Broker-Consumer"))
}

// ladderSite has a large model with a small one as its fallback, and another that needs the room of the large one.
func ladderSite(t *testing.T, large, route string) *site {
	a := plainModel("large", 9, "fallback small", large)
	a.Route = route
	return start(t, layout{Global: "probe_interval 1m", Consumers: []consumer{a, plainModel("small", 4), plainModel("other", 9)}})
}

// outgrown makes the large model cold, with the small one warm and no room for the large one.
func (s *site) outgrown() {
	s.t.Helper()
	s.serve("large")
	s.serve("small")
	s.serve("other") // the large one makes way: it was used before the small one
	require.Equal(s.t, []string{"IDLE", "READY", "READY"}, []string{s.state("large"), s.state("small"), s.state("other")})
}

func TestALadderLeadsToTheFallbackOnlyWhereThePrimaryWouldMakeAnotherGo(t *testing.T) {
	t.Parallel()
	s := ladderSite(t, "", "")
	s.servedBy("large", "/large/synthesize") // cold, and it fits
	require.Equal(t, 1, s.servers["large"].Stats().Loads)
	s.servedBy("large", "/large/synthesize") // warm
	s.servedBy("small", "/small/synthesize")
	s.servedBy("large", "/large/synthesize") // warm, as is the fallback

	s.doByHand("consumers/large/unload")
	s.doByHand("consumers/small/unload")
	s.outgrown()
	loads, evictions := s.servers["large"].Stats().Loads, s.status().Scheduler.Evictions
	for range 3 {
		s.servedBy("small", "/large/synthesize") // cold, and another would have to go
	}
	require.Equal(t, loads, s.servers["large"].Stats().Loads)
	require.Equal(t, evictions, s.status().Scheduler.Evictions)
	require.EqualValues(t, 5, s.metric(`wait_seconds_count{consumer="small"}`), "it counts for who served")
	require.EqualValues(t, 5, s.metric(`run_seconds_count{consumer="small"}`))

	s.doByHand("consumers/small/unload")
	s.servedBy("large", "/large/synthesize") // none is warm: it makes its room
	require.Equal(t, evictions+1, s.status().Scheduler.Evictions)
	require.Equal(t, "IDLE", s.state("other"))
}

func TestAFallbackThatWorksIsWaitedFor(t *testing.T) {
	t.Parallel()
	s := ladderSite(t, "", "")
	s.outgrown()
	runs, end := s.works("small")
	waits := s.send("POST", "/large/synthesize", "x")
	s.waitQueued("small", 1)
	require.Zero(t, s.status().Consumers["large"].Waiting)
	end()
	s.ok(runs)
	s.came("small", s.ok(waits))
	require.Equal(t, "IDLE", s.state("large"))
}

func TestALargeBodyReachesTheFallbackWhole(t *testing.T) {
	t.Parallel()
	s := ladderSite(t, "", "")
	s.outgrown()
	body := string(make([]byte, 300_000)) // above what is taken in only after the admission
	a := s.post("/large/echo", body)
	s.came("small", a)
	require.Equal(t, body, string(a.body))
}

func TestPinPrimaryKeepsRequestsWhereTheyWereSent(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]func(t *testing.T) *site{
		"by the consumer": func(t *testing.T) *site { return ladderSite(t, "pin_primary", "") },
		"by the route":    func(t *testing.T) *site { return ladderSite(t, "", "pin_primary") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := s(t)
			s.outgrown()
			s.servedBy("large", "/large/synthesize")
			require.Equal(t, "IDLE", s.state("other"))
		})
	}
}

func TestTheFallbackOfARouteReplacesThatOfTheConsumer(t *testing.T) {
	t.Parallel()
	s := ladderSite(t, "", "fallback other")
	s.outgrown()
	s.servedBy("other", "/large/synthesize")
	s.reloaded(func(c string) string { return strings.Replace(c, "fallback other", "fallback other small", 1) })
	s.servedBy("other", "/large/synthesize")
	s.reloaded(func(c string) string { return strings.Replace(c, "fallback other small", "fallback small other", 1) })
	s.servedBy("small", "/large/synthesize")
}

// N4: a fallback that is taken is a decision, a count and a line of the log. Here an idle image server holds the card, and chats go elsewhere.
func TestN4_AChatThatGoesToTheCloudBesideAnIdleImageServerIsTold(t *testing.T) {
	t.Parallel()
	up := newSky(t, false)
	s := start(t, layout{
		Global:    "consumer sky {\ncloud\nupstream " + up.addr() + "\n}",
		Consumers: []consumer{plainModel("chat", 9, "fallback sky"), plainModel("pictures", 9)},
	})
	s.serve("pictures")
	for range 3 {
		s.came("sky", s.post("/chat/synthesize", "hello"))
	}
	s.fallbackTold("chat", "sky", 3)
	s.doByHand("consumers/pictures/unload")
	s.servedBy("chat", "/chat/synthesize")
	s.fallbackTold("chat", "sky", 3) // none was taken
}

func TestN4_AFallbackToAnotherLocalModelIsTold(t *testing.T) {
	t.Parallel()
	s := ladderSite(t, "", "fallback other small")
	s.serve("small")
	s.serve("large")
	s.servedBy("large", "/large/synthesize")
	require.Empty(t, s.decisions("fallback"), "the first candidate itself is none")
	s.serve("other")
	s.servedBy("other", "/large/synthesize") // the route's first
	s.fallbackTold("large", "other", 1)
	s.doByHand("consumers/other/unload")
	s.outsider("another program", gib(9)) // which leaves no room for large
	s.until("it is seen", func() bool { return s.status().GPUs[0].Free < int64(gib(9)) })
	s.servedBy("small", "/large/synthesize")
	s.fallbackTold("large", "small", 1)
	require.Equal(t, "small", s.decisions("fallback")[1].Target)
}

// fallbackTold requires that so many requests for a consumer were told to have gone to another, wherever it is told.
func (s *site) fallbackTold(from, to string, times int) {
	s.t.Helper()
	n := 0
	for _, d := range s.decisions("fallback") {
		if d.Consumer == from && d.Target == to {
			require.Contains(s.t, d.Reason, to)
			n++
		}
	}
	require.Equal(s.t, times, n)
	require.EqualValues(s.t, times, s.metric(`fallbacks_total{consumer="`+from+`",to="`+to+`"}`))
	s.until("the log tells of it", func() bool {
		n := 0
		for line := range strings.Lines(s.log()) {
			if strings.Contains(line, `"msg":"fallback","consumer":"`+from+`"`) && strings.Contains(line, `"for":"`+to+`"`) {
				n++
			}
		}
		return n == times
	})
}

func TestN4_WhatAFallbackBlocksDoesNotReachIt(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Global: "probe_interval 1m", Consumers: []consumer{plainModel("large", 9, "fallback small"), plainModel("small", 4, "blocked POST /secret*"), plainModel("other", 9)}})
	s.outgrown()
	s.servedBy("small", "/large/synthesize")
	require.Equal(t, "large", s.post("/large/secret/x", "hello").header.Get("X-GPU-Broker-Consumer"))
	require.Zero(t, s.servers["small"].Stats().Requests["/secret/x"])
	require.Equal(t, 403, s.post("/small/secret/x", "hello").status)
}

// The three ways to the upstream lead to who was chosen.
func TestAFallbackIsReachedInEveryWayToTheUpstream(t *testing.T) {
	t.Parallel()
	for name, proxy := range map[string]string{
		"placeholder": `reverse_proxy {http.gpu_broker.upstream} {
			header_down X-Seen "{http.gpu_broker.consumer} {http.gpu_broker.upstream}"
		}`,
		"dynamic": `reverse_proxy {
			dynamic gpu_broker
			header_down X-Seen "{http.gpu_broker.consumer} {http.gpu_broker.upstream}"
		}`,
		"matcher": `@small vars {http.gpu_broker.consumer} small
		reverse_proxy @small UPSTREAM_OF_small {
			header_down X-Seen "{http.gpu_broker.consumer} {http.gpu_broker.upstream}"
		}
		reverse_proxy 127.0.0.1:1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := plainModel("large", 9, "fallback small")
			a.Proxy = proxy
			s := start(t, layout{Consumers: []consumer{a, plainModel("small", 4), plainModel("other", 9)}})
			s.serve("small")
			s.serve("other")
			got := s.servedBy("small", "/large/synthesize")
			require.Equal(t, "small "+s.servers["small"].Addr(), got.header.Get("X-Seen"))
		})
	}
}

// Once admitted a request keeps its consumer: what fails is not given to another in silence.
func TestAFallbackThatCanNotBeReachedIsNotReplacedByAnother(t *testing.T) {
	t.Parallel()
	s := ladderSite(t, "", "")
	s.outgrown()
	s.servers["small"].Kill()
	loads := s.servers["large"].Stats().Loads
	a := s.post("/large/synthesize", "x")
	require.Equal(t, 503, a.status, "%s", a.body)
	doc := s.refusal(a)
	require.Equal(t, "unhealthy", doc.Code)
	require.Equal(t, "small", doc.Consumer)
	require.Equal(t, "small", a.header.Get("X-GPU-Broker-Consumer"))
	require.Equal(t, loads, s.servers["large"].Stats().Loads)
	// The next one is chosen anew: the small one is known to be away.
	s.servedBy("large", "/large/synthesize")
}

func TestExplainSaysWhatARequestWouldDoAndWhomItWouldGoTo(t *testing.T) {
	t.Parallel()
	s := ladderSite(t, "priority 7", "")
	explain := func(query string) (doc map[string]any) {
		t.Helper()
		a := s.adminDo("GET", "/gpu_broker/explain?"+query, "", "")
		require.Equal(t, 200, a.status, "%s", a.body)
		require.NoError(t, json.Unmarshal(a.body, &doc))
		require.NotEmpty(t, doc["reason"])
		return doc
	}
	doc := explain("consumer=large")
	require.Equal(t, "loads", doc["outcome"])
	require.EqualValues(t, 7, doc["priority"])
	require.NotContains(t, doc, "fallback")
	require.EqualValues(t, 3, explain("consumer=large&priority=3")["priority"])
	s.outgrown()
	doc = explain("consumer=large")
	require.Equal(t, "evicts", doc["outcome"])
	require.Equal(t, "small", doc["fallback"])
	require.Contains(t, doc["reason"], "small is warm")
	require.Equal(t, []any{"other"}, doc["victims"])
	require.Equal(t, "runs", explain("consumer=small")["outcome"])
	before := s.status()
	require.Equal(t, "IDLE", s.state("large"), "nothing has happened")
	require.EqualValues(t, 3, before.Scheduler.TotalJobs)

	for query, want := range map[string]int{"": 400, "consumer=large&priority=soon": 400, "consumer=large&priority=-1": 400, "consumer=large&priority=1000001": 400, "consumer=larg": 404} {
		require.Equal(t, want, s.adminDo("GET", "/gpu_broker/explain?"+query, "", "").status, query)
	}
	require.Contains(t, string(s.adminDo("GET", "/gpu_broker/explain?consumer=larg", "", "").body), "did you mean large")
	require.Equal(t, 405, s.adminDo("POST", "/gpu_broker/explain?consumer=large", "", "").status)
}
