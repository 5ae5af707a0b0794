package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// spoilt is a way in which a configuration fails.
type spoilt struct {
	name  string
	spoil func(caddyfile string) string
	want  string // in the answer
	late  bool   // it fails when it is started: everything of it has been provisioned, and some of its apps run already
}

// spoilers are the ways in which a configuration fails. taken is an address that another program listens on.
func spoilers(taken string) []spoilt {
	add := func(text string) func(string) string { return func(c string) string { return c + "\n" + text + "\n" } }
	replace := func(from, to string) func(string) string {
		return func(c string) string { return strings.Replace(c, from, to, 1) }
	}
	return []spoilt{
		{"occupied port", add("http://" + taken + " {\nbind 127.0.0.1\nrespond hi\n}"), "address already in use", true},
		{"socket in a folder that is not there", add("http://other.localhost {\nbind unix//nowhere/at/all.sock\nrespond hi\n}"), "no such file", true},
		{"another app fails to provision", add("https://other.localhost {\ntls /nowhere/cert.pem /nowhere/key.pem\nrespond hi\n}"), "/nowhere/cert.pem", false},
		{"another handler fails to provision", add("http://other.localhost {\nroute {\nrewrite * {unknown\nfile_server {\nprecompressed lzma\n}\n}\n}"), "lzma", false},
		{"route of a consumer that is not there", add("http://other.localhost {\ngpu_broker nobody\nreverse_proxy {http.gpu_broker.upstream}\n}"), "nobody", false},
		{"unknown word", replace("gpu_broker {", "gpu_broker {\nidle_timeot 3m"), "idle_timeot", false},
		{"consumer that can't be right", replace("gpu_broker {", "gpu_broker {\nconsumer wrong {\nupstream 127.0.0.1:1\nvram 1GiB\ncan_coexist_with nobody\n}"), "nobody", false},
	}
}

