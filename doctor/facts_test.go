package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// fixed is a sampler guest that stands for one that is configured.
type fixed struct{ gpu.Guest }

// factsOf are facts about a card of 24GiB and these consumers.
func factsOf(consumers ...*config.Consumer) *facts {
	b := &config.Broker{Scheduler: config.Evicting, Consumers: consumers}
	for _, c := range consumers {
		c.Enabled = config.On
		if c.Budget == 0 {
			c.Budget = caddy.Duration(10 * time.Minute)
		}
		if c.LoadTimeout == 0 {
			c.LoadTimeout = caddy.Duration(5 * time.Minute)
		}
	}
	return &facts{
		site: &Site{Broker: b, Sampler: fixed{}, Config: []byte("{}")}, lines: lines{}, routes: &routes{}, probes: map[string]probe{}, answers: map[string]Identity{}, sockets: map[string]error{},
		gpu: gpuFacts{looked: true, name: "nvml", sample: gpu.Sample{Devices: []gpu.Device{
			{Index: 0, UUID: "a", Name: "Card", Health: gpu.Healthy, Total: 24 * gpu.GiB, Free: 24 * gpu.GiB, MemoryKnown: true, ProcessesKnown: true},
		}}},
		host: host{user: "user caddy", hostPIDs: true, cgo: true, firstFree: 1024, nvidia: true, nvidiaDriver: true},
	}
}

// raws are raw lifecycles by consumer.
func raws(pairs ...string) map[string]json.RawMessage {
	out := map[string]json.RawMessage{}
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i]] = json.RawMessage(pairs[i+1])
	}
	return out
}

// texts are the findings but for notes, one a line.
func texts(found []Finding) string {
	var b strings.Builder
	for _, f := range found {
		if f.Severity != Note {
			fmt.Fprintf(&b, "%s %s: %s → %s\n", f.Severity, f.Consumer, f.What, f.Mend)
		}
	}
	return b.String()
}

func TestClaimsAreHeldAgainstTheCard(t *testing.T) {
	const gib = gpu.GiB
	for name, c := range map[string]struct {
		reserve   gpu.Bytes
		consumers []*config.Consumer
		want      string // empty: nothing
	}{
		"it fits with its cushion":         {0, []*config.Consumer{{Name: "a", VRAM: 24*gib - 256*gpu.MiB}}, ""},
		"it does not":                      {0, []*config.Consumer{{Name: "a", VRAM: 24*gib - 255*gpu.MiB}}, "error a: it claims 23.75GiB, with the cushion 24GiB, and never fits: GPU 0 has 24GiB"},
		"not beside the reserve":           {gib, []*config.Consumer{{Name: "a", VRAM: 23 * gib}}, "of which 1GiB are reserved"},
		"a model":                          {0, []*config.Consumer{{Name: "a", VRAM: gib, Models: []*config.Model{{Name: "x"}, {Name: "y", VRAM: 30 * gib}}}}, "error a: model y: it claims 30GiB"},
		"no such card":                     {0, []*config.Consumer{{Name: "a", VRAM: gib, GPU: 3}}, "error a: it is on GPU 3, and there is none: the machine has 1 GPU"},
		"beside what is pinned":            {0, []*config.Consumer{{Name: "a", VRAM: 10 * gib, Pin: true}, {Name: "b", VRAM: 15 * gib}}, "error b: it claims 15GiB, with the cushion 15.25GiB, and never fits beside what is pinned (a: 10GiB)"},
		"all that is pinned":               {0, []*config.Consumer{{Name: "a", VRAM: 15 * gib, Pin: true}, {Name: "b", VRAM: 15 * gib, Pin: true}}, "error : what is pinned claims 30GiB together (a, b)"},
		"all that stays":                   {0, []*config.Consumer{{Name: "a", VRAM: 15 * gib, NoEvict: true}, {Name: "b", VRAM: 15 * gib, VRAMManaged: true}}, "warning : what is never unloaded for others (pin, no_evict, vram_managed) claims 30GiB together (a, b)"},
		"a cloud consumer claims nothing":  {0, []*config.Consumer{{Name: "a", VRAM: 90 * gib, Cloud: true}}, ""},
		"two in one process":               {0, []*config.Consumer{{Name: "a", VRAM: 15 * gib}, {Name: "b", VRAM: 15 * gib, Shares: "a"}}, "error a: it claims 30GiB"},
		"two that make way for each other": {0, []*config.Consumer{{Name: "a", VRAM: 20 * gib}, {Name: "b", VRAM: 20 * gib}}, ""},
	} {
		f := factsOf(c.consumers...)
		f.site.Broker.Reserve = c.reserve
		said := texts(judgeClaims(f))
		if c.want == "" {
			assert.Empty(t, said, name)
			continue
		}
		assert.Contains(t, said, c.want, name)
		assert.Equal(t, 1, strings.Count(said, "\n"), "%s: %s", name, said)
	}
	f := factsOf(&config.Consumer{Name: "a", VRAM: 10 * gib})
	f.gpu.sample.Devices[0].Processes = []gpu.Process{{PID: 0, Name: "game", Used: 15 * gib}}
	assert.Contains(t, texts(judgeClaims(f)), "warning a: it claims 10GiB, with the cushion 10.25GiB, and does not fit while others hold 15GiB (game)")
}

