package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// full makes 127.0.1.1 with this port an address that takes no connection and refuses none, as that of a server that hangs,
// until it is closed.
func full(t *testing.T, port uint16) (closed func()) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	open := true
	closed = func() {
		if open {
			require.NoError(t, syscall.Close(fd))
		}
		open = false
	}
	t.Cleanup(closed)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 1, 1}, Port: int(port)}))
	require.NoError(t, syscall.Listen(fd, 0))
	address := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 1, 1}), port).String()
	for range 8 { // nobody accepts them: the kernel takes few
		conn, err := net.DialTimeout("tcp", address, 200*time.Millisecond)
		if err != nil {
			return closed
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Fatal("the kernel takes all connections")
	return nil
}

func TestAServerThatTakesNoConnectionInTimeKeepsItsMemoryAndOneThatRefusesItDoesNot(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 9)
	a.Addr = freeAddr(t)
	closed := full(t, netip.MustParseAddrPort(a.Addr).Port())
	a.Proxy = "reverse_proxy " + beside127(a.Addr) + " {\ntransport http {\ndial_timeout 200ms\n}\n}"
	s := start(t, layout{Consumers: []consumer{a}})
	s.get("/a/synthesize").refused(t, 503, "unhealthy")
	require.Empty(t, s.decisions("gone"), "it may hang, loaded as it is")
	closed()
	s.get("/a/synthesize").refused(t, 503, "unhealthy")
	require.NotEmpty(t, s.decisions("gone"))
}

// Another server that a route asks refuses the connection, while ComfyUI works on a prompt.
func TestARefusalByAnotherServerOfTheSiteTellsNothingOfTheModelServer(t *testing.T) {
	t.Parallel()
	dead, c := freeAddr(t), comfyui()
	c.VRAM = gib(9)
	socket := filepath.Join(t.TempDir(), "s")
	route := func(name, behind string) string {
		return "handle_path /" + name + "/* {\nroute {\ngpu_broker comfyui\n" + behind + "\n}\n}\n"
	}
	authed := "forward_auth " + dead + " {\nuri /check\n}\nreverse_proxy {http.gpu_broker.upstream}"
	s := start(t, layout{Consumers: []consumer{mvoice(), c}, Routes: route("authed", authed) +
		route("two", "reverse_proxy "+dead) + route("socket", "reverse_proxy unix/"+socket)})
	comfy, voice := s.servers["comfyui"], s.servers["mvoice"]
	s.ok(s.send("POST", "/mvoice/synthesize", "hello"))
	end := s.holdWork("comfyui")
	queuePrompt(t, s.url+"/comfyui/prompt", longPrompt("100"))
	s.working("comfyui")
	for name, address := range map[string]string{"authed": dead, "two": dead, "socket": socket} {
		message := s.post("/"+name+"/prompt", longPrompt("1")).refused(t, 502, "server_died")
		require.Contains(t, message, address, name)
	}
	speech := s.send("POST", "/mvoice/synthesize", "hello")
	s.waitQueued("mvoice", 1)
	require.Equal(t, "READY", s.state("comfyui"))
	require.Empty(t, s.decisions("gone"))
	end()
	s.ok(speech)
	require.Empty(t, modelserver.Overlap(comfy, voice))
	require.EqualValues(t, 6, s.status().Scheduler.TotalJobs, "none of them was tried once more")
}

// worksOnAfter checks that others wait for a server that works on after reverse_proxy has given up the request with this status.
func worksOnAfter(t *testing.T, proxy string, status int) {
	t.Helper()
	a, b := plainModel("a", 9, busyPlain), plainModel("b", 3)
	a.WorksOn, a.Proxy = true, proxy
	s := start(t, layout{Consumers: []consumer{a, b}})
	s.serve("b")
	end := s.holdWork("a")
	require.Equal(t, status, s.get("/a/synthesize").status)
	s.working("a")
	speech := s.send("POST", "/b/synthesize", "hello")
	s.waitQueued("b", 1)
	end()
	s.ok(speech)
	require.Empty(t, modelserver.Overlap(s.servers["a"], s.servers["b"]))
}

func TestAServerThatReverseProxyGivesUpIsNotTakenForIdleWhileItWorksOn(t *testing.T) {
	t.Parallel()
	worksOnAfter(t, "reverse_proxy {http.gpu_broker.upstream} {\ntransport http {\nresponse_header_timeout 300ms\n}\n}", 504)
}