// occupied is an address on which something listens until the test ends.
func occupied(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

// insert puts lines at the beginning of the global option.
func insert(c, lines string) string {
	return strings.Replace(c, "\ngpu_broker {\n", "\ngpu_broker {\n"+lines+"\n", 1)
}

// withoutConsumer takes a consumer and its route out of a configuration.
func withoutConsumer(c, name string) string {
	c = regexp.MustCompile(`(?s)consumer `+name+` \{.*?\n\}\n((?:consumer |\}\n))`).ReplaceAllString(c, "$1")
	return regexp.MustCompile(`(?s)handle_path /`+name+`/\*.*?\n\}\n.*?\n\}\n`).ReplaceAllString(c, "")
}

// calm is a status without what changes by itself.
func calm(st broker.Status) broker.Status {
	st.Queue = nil
	st.GPUs = slices.Clone(st.GPUs)
	for i := range st.GPUs {
		st.GPUs[i].SampledAt = ""
	}
	return st
}

func TestReloadThatFailsHasNoEffectAtAll(t *testing.T) {
	t.Parallel()
	names := spoilers("127.0.0.1:1")
	for i := range names {
		t.Run(names[i].name, func(t *testing.T) {
			t.Parallel()
			const interval = 500 * time.Millisecond
			b := plainModel("b", 4, "pin")
			s := start(t, layout{Total: "32GiB", Global: "probe_interval " + interval.String(), Consumers: []consumer{plainModel("a", 5), b, plainModel("c", 3), plainModel("gone", 2)}})
			for name := range s.servers {
				s.serve(name)
			}
			s.until("all that is loaded has been seen", func() bool {
				st := s.status()
				for _, c := range st.Consumers {
					if c.Slots[0].Measured == 0 {
						return false
					}
				}
				return st.GPUs[0].Used == st.GPUs[0].Booked
			})
			way := spoilers(occupied(t))[i]
			wire := newTripwire(t)
			end := s.holdWork("a")
			stream := s.send("GET", "/a/stream?events=250&ms=1", "")
			s.working("a")
			waits := s.send("POST", "/gone/synthesize", "x")
			s.waitQueued("gone", 1)

			good := s.caddyfileNow()
			harm := withoutConsumer(good, "gone")
			require.NotContains(t, harm, "gone")
			for _, edit := range [][2]string{
				{fmt.Sprintf("vram %d", gib(5)), "vram 14GiB"},
				{"\npin\n", "\n"},
				{"probe_interval " + interval.String(), "probe_interval 10ms\nidle_timeout 1ms"},
				{"consumer a {", "consumer fresh {\nupstream " + wire.addr + "\nvram 20GiB\n" + manners[""] + "\n}\nconsumer a {"},
				{"handle /gpu/*", "handle_path /fresh/* {\ngpu_broker fresh\nreverse_proxy {http.gpu_broker.upstream}\n}\nhandle /gpu/*"},
			} {
				require.Contains(t, harm, edit[0])
				harm = strings.Replace(harm, edit[0], edit[1], 1)
			}
			at := strings.Index(harm, "consumer c {")
			harm = harm[:at] + strings.NewReplacer("health /health", "health /other", "/api/admin/unload", "/other").Replace(harm[at:])

			probes := func() (n int) {
				for _, srv := range s.servers {
					n += srv.Stats().HealthProbes
				}
				return n
			}
			before, decided, probed, began := calm(s.status()), s.decisions(""), probes(), time.Now()
			tries := 3
			if way.late {
				tries = 10 // Caddy starts and stops its apps in any order
			}
			for range tries {
				a := s.adminDo("POST", "/load", "text/caddyfile", way.spoil(harm))
				require.Equal(t, 400, a.status, "%s", a.body)
				require.Contains(t, string(a.body), way.want)
				require.Equal(t, before.Consumers, s.status().Consumers)
			}
			for name, srv := range s.servers { // whatever it may have begun shows by now
				n := srv.Stats().HealthProbes
				s.until(name+" is probed again", func() bool { return srv.Stats().HealthProbes >= n+2 })
			}
			elapsed := time.Since(began)
			require.LessOrEqual(t, probes()-probed, len(s.servers)*(int(elapsed/interval)+1), "in %s", elapsed)
			require.Equal(t, before, calm(s.status()))
			require.Equal(t, decided, s.decisions(""))
			require.Zero(t, wire.hits.Load(), "nobody connects to a server that no ruling configuration has")
			require.Zero(t, s.unloadCalls())
			require.Zero(t, s.servers["c"].Stats().Requests["/other"])
			for name, srv := range s.servers {
				require.Equal(t, 1, srv.Stats().LoadsStarted, name)
			}

			require.Zero(t, len(stream), "the stream still runs")
			end()
			require.Equal(t, modelserver.StreamBytes(250), s.ok(stream).body)
			s.ok(waits)
			s.client.CloseIdleConnections()
			for name := range s.servers {
				s.serve(name)
			}
			s.reloaded(func(c string) string { return c + "\n# good again\n" })
			s.serve("gone")
			require.Zero(t, s.unloadCalls())

			// All of it has its effect once it does not fail.
			s.reloaded(func(string) string { return harm })
			s.until("it has its effect", func() bool {
				st := s.status().Consumers
				_, there := st["gone"]
				return !there && wire.hits.Load() > 0 && s.servers["c"].Stats().Requests["/other"] > 0 && !st["b"].Pinned &&
					s.servers["gone"].Stats().Unloads == 1 && s.servers["a"].Stats().Unloads == 1
			})
		})
	}
}

func TestWhatWaitsUnderTheOldConfigurationIsServedAfterItIsGone(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	for _, c := range []struct {
		name, proxy string
		https       bool
	}{
		{"fixed upstream", "reverse_proxy " + addr, false},
		{"upstream by placeholder", "reverse_proxy {http.gpu_broker.upstream}", false},
		{"dynamic upstream", "reverse_proxy {\ndynamic gpu_broker\n}", false},
		{"HTTP/2", "reverse_proxy {http.gpu_broker.upstream}", true},
	} {
		t.Run(c.name, func(t *testing.T) { // not in parallel: the address is one
			b := plainModel("b", 9)
			b.Addr, b.Proxy = addr, c.proxy
			s := start(t, layout{HTTPS: c.https, Consumers: []consumer{plainModel("a", 9), b}})
			s.serve("a")
			runs, end := s.works("a")
			sizes := []int{0, 100, 200 << 10, 3 << 20} // none, small, read ahead, and in a file
			var waits []<-chan answer
			for i, size := range sizes {
				waits = append(waits, s.send("POST", "/b/echo", string(every(size))))
				s.waitQueued("b", i+1)
			}
			warm := s.send("POST", "/a/synthesize", "x")
			s.waitQueued("a", 1)
			for i := range 6 { // each returns when the one before has been stopped and cleaned up
				s.reloaded(func(c string) string {
					c = regexp.MustCompile(`(?s)\nhandle /hello.*?\n\}`).ReplaceAllString(c, "")
					return strings.Replace(c, "\nhandle /gpu/*", fmt.Sprintf("\nhandle /hello {\nrespond %d\n}\nhandle /gpu/*", i), 1)
				})
			}
			require.Equal(t, "5", string(s.get("/hello").body))
			require.Zero(t, len(runs), "all this while it runs")
			require.Equal(t, len(sizes), s.status().Consumers["b"].Waiting)
			end()
			s.ok(runs)
			for i, ch := range waits {
				a := s.ok(ch)
				require.True(t, bytes.Equal(every(sizes[i]), a.body), "%d bytes came back as %d", sizes[i], len(a.body))
			}
			s.ok(warm)
			s.nothingRuns()
			require.Equal(t, 1, s.servers["b"].Stats().LoadsStarted)
			s.until("the server has ended all, too", func() bool { return s.servers["b"].Stats().Worked >= len(sizes) })
			require.Equal(t, len(sizes), s.servers["b"].Stats().Worked)
		})
	}
}

func TestRemovedConsumerThatLoadsServesWhoWaitsAndIsUnloaded(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2, "pin")}})
	s.serve("a")
	loaded := s.holdLoad("b")
	var waits []<-chan answer
	for i := range 3 {
		waits = append(waits, s.send("POST", "/b/synthesize", "x"))
		s.waitQueued("b", i+1)
	}
	s.waitState("b", "LOADING")
	s.reloaded(func(c string) string { return withoutConsumer(c, "b") })
	require.True(t, s.status().Consumers["b"].Removed)
	require.Equal(t, "LOADING", s.state("b"))
	loaded()
	for _, ch := range waits {
		s.ok(ch)
	}
	s.until("b is gone", func() bool { _, there := s.status().Consumers["b"]; return !there })
	st := s.servers["b"].Stats()
	require.Equal(t, 1, st.LoadsStarted)
	require.Equal(t, 3, st.Worked)
	require.Equal(t, 1, st.Unloads)
	require.Zero(t, st.UnloadsWhileBusy)
	probes := st.HealthProbes
	n := s.servers["a"].Stats().HealthProbes
	s.until("a is probed twice", func() bool { return s.servers["a"].Stats().HealthProbes >= n+2 })
	require.LessOrEqual(t, s.servers["b"].Stats().HealthProbes, probes+1, "nobody asks it any more")
	require.EqualValues(t, s.status().Consumers["a"].Slots[0].Booking, s.status().GPUs[0].Booked)
}