func TestSamplersAreJudged(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*facts)
		want   string
	}{
		"nvml": {func(*facts) {}, ""},
		"nvidia_smi without cgo": {func(f *facts) {
			f.gpu.name, f.gpu.driver, f.gpu.why, f.host.cgo = "nvidia_smi", "auto", "auto chose nvidia_smi; before it: no cgo", false
		}, "warning : GPUs are read by running nvidia-smi (auto chose nvidia_smi; before it: no cgo)"},
		"nvidia_smi where nvml works":   {func(f *facts) { f.gpu.name, f.gpu.better = "nvidia_smi", "nvml" }, "→ write gpu auto: nvml works here"},
		"static where a card is":        {func(f *facts) { f.gpu.name, f.gpu.better = "static", "nvml" }, "degraded: the GPUs are declared and not read"},
		"static where nothing else can": {func(f *facts) { f.gpu.name, f.gpu.autoErr = "static", errors.New("no way") }, "what gpu auto says: no way"},
		"simulated beside a card":       {func(f *facts) { f.gpu.name, f.gpu.better = "simulated", "nvml" }, "write gpu auto"},
		"none, no driver":               {func(f *facts) { f.gpu.err, f.host.nvidiaDriver = errors.New("no\nNVML"), false }, "error : no GPU can be read: no; NVML → there is a card of NVIDIA's, but its driver is not loaded"},
		"none, in a container": {func(f *facts) {
			f.gpu.err, f.host.nvidia, f.host.nvidiaDriver, f.host.container = errors.New("no"), false, false, true
		}, "docker run --gpus all"},
		"none, without cgo": {func(f *facts) { f.gpu.err, f.host.cgo = errors.New("no"), false }, "CGO_ENABLED=1"},
		"none, no library":  {func(f *facts) { f.gpu.err = errors.New("no") }, "ldconfig"},
		"none, a card of AMD's": {func(f *facts) {
			f.gpu.err, f.host.nvidia, f.host.nvidiaDriver, f.host.amd = errors.New("no"), false, false, true
		}, "driver amdgpu"},
		"none, no card": {func(f *facts) { f.gpu.err, f.host.nvidia, f.host.nvidiaDriver = errors.New("no"), false, false }, "gpu static 24GiB"},
		"lost":          {func(f *facts) { f.gpu.sample.Devices[0].Health = gpu.Lost }, "error : GPU 0: it is lost"},
		"size unknown": {func(f *facts) {
			d := &f.gpu.sample.Devices[0]
			d.MemoryKnown, d.Total, d.Reason = false, 0, "[Insufficient Permissions]"
		}, "error : GPU 0: how much memory it has is not known, so its consumers get 503 gpu_lost: [Insufficient Permissions] → let Caddy's user read it, or declare its size: gpu auto { fallback 24GiB }"},
		"a warning of the driver": {func(f *facts) { f.gpu.sample.Devices[0].Reason = "nvidia-smi says: infoROM is corrupted" }, "warning : GPU 0: nvidia-smi says: infoROM is corrupted"},
		"declared until it works": {func(f *facts) { f.gpu.name, f.gpu.why = "fallback", "no driver" }, "degraded: no GPU can be read"},
		"memory unknown":          {func(f *facts) { f.gpu.sample.Devices[0].MemoryKnown = false }, "warning : GPU 0: degraded"},
		"processes unknown":       {func(f *facts) { f.gpu.sample.Devices[0].ProcessesKnown = false }, "warning : GPU 0: who holds how much of its memory can't be told"},
		"[N/A] for a process":     {func(f *facts) { f.gpu.sample.Devices[0].Processes = []gpu.Process{{PID: 1, Used: -1}} }, "can't be told"},
		"processes on WSL2":       {func(f *facts) { f.gpu.sample.Devices[0].ProcessesKnown, f.host.wsl = false, true }, ""},
		"a faulty sampler":        {func(f *facts) { f.site.Sampler = nil }, ""},
	} {
		f := factsOf()
		c.change(f)
		said := texts(judgeGPUs(f))
		if c.want == "" {
			assert.Empty(t, said, name)
			continue
		}
		assert.Contains(t, said, c.want, name)
	}
	f := factsOf()
	f.host.container, f.host.hostPIDs = true, false
	assert.Contains(t, texts(judgeProcesses(f)), "pid: host")
	f.gpu.name = "simulated"
	assert.Empty(t, judgeProcesses(f))
}