// The usual fail-over: the own server is asked first and given up while it works, and the second is down, or hangs.
func TestAServerThatIsGivenUpBeforeASecondUpstreamFailsWorksOn(t *testing.T) {
	t.Parallel()
	hangs := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	t.Cleanup(hangs.Close)
	failOver := "reverse_proxy {http.gpu_broker.upstream} %s {\nlb_policy first\nlb_retries 1\nfail_duration 10s\ntransport http {\nresponse_header_timeout 300ms\n}\n}"
	for name, c := range map[string]struct {
		second string
		status int
	}{"refuses": {freeAddr(t), 502}, "hangs": {hangs.Listener.Addr().String(), 504}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			worksOnAfter(t, fmt.Sprintf(failOver, c.second), c.status)
		})
	}
}

func TestARequestWhoseFirstTryReachedItsServerIsAdmittedOnce(t *testing.T) {
	t.Parallel()
	for method, body := range map[string]string{"GET": "", "POST": "hello"} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			a, closed := viaRelay(t, plainModel("a", 9))
			a.Proxy = strings.Replace(a.Proxy, "transport http", "lb_retries 1\nlb_retry_match {\nmethod GET POST\n}\ntransport http", 1)
			s := start(t, layout{Global: "probe_interval 10m", Consumers: []consumer{a}})
			s.serve("a")
			end := s.holdWork("a")
			defer end()
			asks := s.send(method, "/a/synthesize", body)
			s.working("a")
			jobs := s.status().Scheduler.TotalJobs
			closed.close()
			require.Equal(t, 502, s.await(asks).status)
			require.Equal(t, jobs, s.status().Scheduler.TotalJobs)
		})
	}
}

func TestAServerThatReverseProxyHoldsForDownIsUnhealthyAndNotDead(t *testing.T) {
	t.Parallel()
	a, closed := viaRelay(t, plainModel("a", 9))
	a.Proxy = strings.Replace(a.Proxy, "transport http", "fail_duration 10m\ntransport http", 1)
	s := start(t, layout{Global: "probe_interval 10m", Consumers: []consumer{a}})
	s.serve("a")
	closed.close()
	first := s.post("/a/synthesize", "hello") // its second try finds reverse_proxy's mind made up
	closed.open()
	probes := s.servers["a"].Stats().HealthProbes
	for _, a := range []answer{first, s.post("/a/synthesize", "hello")} {
		message := a.refused(t, 503, "unhealthy")
		require.Contains(t, message, "fail_duration")
		require.Equal(t, "5", a.header.Get("Retry-After"))
	}
	require.Equal(t, 1, s.servers["a"].Stats().Requests["/synthesize"])
	require.Equal(t, probes, s.servers["a"].Stats().HealthProbes, "nobody suspects it")
}

// handle_response asks another server, which is down, or the same one at its other address.
func TestAJobThatItsServerHasAnsweredIsNotSentTwice(t *testing.T) {
	t.Parallel()
	a, b := plainModel("a", 9), plainModel("b", 3)
	b.Addr = freeAddr(t)
	page := func(to string) string {
		return "reverse_proxy {http.gpu_broker.upstream} {\n@any status 2xx\nhandle_response @any {\nreverse_proxy " + to + "\n}\n}"
	}
	a.Proxy, b.Proxy = page(freeAddr(t)), page(beside127(b.Addr))
	s := start(t, layout{Consumers: []consumer{a, b}})
	for _, name := range []string{"a", "b"} {
		s.post("/"+name+"/synthesize", "hello").refused(t, 502, "server_died")
		s.until(name+" has done its work", func() bool { return s.servers[name].Stats().Worked == 1 })
	}
	require.Empty(t, s.decisions("gone"))
	require.EqualValues(t, 2, s.status().Scheduler.TotalJobs)
	for _, server := range s.servers {
		require.Equal(t, 1, server.Stats().Worked)
	}
}

// request_buffers takes the beginning of the body before the connection is refused, and chunked bodies can't be read again.
func TestAStreamedUploadOfWhichAPartIsReadIsNotSentWithoutIt(t *testing.T) {
	t.Parallel()
	buffers, none := plainModel("buffers", 3), plainModel("none", 3)
	buffers.Route, none.Route = "stream_body", "stream_body"
	buffers, closed := viaRelay(t, buffers)
	none, alsoClosed := viaRelay(t, none)
	buffers.Proxy = strings.Replace(buffers.Proxy, "transport http", "request_buffers 4KiB\ntransport http", 1)
	s := start(t, layout{Consumers: []consumer{buffers, none}})
	closed.close()
	alsoClosed.close()
	jobs := uint64(0)
	for name, tries := range map[string]uint64{"buffers": 1, "none": 2} {
		chunked := io.MultiReader(strings.NewReader(strings.Repeat("x", 10_000))) // its length is not told
		resp, err := s.client.Post(s.url+"/"+name+"/echo", "application/octet-stream", chunked)
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 503, resp.StatusCode, "%s", body)
		require.Contains(t, string(body), "unhealthy")
		jobs += tries
		require.EqualValues(t, jobs, s.status().Scheduler.TotalJobs, name)
	}
}