func TestConsumerThatIsPutBackWhileItStillServesIsKept(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 2), plainModel("b", 2)}})
	s.serve("b")
	runs, end := s.works("b")
	with := s.caddyfileNow()
	s.reloaded(func(c string) string { return withoutConsumer(c, "b") })
	require.True(t, s.status().Consumers["b"].Removed)
	s.reloaded(func(string) string { return with + "\n# back\n" })
	require.False(t, s.status().Consumers["b"].Removed)
	require.Zero(t, len(runs))
	end()
	s.ok(runs)
	s.serve("b")
	require.Zero(t, s.unloadCalls())
	require.Equal(t, 1, s.servers["b"].Stats().LoadsStarted)
	require.EqualValues(t, 3, s.status().Consumers["b"].TotalRequests)
}

func TestFC16_ChangedLifecycleRouteTakesEffectWithoutAReloadOfTheModel(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	before := s.status().Consumers["a"]
	runs, end := s.works("a")
	s.reloaded(func(c string) string {
		return strings.Replace(c, "unload POST /api/admin/unload", "unload POST /api/admin/unload?how=new", 1)
	})
	require.Equal(t, "READY", s.state("a"), "it is loaded as before")
	require.Equal(t, before.Slots[0].Booking, s.status().Consumers["a"].Slots[0].Booking)
	end()
	s.ok(runs)
	s.serve("b")
	var unloads []string
	for _, e := range s.servers["a"].Events() {
		if e.Kind == modelserver.EventRequestStart && strings.HasPrefix(e.URI, "/api/admin/unload") {
			unloads = append(unloads, e.URI)
		}
	}
	require.Equal(t, []string{"/api/admin/unload?how=new"}, unloads)
	require.Equal(t, 1, s.servers["a"].Stats().LoadsStarted)
	require.Zero(t, s.servers["a"].Stats().UnloadsWhileBusy)
}