func TestDevicesThatMayNotBeOpenedAreTold(t *testing.T) {
	f := factsOf(&config.Consumer{Name: "a"})
	f.host.devices = []deviceFile{{"/dev/nvidiactl", "video", fs.ErrPermission}, {"/dev/nvidia0", "video", nil}}
	assert.Empty(t, judgeDevices(f), "the card is read all the same")
	f.gpu.err = errors.New("no")
	assert.Contains(t, texts(judgeDevices(f)), "error : user caddy may not open /dev/nvidiactl: permission denied → put Caddy's user into the group video")
	f.gpu.err = nil
	f.site.Lifecycles = raws("a", `{"protocol":"process"}`)
	assert.Contains(t, texts(judgeDevices(f)), "warning : servers that Caddy starts as user caddy may not open /dev/nvidiactl")
}

func TestTimeoutsAreHeldAgainstTheBudget(t *testing.T) {
	site := func(server, transport, budget string) []byte {
		return []byte(`{"apps":{"http":{"servers":{"srv0":{"listen":[":443"]` + server + `,"routes":[{"handle":[{"handler":"subroute","routes":[
			{"handle":[{"handler":"gpu_broker","consumer":"a","source":"Caddyfile:9"` + budget + `},{"handler":"reverse_proxy"` + transport + `}]}]}]}]}}}}}`)
	}
	const hasty = `,"transport":{"protocol":"http","response_header_timeout":60000000000}`
	for name, c := range map[string]struct {
		doc    []byte
		traits lifecycle.Traits
		want   string
	}{
		"none":                               {site("", "", ""), lifecycle.Traits{}, ""},
		"a write time-out":                   {site(`,"write_timeout":30000000000`, "", ""), lifecycle.Traits{Load: true}, "error : the server's write time-out of 30s is below the budget of 10m0s"},
		"one above the route's budget":       {site(`,"write_timeout":90000000000`, "", `,"budget":60000000000`), lifecycle.Traits{Load: true}, ""},
		"a server that loads by a route":     {site("", hasty, ""), lifecycle.Traits{Load: true}, "warning : reverse_proxy's response_header_timeout of 1m0s is below the budget of 10m0s"},
		"one that the broker starts":         {site("", hasty, ""), lifecycle.Traits{Starts: true}, "warning : "},
		"one that loads in its request":      {site("", hasty, ""), lifecycle.Traits{}, "error a: reverse_proxy's response_header_timeout of 1m0s is below the load_timeout of 5m0s of a"},
		"a read time-out, which is the same": {site("", `,"transport":{"protocol":"http","read_timeout":"20s"}`, ""), lifecycle.Traits{}, "error a: reverse_proxy's read_timeout of 20s"},
	} {
		f := factsOf(&config.Consumer{Name: "a"})
		f.routes = readRoutes(c.doc)
		f.probes["a"] = probe{traits: c.traits}
		said := texts(judgeTimeouts(f))
		if c.want == "" {
			assert.Empty(t, said, name)
			continue
		}
		assert.Contains(t, said, c.want, name)
	}
	f := factsOf(&config.Consumer{Name: "a", Budget: caddy.Duration(time.Minute)})
	assert.Contains(t, texts(judgeTimeouts(f)), "warning a: its budget of 1m0s is below its load_timeout of 5m0s")
}

func TestRoutesAreJudged(t *testing.T) {
	f := factsOf(&config.Consumer{Name: "a", Upstream: "127.0.0.1:9"})
	assert.Contains(t, texts(judgeRoutes(f)), "no route of the site has a gpu_broker")
	f.site.Config = []byte(`{"apps":{"http":{"servers":{"srv0":{"listen":[":80"],"routes":[
		{"match":[{"path":["/x/*"]}],"terminal":true,"handle":[{"handler":"subroute","routes":[{"handle":[{"handler":"reverse_proxy","upstreams":[{"dial":"127.0.0.1:9"}]}]}]}]},
		{"handle":[{"handler":"gpu_broker","consumer":"a"},{"handler":"reverse_proxy","upstreams":[{"dial":"127.0.0.1:9"}]}]}]}}}}}`)
	f.routes = readRoutes(f.site.Config)
	assert.Empty(t, texts(judgeRoutes(f)))
	said := texts(judgeBypasses(f))
	assert.Contains(t, said, "warning a: a reverse_proxy of this site leads to 127.0.0.1:9 with no gpu_broker before it")
	assert.Equal(t, 1, strings.Count(said, "\n"))
}

func TestTheSitesPortsAreThoseThatCaddyOpens(t *testing.T) {
	r := readRoutes([]byte(`{"storage":{"module":"file_system","root":"/srv/caddy"},"apps":{"http":{"http_port":8080,"servers":{
		"a":{"listen":[":443","127.0.0.1:9000-9001","unix//run/x.sock"],"automatic_https":{"disable_redirects":true}},
		"b":{"listen":["10.0.0.1:443"]}}}}}`))
	assert.Equal(t, []listen{{"", "443"}, {"127.0.0.1", "9000"}, {"127.0.0.1", "9001"}, {"10.0.0.1", "443"}, {"10.0.0.1", "8080"}}, r.listens)
	assert.Equal(t, []string{"/srv/caddy"}, r.storage)
	assert.Equal(t, &routes{}, readRoutes([]byte("no JSON")))
}