func TestFC16_ConsumerThatMovesIsProbedAndServedAtItsNewAddress(t *testing.T) {
	t.Parallel()
	s := start(t, layout{Total: "32GiB", Consumers: []consumer{plainModel("a", 2)}})
	s.serve("a")
	second, err := modelserver.Start(modelserver.Options{Name: "second", SimDir: s.sim, VRAM: gib(2)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = second.Close() })
	runs, end := s.works("a")
	waits := s.send("POST", "/a/synthesize", "x")
	s.waitQueued("a", 1)
	s.reloaded(func(c string) string { return strings.ReplaceAll(c, s.servers["a"].Addr(), second.Addr()) })
	end()
	s.ok(runs)
	s.ok(waits)
	s.serve("a")
	require.Equal(t, 2, second.Stats().Worked, "who waited is served there too")
	require.Equal(t, 1, second.Stats().LoadsStarted)
	n := s.servers["a"].Stats().HealthProbes
	m := second.Stats().HealthProbes
	s.until("the new one is probed", func() bool { return second.Stats().HealthProbes >= m+2 })
	require.LessOrEqual(t, s.servers["a"].Stats().HealthProbes, n+1, "the old one no more")
}

func TestFC17_StreamsAcrossAReloadReleaseTheirPlaceOnce(t *testing.T) {
	t.Parallel()
	for _, delay := range []string{"", "stream_close_delay 10m"} {
		for _, kind := range []string{"SSE", "websocket"} {
			t.Run(strings.TrimSpace(kind+" "+delay), func(t *testing.T) {
				t.Parallel()
				ui := comfyui()
				ui.Name, ui.VRAM = "ui", gib(4)
				ui.Lines = "lifecycle_by_hand\nhealth /system_stats"
				ui.Proxy = "reverse_proxy {http.gpu_broker.upstream} {\n" + delay + "\n}"
				speech := plainModel("speech", 4)
				speech.Proxy = ui.Proxy
				s := start(t, layout{Total: "32GiB", Consumers: []consumer{speech, ui}})
				s.serve("speech")
				name, requests := "speech", uint64(3)
				var conn *websocket.Conn
				var stream <-chan answer
				if kind == "SSE" {
					s.holdWork("speech")
					stream = s.send("GET", "/speech/stream?events=60&ms=1", "")
				} else {
					name, requests = "ui", 1
					conn = s.dialSocket("/ui/ws?clientId=it")
					require.Contains(t, readSocket(t, conn), `"sid":"it"`)
				}
				s.until("it runs", func() bool { return s.status().Consumers[name].Active == 1 })
				require.Equal(t, name, s.status().GPUs[0].Lock)
				waits := s.send("POST", "/speech/synthesize", "x")
				s.waitQueued("speech", 1)
				for i := range 3 {
					s.reloaded(func(c string) string { return c + fmt.Sprintf("\n# %d\n", i) })
				}

				switch {
				case kind == "SSE":
					s.letWork("speech")
					require.Equal(t, modelserver.StreamBytes(60), s.ok(stream).body, "it is never cut")
				case delay == "":
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					_, _, err := conn.Read(ctx)
					require.Error(t, err)
					require.NoError(t, ctx.Err(), "Caddy cuts it at once")
				default:
					require.Equal(t, 1, s.status().Consumers[name].Active)
					require.Zero(t, len(waits), "it holds the lock as before")
					resp, err := http.Post(s.servers["ui"].URL()+"/queue", "application/json", strings.NewReader(`{"clear":true}`))
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
					require.Contains(t, readSocket(t, conn), "queue_remaining")
					require.NoError(t, conn.Close(websocket.StatusNormalClosure, ""))
				}
				s.ok(waits)
				s.idle(name)
				s.until("nothing is left", func() bool {
					st := s.status()
					return st.Scheduler.InFlight == 0 && st.GPUs[0].Lock == ""
				})
				st := s.status()
				require.Equal(t, requests, st.Consumers[name].TotalRequests)
				require.EqualValues(t, 3, st.Scheduler.TotalJobs)
				s.oneAtATime("speech")
				require.EqualValues(t, 7, s.nothingRuns().Scheduler.TotalJobs)
				require.Empty(t, modelserver.Overlap(s.servers["speech"], s.servers["ui"]))
			})
		}
	}
}