func TestPortsThatCannotBeHadAreTold(t *testing.T) {
	f := factsOf(&config.Consumer{Name: "a"}, &config.Consumer{Name: "b"})
	f.routes.listens = []listen{{"", "443"}}
	assert.Contains(t, texts(judgePorts(f)), "error : user caddy may not listen on port 443")
	f.host.mayBindLow = true
	assert.Empty(t, judgePorts(f))
	f.host.root = true
	f.listeners.list = []listener{{address: netip.MustParseAddrPort("127.0.0.1:443")}}
	assert.Contains(t, texts(judgePorts(f)), "the site is to listen on port 443, where a program of another user listens")
	f.routes.listens = []listen{{"10.0.0.1", "443"}}
	assert.Empty(t, judgePorts(f), "another address")

	f.site.Lifecycles = raws("a", `{"protocol":"process","command":["sleep"],"ports":"9300-9301"}`, "b", `{"protocol":"process","command":["sleep"],"ports":"9300-9301"}`)
	assert.Empty(t, judgePorts(f))
	f.listeners.list = []listener{{address: netip.MustParseAddrPort("0.0.0.0:9300")}}
	assert.Contains(t, texts(judgePorts(f)), "error a: of its ports 9300-9301 only 1 are free, and 2 consumers need one")

	f.listeners.list = nil
	f.site.Lifecycles = raws("a", `{"protocol":"process","command":["sleep"],"dir":"/no/such/folder"}`)
	assert.Contains(t, texts(judgePorts(f)), "error a: its folder /no/such/folder can't be used")
}

func TestSocketsThatCannotBeOpenedAreTold(t *testing.T) {
	f := factsOf(&config.Consumer{Name: "a", Upstream: "127.0.0.1:1"})
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "")
	for raw, socket := range map[string]string{
		`{"protocol":"docker"}`: dockerSocket, `{"protocol":"docker","host":"tcp://127.0.0.1:2375"}`: "tcp://127.0.0.1:2375",
		`{"protocol":"systemd"}`: systemBus, `{"protocol":"systemd","user":true}`: "", `{"protocol":"http"}`: "", `{"protocol":"process","user":"www"}`: "",
	} {
		assert.Equal(t, socket, readGuest([]byte(raw)).socket(), raw)
	}
	f.site.Lifecycles = raws("a", `{"protocol":"docker"}`)
	f.probes["a"] = probe{traits: lifecycle.Traits{Starts: true, Unload: true}, report: lifecycle.Report{Outcome: lifecycle.Wrong, Detail: "no Docker"}}
	f.sockets = map[string]error{dockerSocket: &net.OpError{Err: fs.ErrPermission}}
	assert.Contains(t, texts(judgePorts(f)), "error a: user caddy may not speak to Docker")
	assert.Empty(t, texts(judgeServers(f)), "it is said once")
	f.sockets[dockerSocket] = fs.ErrNotExist
	assert.Contains(t, texts(judgePorts(f)), "there is no Docker at "+dockerSocket)
	f.sockets[dockerSocket] = errors.New("refused")
	assert.Contains(t, texts(judgePorts(f)), "does not answer: refused")
	f.sockets[dockerSocket] = nil
	assert.Contains(t, texts(judgeServers(f)), "error a: no Docker")

	f.site.Lifecycles = raws("a", `{"protocol":"systemd"}`)
	f.sockets = map[string]error{systemBus: fs.ErrNotExist}
	assert.Contains(t, texts(judgePorts(f)), "there is no D-Bus, and with it systemd at "+systemBus)
}

func TestEachSocketIsToldOfWhoNeedsIt(t *testing.T) {
	f := factsOf(&config.Consumer{Name: "a"}, &config.Consumer{Name: "b"})
	f.site.Lifecycles = raws("a", `{"protocol":"docker","host":"tcp://127.0.0.1:2"}`, "b", `{"protocol":"docker","host":"tcp://127.0.0.1:1"}`)
	f.sockets = map[string]error{"tcp://127.0.0.1:1": errors.New("refused"), "tcp://127.0.0.1:2": errors.New("refused")}
	for range 20 { // a map has many orders
		found := texts(judgePorts(f))
		first, second := strings.Index(found, "error b: Docker at tcp://127.0.0.1:1 "), strings.Index(found, "error a: Docker at tcp://127.0.0.1:2 ")
		assert.True(t, 0 <= first && first < second, found)
	}
}

func TestServersAreJudgedByTheirProbes(t *testing.T) {
	for name, c := range map[string]struct {
		change func(f *facts, p *probe)
		want   string
	}{
		"it answers":      {func(*facts, *probe) {}, ""},
		"nothing listens": {func(_ *facts, p *probe) { p.report.Outcome = lifecycle.Refused }, "error a: nothing listens at 127.0.0.1:9 → start the server, or correct its upstream; Ollama listens on port 11434"},
		"it runs elsewhere": {func(f *facts, p *probe) {
			p.report.Outcome = lifecycle.Refused
			f.unnamed = []Identity{{Address: "127.0.0.1:11434", Engine: "ollama"}}
		}, "write upstream 127.0.0.1:11434"},
		"no way leads there": {func(_ *facts, p *probe) { p.report.Outcome, p.report.Detail = lifecycle.Unreachable, "no such host" },
			"error a: it can't be reached: no such host → correct its upstream"},
		"its name is wrong": {func(f *facts, p *probe) {
			p.report.Outcome = lifecycle.Unreachable
			f.unnamed = []Identity{{Address: "127.0.0.1:11434", Engine: "ollama"}}
		}, "write upstream 127.0.0.1:11434"},
		"it is slow":      {func(_ *facts, p *probe) { p.report.Outcome = lifecycle.TimedOut }, "warning a: it does not answer in time"},
		"it is wrong":     {func(_ *facts, p *probe) { p.report.Outcome, p.report.Detail = lifecycle.Wrong, "404" }, "error a: it answers, but not as it should: 404"},
		"it does not say": {func(_ *facts, p *probe) { p.report.Detail = "$.x is missing" }, "warning a: it answers, but does not say whether it is loaded: $.x is missing"},
		"busy fails":      {func(_ *facts, p *probe) { p.busyErr = errors.New("404") }, "warning a: it can't be asked whether it works: 404"},
		"another's name":  {func(f *facts, _ *probe) { f.answers["127.0.0.1:9"] = Identity{Engine: "koboldcpp"} }, "error a: its preset is ollama, but the server at 127.0.0.1:9 is KoboldCpp"},
		"a circle":        {func(f *facts, _ *probe) { f.answers["127.0.0.1:9"] = Identity{Caddy: true} }, "error a: its upstream 127.0.0.1:9 is a Caddy"},
		"its configuration": {func(f *facts, p *probe) {
			p.report.Outcome = lifecycle.Refused
			f.site.Faults = []error{errors.New(`consumer "a" (Caddyfile:3): wrong`)}
		}, ""},
	} {
		f := factsOf(&config.Consumer{Name: "a", Preset: "ollama", Upstream: "127.0.0.1:9"})
		p := probe{report: lifecycle.Report{Resident: -1}, traits: lifecycle.Traits{Health: true, Unload: true}}
		c.change(f, &p)
		f.probes["a"] = p
		said := texts(judgeServers(f))
		if c.want == "" {
			assert.Empty(t, said, name)
			continue
		}
		assert.Contains(t, said, c.want, name)
		assert.Equal(t, 1, strings.Count(said, "\n"), name)
	}
}

func TestWhatNothingCanUnloadIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		consumer config.Consumer
		traits   lifecycle.Traits
		want     string
	}{
		"a route":           {config.Consumer{Preset: "llamacpp"}, lifecycle.Traits{Unload: true}, ""},
		"by model":          {config.Consumer{}, lifecycle.Traits{UnloadModel: true}, ""},
		"it is pinned":      {config.Consumer{Preset: "llamacpp", Pin: true}, lifecycle.Traits{}, ""},
		"only a process":    {config.Consumer{Preset: "llamacpp"}, lifecycle.Traits{}, "error a: only the end of its process"},
		"nothing is known":  {config.Consumer{}, lifecycle.Traits{}, "warning a: nothing says how its memory is freed"},
		"it manages itself": {config.Consumer{VRAMManaged: true}, lifecycle.Traits{}, ""},
	} {
		c.consumer.Name = "a"
		f := factsOf(&c.consumer)
		f.probes["a"] = probe{traits: c.traits}
		said := texts(judgeMeans(f))
		if c.want == "" {
			assert.Empty(t, said, name)
			continue
		}
		assert.Contains(t, said, c.want, name)
	}
}