// H8: what a configuration had goes with it: its goroutines, and its connections to the servers, also those that are in use while it goes.
func TestH8_ReloadsLeaveNoConnectionsAndGoroutinesBehind(t *testing.T) {
	t.Parallel()
	for name, proxy := range map[string]string{"placeholder": "reverse_proxy {http.gpu_broker.upstream}", "dynamic": "reverse_proxy {\ndynamic gpu_broker\n}"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := plainModel("a", 4), plainModel("b", 4)
			a.Proxy, b.Proxy = proxy, proxy
			s := start(t, layout{Consumers: []consumer{a, b}})
			// count is how many goroutines and open files Caddy has.
			count := func() (goroutines, files int) {
				line, _, _ := strings.Cut(string(s.adminDo("GET", "/debug/pprof/goroutine?debug=1", "", "").body), "\n")
				_, err := fmt.Sscanf(line, "goroutine profile: total %d", &goroutines)
				require.NoError(t, err, line)
				open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
				require.NoError(t, err)
				return goroutines, len(open)
			}
			// Each connection serves one request. One that comes to the listener that goes is reset, with or without us: it is made anew.
			once := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			n := 0
			reloads := func(times int) {
				for range times {
					n++
					s.until("its work is done", func() bool {
						work := s.doWith(once, t.Context(), "POST", "/b/work", strings.NewReader("x"))
						require.True(t, work.err != nil || work.status == 200, "%d %s", work.status, work.body)
						return work.err == nil
					})
					stream := make(chan answer, 1)
					go func() { stream <- s.doWith(once, t.Context(), "GET", "/a/stream?events=20&ms=2", nil) }()
					a := s.reload(func(c string) string {
						return strings.Replace(c, "handle /gpu/*", fmt.Sprintf("handle /hello {\nrespond %d\n}\nhandle /gpu/*", n), 1)
					})
					require.Equal(t, 200, a.status, "%s", a.body)
					if got := s.await(stream); got.err == nil { // else it came to the listener that went
						require.Equal(t, 200, got.status)
					}
					s.client.CloseIdleConnections()
				}
			}
			reloads(4)
			goroutines, files := count()
			reloads(32)
			s.until("nothing has piled up", func() bool {
				g, f := count()
				return g <= goroutines+12 && f <= files+8
			})
		})
	}
}