func TestWhoHoldsMemoryAndIsNobodys(t *testing.T) {
	own, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer own.Close()
	f := factsOf(&config.Consumer{Name: "a", Upstream: own.Addr().String(), Processes: []string{"python3"}}, &config.Consumer{Name: "b"})
	f.listeners = readListeners()
	f.probes["b"] = probe{owns: func(pid int) bool { return pid == 1<<30 }}
	f.gpu.sample.Devices[0].Processes = []gpu.Process{
		{PID: os.Getpid(), Name: "listener", Used: gpu.GiB}, // a's server
		{PID: 0, Name: "python3", Used: gpu.GiB},            // named
		{PID: 1 << 30, Name: "child", Used: gpu.GiB},        // b's
		{PID: 1<<30 + 1, Name: "Xorg", Used: 40 * gpu.MiB},  // too little
		{PID: 1<<30 + 2, Name: "game", Used: gpu.GiB},
		{PID: 1<<30 + 3, Used: gpu.GiB},
	}
	said := texts(judgeOutsiders(f))
	assert.Equal(t, 2, strings.Count(said, "\n"), said)
	assert.Contains(t, said, `warning : "game" (PID 1073741826) holds 1GiB of GPU 0`)
	assert.Contains(t, said, "a program of PID 1073741827 holds 1GiB")
}

func TestListenersAreFoundWithTheirOwners(t *testing.T) {
	everywhere, err := net.Listen("tcp", ":0")
	require.NoError(t, err)
	defer everywhere.Close()
	port := fmt.Sprint(everywhere.Addr().(*net.TCPAddr).Port)
	l := readListeners()
	found := l.serving("127.0.0.1", port)
	require.NotEmpty(t, found)
	assert.True(t, found[0].address.Addr().IsUnspecified())
	assert.Equal(t, os.Getpid(), found[0].whose().pid)
	assert.Equal(t, found, l.serving("localhost", port))
	assert.Empty(t, l.serving("192.0.2.7", port), "another machine's")
	assert.NotEmpty(t, l.conflicting("", port))
	assert.NotEmpty(t, l.conflicting("127.0.0.1", port))

	address, ok := parseSocket("0100007F:2C83")
	assert.True(t, ok)
	assert.Equal(t, "127.0.0.1:11395", address.String())
	address, ok = parseSocket("00000000000000000000000001000000:0050")
	assert.True(t, ok)
	assert.Equal(t, "[::1]:80", address.String())
	for _, bad := range []string{"", "0100007F", "zz:1", "01:1", "0100007F:10000"} {
		_, ok := parseSocket(bad)
		assert.False(t, ok, bad)
	}
}

func TestAServerAtAnotherAddressIsNotTheOneThatIsOpen(t *testing.T) {
	l := listeners{list: []listener{{address: netip.MustParseAddrPort("0.0.0.0:9")}, {address: netip.MustParseAddrPort("127.0.0.2:9")}}}
	assert.Equal(t, l.list[1:], l.serving("127.0.0.2", "9"))
	assert.Equal(t, l.list[:1], l.serving("127.0.0.1", "9"))
}

func TestAFolderThatCanBeMadeIsWell(t *testing.T) {
	dir := t.TempDir()
	assert.NoError(t, tryFolder(filepath.Join(dir, "a", "b")).err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	f := tryFolder(filepath.Join(dir, "file"))
	assert.ErrorContains(t, f.err, "it is no folder")
	_, err := os.Stat(filepath.Join(dir, "a"))
	assert.ErrorIs(t, err, fs.ErrNotExist, "it was made")
}

func TestPlacesAreTheLinesOfSettings(t *testing.T) {
	path := filepath.Join(t.TempDir(), "Caddyfile")
	require.NoError(t, os.WriteFile(path, []byte(`{
	gpu_broker {
		consumer a { # {
			model x {
				vram 1GiB
				pin
			}
			vram 2GiB
		}
		consumer b {
			preset x
		}
	}
}
`), 0o600))
	l := lines{}
	assert.Equal(t, path+":8", l.of(path+":3", "vram"))
	assert.Equal(t, path+":6", l.of(path+":3", "pin"), "deeper, where there is none in the block itself")
	assert.Equal(t, path+":3", l.of(path+":3", "preset"), "that is another's")
	assert.Equal(t, path+":5", l.of(path+":4", "vram"))
	assert.Equal(t, "none:3", l.of("none:3", "vram"))
	assert.Empty(t, l.of("", "vram"))
	assert.Equal(t, path+":8", l.matching(path, 6, "x", "vram"))
	assert.Equal(t, "x", l.matching(path, 1, "x", "budget"))
}

func TestPlaceholdersWithoutAValueAreTold(t *testing.T) {
	f := factsOf()
	f.site.File = filepath.Join(t.TempDir(), "Caddyfile")
	t.Setenv("GPU_BROKER_SET", "")
	require.NoError(t, os.WriteFile(f.site.File, []byte(`localhost {
	# {$GPU_BROKER_NOPE} in a comment
	respond {$GPU_BROKER_SET} {$GPU_BROKER_OTHER:with a default} # {$GPU_BROKER_NOPE}
	header A {env.GPU_BROKER_NOPE} # {env.GPU_BROKER_NOPE}
	header B {$GPU_BROKER_NOPE} {env.GPU_BROKER_NOPE}
	header C {env.GPU_BROKER_TOLD}
}
`), 0o600))
	f.site.Faults = []error{errors.New(`consumer "a": upstream {env.GPU_BROKER_TOLD}`)}
	found := judgePlaceholders(f)
	require.Len(t, found, 2)
	assert.Equal(t, f.site.File+":4", found[0].Where)
	assert.Contains(t, found[0].What, "{env.GPU_BROKER_NOPE} has no value")
	assert.Equal(t, f.site.File+":5", found[1].Where)
	assert.Contains(t, found[1].What, "{$GPU_BROKER_NOPE} has no value")
}

func TestTheReportIsForPeople(t *testing.T) {
	r := &Report{Errors: 1, Warnings: 2, Findings: []Finding{
		{Severity: Error, Consumer: "a", Where: "Caddyfile:3", What: "it is wrong", Mend: "write it right"},
		{Severity: Note, What: "all else is well"},
	}}
	var out strings.Builder
	require.NoError(t, r.Write(&out))
	assert.Equal(t, "error   Caddyfile:3: consumer a: it is wrong\n        → write it right\nnote    all else is well\n1 error, 2 warnings\n", out.String())
}

func TestALookThatHangsIsLeft(t *testing.T) {
	held := make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	f := factsOf()
	f.site.Timeout = 10 * time.Millisecond
	g := &gathering{ctx: ctx, done: make(chan job)}
	left := make(chan struct{})
	g.start("the look that hangs", func(context.Context) func(*facts) {
		defer close(left)
		<-held
		return func(f *facts) { f.gpu.name = "too late" }
	})
	g.start("the look that ends", func(context.Context) func(*facts) {
		return func(f *facts) { f.gpu.name = "in time" }
	})
	g.collect(f)
	close(held)
	<-left
	assert.Equal(t, "in time", f.gpu.name)
	assert.Equal(t, "warning : the look that hangs did not end within 10ms → something there hangs; look at it, or give --timeout more\n", texts(judgeUnended(f)))
}
