package config

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func init() {
	caddy.RegisterModule(testGuest("gpu_broker.samplers.test_card"))
	caddy.RegisterModule(testGuest("gpu_broker.lifecycles.test_protocol"))
}

// testGuest is a module that is only there to be named.
type testGuest string

func (g testGuest) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: caddy.ModuleID(g), New: func() caddy.Module { return g }}
}

// decode reads a configuration as Caddy does.
func decode(t *testing.T, text string) *Broker {
	t.Helper()
	b := new(Broker)
	if err := caddy.StrictUnmarshalJSON([]byte(text), b); err != nil {
		t.Fatal(err)
	}
	return b
}

var testPresets = map[string]string{
	"comfyui": `{
		"async": true, "pin": true, "concurrency": 3, "keep_alive": "1m", "residual": "512MiB",
		"gpu_routes": ["POST /prompt"], "touch": ["/queue"],
		"lifecycle": {
			"protocol": "http",
			"header": {"Accept": ["application/json"]},
			"health": {"path": "/system_stats", "accept": [200]},
			"unload": {"method": "POST", "path": "/free", "body": "{}", "timeout": "5s"},
			"busy": {"path": "/prompt", "busy": "$.exec_info.queue_remaining"}
		}
	}`,
	"bad":    `{"vrma": 1}`,
	"broken": `{"vram": 1`,
}

func presets(name string) (json.RawMessage, []string, error) {
	if raw, ok := testPresets[name]; ok {
		return json.RawMessage(raw), nil, nil
	}
	return nil, []string{"ollama", "comfyui"}, nil
}

func TestResolveFillsInEveryDefault(t *testing.T) {
	b := decode(t, `{"consumers":[{"name":"a","vram":"6GiB"}]}`)
	if err := Resolve(b, nil); err != nil {
		t.Fatal(err)
	}
	const s, m = caddy.Duration(time.Second), caddy.Duration(time.Minute)
	want := Broker{
		GPURaw: json.RawMessage(`{"driver":"auto"}`), Scheduler: "evicting", Lock: "exclusive", Headers: "on",
		IdleUnload: "on", IdleTimeout: new(15 * m), Eviction: "on", StopGrace: new(30 * s),
		MaxQueue: 512, Budget: 10 * m, MaxBody: 256 * gpu.MiB, MaxBuffered: 2 * gpu.GiB, UploadIdle: new(30 * s), StallTimeout: new(30 * s), TunnelIdle: new(5 * m),
		ProbeInterval: 5 * s, ProbeTimeout: 2 * s, LoadTimeout: 5 * m, UnloadTimeout: 30 * s, EvictWait: 10 * s, DrainTimeout: 10 * m,
		AbandonAfter: 10 * s, OutsiderWait: 10 * s, MaxEvictions: 5,
		Overtake: new(15.0), OvertakeMin: new(30 * s), OvertakeMax: new(10 * m), Hold: new(0.25), LockOvertake: new(20 * s),
		VictimPriority: "any",
		Consumers: []*Consumer{{
			Name: "a", VRAM: 6 * gpu.GiB, Enabled: "on", StopsWhenLeft: "on", Concurrency: 1, SwitchCost: 20 * s, Priority: new(100),
			Budget: 10 * m, LoadTimeout: 5 * m, UnloadTimeout: 30 * s, LifecycleRaw: json.RawMessage(`{"protocol":"http"}`),
			IdleTimeout: new(15 * m), sharedIdle: true, MaxRun: new(caddy.Duration(0)),
		}},
	}
	if !reflect.DeepEqual(*b, want) {
		got, _ := json.MarshalIndent(b, "", " ")
		t.Errorf("got %s", got)
	}
	if got := b.CushionFor(false); got != 256*gpu.MiB {
		t.Errorf("cushion %v", got)
	}
	if got := b.CushionFor(true); got != 4*gpu.GiB {
		t.Errorf("cushion on unified memory %v", got)
	}
}

func TestConsumersTakeTheBrokersTimesUnlessTheyHaveTheirOwn(t *testing.T) {
	b := decode(t, `{"budget":"1m","load_timeout":"2m","unload_timeout":"3m","consumers":[
		{"name":"a","vram":1},{"name":"b","vram":1,"budget":"4m","load_timeout":"5m","unload_timeout":"6m"}]}`)
	if err := Resolve(b, nil); err != nil {
		t.Fatal(err)
	}
	for i, want := range [][3]time.Duration{{1, 2, 3}, {4, 5, 6}} {
		c := b.Consumers[i]
		got := [3]time.Duration{time.Duration(c.Budget) / time.Minute, time.Duration(c.LoadTimeout) / time.Minute, time.Duration(c.UnloadTimeout) / time.Minute}
		if got != want {
			t.Errorf("%s: %v minutes, want %v", c.Name, got, want)
		}
	}
}

func TestAConsumersIdleTimeoutAndMaxRunAreTheBrokersUnlessItHasItsOwn(t *testing.T) {
	b := decode(t, `{"idle_timeout":"1m","max_run":"2m","consumers":[
		{"name":"a","vram":1},{"name":"b","vram":1,"idle_timeout":"3m","max_run":"4m"},{"name":"c","vram":1,"idle_timeout":0,"max_run":0}]}`)
	if err := Resolve(b, nil); err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		idle, run time.Duration
		own       bool
	}{{1, 2, false}, {3, 4, true}, {0, 0, true}} {
		c := b.Consumers[i]
		if c.Idle() != want.idle*time.Minute || c.LongestRun() != want.run*time.Minute || c.OwnIdleTimeout() != want.own {
			t.Errorf("%s: idle %s, run %s, own %v", c.Name, c.Idle(), c.LongestRun(), c.OwnIdleTimeout())
		}
	}
}

func TestAccessorsTellZeroFromAbsent(t *testing.T) {
	zero := decode(t, `{"cushion":0,"overtake":0,"hold":0,"overtake_min":0,"overtake_max":0,"lock_overtake":0}`)
	unset := new(Broker)
	type values struct {
		cushion, unified    gpu.Bytes
		overtake, hold      float64
		least, most, locked time.Duration
	}
	of := func(b *Broker) values {
		return values{
			b.CushionFor(false), b.CushionFor(true), b.EffectiveOvertake(), b.EffectiveHold(),
			b.EffectiveOvertakeMin(), b.EffectiveOvertakeMax(), b.EffectiveLockOvertake(),
		}
	}
	if got := of(zero); got != (values{}) {
		t.Errorf("zero: %+v", got)
	}
	want := values{256 * gpu.MiB, 4 * gpu.GiB, 15, 0.25, 30 * time.Second, 10 * time.Minute, 20 * time.Second}
	if got := of(unset); got != want {
		t.Errorf("unset: %+v", got)
	}
	before := of(zero)
	if err := Resolve(zero, nil); err != nil || of(zero) != before {
		t.Errorf("resolving made %+v of zeroes, %v", of(zero), err)
	}
}

func TestADefaultGivesWayToTheOtherEndOfOvertaking(t *testing.T) {
	for _, tc := range []struct {
		text        string
		least, most time.Duration
	}{
		{`{"overtake_max":"10s"}`, 10 * time.Second, 10 * time.Second},
		{`{"overtake_min":"20m"}`, 20 * time.Minute, 20 * time.Minute},
		{`{"overtake_min":"1s","overtake_max":"2s"}`, time.Second, 2 * time.Second},
	} {
		b := decode(t, tc.text)
		if err := Resolve(b, nil); err != nil {
			t.Errorf("%s: %v", tc.text, err)
			continue
		}
		if least, most := time.Duration(*b.OvertakeMin), time.Duration(*b.OvertakeMax); least != tc.least || most != tc.most {
			t.Errorf("%s: %s to %s, want %s to %s", tc.text, least, most, tc.least, tc.most)
		}
	}
}

func TestSwitchesAreOnUnlessOff(t *testing.T) {
	b := decode(t, `{"headers":"off","consumers":[{"name":"a","vram":1,"enabled":"off","lock":"none"},{"name":"b","vram":1}]}`)
	if err := Resolve(b, nil); err != nil {
		t.Fatal(err)
	}
	first, second := b.Consumers[0], b.Consumers[1]
	if b.HeadersOn() || first.IsEnabled() || first.NeedsLock() {
		t.Error("off is taken for on")
	}
	if !new(Broker).HeadersOn() || !second.IsEnabled() || !second.NeedsLock() {
		t.Error("on is taken for off")
	}
}

func TestAPresetIsLaidUnderWhatTheUserWrote(t *testing.T) {
	for _, tc := range []struct{ name, user, want string }{
		{
			"nothing is overridden",
			`{"name":"a","preset":"comfyui","vram":"13GiB"}`,
			`{"name":"a","preset":"comfyui","vram":"13GiB","concurrency":3,"pin":true,"keep_alive":60000000000,"residual":"512MiB","async":true,
			  "gpu_routes":["POST /prompt"],"touch":["/queue"],
			  "lifecycle":{"protocol":"http","header":{"Accept":["application/json"]},
			    "health":{"path":"/system_stats","accept":[200]},
			    "unload":{"method":"POST","path":"/free","body":"{}","timeout":"5s"},
			    "busy":{"path":"/prompt","busy":"$.exec_info.queue_remaining"}}}`,
		},
		{
			"zero values and lists override",
			`{"name":"a","preset":"comfyui","vram":1,"concurrency":1,"pin":false,"async":false,"keep_alive":0,"residual":0,"gpu_routes":["/x","/y"],"touch":[],"lifecycle":{"busy":null}}`,
			`{"name":"a","preset":"comfyui","vram":1,"concurrency":1,"pin":false,"keep_alive":0,"residual":0,"async":false,"gpu_routes":["/x","/y"],"touch":[],
			  "lifecycle":{"protocol":"http","header":{"Accept":["application/json"]},
			    "health":{"path":"/system_stats","accept":[200]},
			    "unload":{"method":"POST","path":"/free","body":"{}","timeout":"5s"},
			    "busy":null}}`,
		},
		{
			"a route of the same path is merged, one of another path replaces it",
			`{"name":"a","preset":"comfyui","vram":1,"lifecycle":{"protocol":"http","header":{"Accept":["*/*"],"X":["y"]},
			    "unload":{"path":"/free","timeout":"60s"},"health":{"path":"/healthz"},"busy":{"timeout":"1s"},"load":{"path":"/load"}}}`,
			`{"name":"a","preset":"comfyui","vram":1,"concurrency":3,"pin":true,"keep_alive":60000000000,"residual":"512MiB","async":true,
			  "gpu_routes":["POST /prompt"],"touch":["/queue"],
			  "lifecycle":{"protocol":"http","header":{"Accept":["*/*"],"X":["y"]},
			    "health":{"path":"/healthz"},
			    "unload":{"method":"POST","path":"/free","body":"{}","timeout":"60s"},
			    "busy":{"path":"/prompt","busy":"$.exec_info.queue_remaining","timeout":"1s"},
			    "load":{"path":"/load"}}}`,
		},
		{
			"another protocol has the preset's routes for its server",
			`{"name":"a","preset":"comfyui","vram":1,"lifecycle":{"protocol":"test_protocol","x":1}}`,
			`{"name":"a","preset":"comfyui","vram":1,"concurrency":3,"pin":true,"keep_alive":60000000000,"residual":"512MiB","async":true,
			  "gpu_routes":["POST /prompt"],"touch":["/queue"],"lifecycle":{"protocol":"test_protocol","x":1,"server":{"protocol":"http","header":{"Accept":["application/json"]},
			  "health":{"path":"/system_stats","accept":[200]},"unload":{"method":"POST","path":"/free","body":"{}","timeout":"5s"},"busy":{"path":"/prompt","busy":"$.exec_info.queue_remaining"}}}}`,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := decode(t, `{"consumers":[`+tc.user+`]}`)
			want := decode(t, `{"consumers":[`+tc.want+`]}`)
			for range 2 { // the second time changes nothing
				if err := Resolve(b, presets); err != nil {
					t.Fatal(err)
				}
				if err := Resolve(want, func(string) (json.RawMessage, []string, error) { return json.RawMessage(`{}`), nil, nil }); err != nil {
					t.Fatal(err)
				}
				if got, want := canonical(t, b.Consumers[0]), canonical(t, want.Consumers[0]); got != want {
					t.Errorf("got  %s\nwant %s", got, want)
				}
			}
		})
	}
}

// canonical is v as JSON with sorted keys.
func canonical(t *testing.T, v any) string {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var value any
	if err := json.Unmarshal(raw, &value); err != nil {
		t.Fatal(err)
	}
	raw, err = json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestPlaceholdersInTheUpstreamAreExpanded(t *testing.T) {
	t.Setenv("TEST_UPSTREAM", "127.0.0.1:8188")
	b := decode(t, `{"consumers":[{"name":"a","vram":1,"upstream":"{env.TEST_UPSTREAM}"}]}`)
	if err := Resolve(b, nil); err != nil || b.Consumers[0].Upstream != "127.0.0.1:8188" {
		t.Errorf("upstream %q, %v", b.Consumers[0].Upstream, err)
	}
}

func TestEachFaultIsTold(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"unknown scheduler", `{"scheduler":"evictng"}`, `gpu_broker: unknown scheduler "evictng": did you mean evicting?`},
		{"unknown lock", `{"lock":"globl"}`, `gpu_broker: unknown lock "globl": did you mean global?`},
		{"unknown headers", `{"headers":"of"}`, `gpu_broker: unknown headers setting "of": did you mean off?`},
		{"unknown driver", `{"gpu":{"driver":"test_crad"}}`, `gpu_broker: unknown gpu driver "test_crad": did you mean test_card? allowed: auto, test_card`},
		{"no driver", `{"gpu":{}}`, "gpu_broker: gpu names no driver"},
		{"gpu of another type", `{"gpu":"auto"}`, "gpu_broker: gpu names no driver"},
		{"vram that no GPU has", `{"consumers":[{"name":"a","vram":"8388607TiB"}]}`, `consumer "a": vram is 8388607TiB: at most 1024TiB are possible`},
		{"negative max_queue", `{"max_queue":-1}`, "gpu_broker: max_queue is -1: it must not be negative"},
		{"negative max_evictions", `{"max_evictions":-1}`, "gpu_broker: max_evictions is -1"},
		{"negative budget", `{"budget":"-1s","consumers":[{"name":"a","vram":1}]}`, "gpu_broker: budget is -1s: it must not be negative"},
		{"negative probe_interval", `{"probe_interval":"-1s"}`, "probe_interval is -1s"},
		{"negative probe_timeout", `{"probe_timeout":"-1s"}`, "probe_timeout is -1s"},
		{"negative load_timeout", `{"load_timeout":"-1s"}`, "load_timeout is -1s"},
		{"negative unload_timeout", `{"unload_timeout":"-1s"}`, "unload_timeout is -1s"},
		{"negative evict_wait", `{"evict_wait":"-1s"}`, "evict_wait is -1s"},
		{"negative drain_timeout", `{"drain_timeout":"-1s"}`, "drain_timeout is -1s"},
		{"negative abandon_after", `{"abandon_after":"-1s"}`, "abandon_after is -1s"},
		{"negative outsider_wait", `{"outsider_wait":"-1s"}`, "outsider_wait is -1s"},
		{"negative lock_overtake", `{"lock_overtake":"-1s"}`, "lock_overtake is -1s"},
		{"negative overtake_min", `{"overtake_min":"-1s"}`, "overtake_min is -1s"},
		{"negative overtake", `{"overtake":-1}`, "gpu_broker: overtake is -1: it must not be negative"},
		{"negative hold", `{"hold":-0.5}`, "gpu_broker: hold is -0.5: it must not be negative"},
		{"overtake_min above overtake_max", `{"overtake_min":"2m","overtake_max":"1m"}`, "gpu_broker: overtake_min is 2m0s, above overtake_max, which is 1m0s"},

		{"null consumer", `{"consumers":[null]}`, "consumer number 1: it is null"},
		{"empty name", `{"consumers":[{"vram":1}]}`, "consumer number 1: it has no name"},
		{"bad name", `{"consumers":[{"name":"a b","vram":1}]}`, `consumer "a b": its name holds ' ': only letters`},
		{"non-ASCII name", `{"consumers":[{"name":"é","vram":1}]}`, `its name holds 'é'`},
		{"long name", `{"consumers":[{"name":"` + strings.Repeat("x", 65) + `","vram":1}]}`, "its name has 65 bytes: at most 64"},
		{"duplicate", `{"consumers":[{"name":"a","vram":1,"source":"F:1"},{"name":"a","vram":1,"source":"F:9"}]}`, `consumer "a" (F:9): this name is taken by consumer "a" (F:1)`},
		{"missing vram", `{"consumers":[{"name":"a"}]}`, `consumer "a": vram is missing`},
		{"missing vram, with its place", `{"consumers":[{"name":"a","source":"Caddyfile:7"}]}`, `consumer "a" (Caddyfile:7): vram is missing`},
		{"unknown preset", `{"consumers":[{"name":"a","vram":1,"preset":"olama"}]}`, `consumer "a": unknown preset "olama": did you mean ollama? allowed: comfyui, ollama`},
		{"preset of an unknown field", `{"consumers":[{"name":"a","vram":1,"preset":"bad"}]}`, `preset bad: consumer "a": unknown field "vrma"`},
		{"preset that is no JSON", `{"consumers":[{"name":"a","vram":1,"preset":"broken"}]}`, `consumer "a": preset broken: `},
		{"stops_when_left", `{"consumers":[{"name":"a","vram":1,"stops_when_left":"maybe"}]}`, `consumer "a": unknown stops_when_left "maybe": allowed: off, on`},
		{"enabled", `{"consumers":[{"name":"a","vram":1,"enabled":"offf"}]}`, `consumer "a": unknown enabled "offf": did you mean off?`},
		{"lock", `{"consumers":[{"name":"a","vram":1,"lock":"non"}]}`, `consumer "a": unknown lock "non": did you mean none?`},
		{"zero concurrency", `{"consumers":[{"name":"a","vram":1,"concurrency":0}]}`, `consumer "a": concurrency is 0: it must be at least 1`},
		{"negative concurrency", `{"consumers":[{"name":"a","vram":1,"concurrency":-1}]}`, `consumer "a": concurrency is -1`},
		{"negative gpu", `{"consumers":[{"name":"a","vram":1,"gpu":-1}]}`, `consumer "a": gpu is -1`},
		{"negative keep_alive", `{"consumers":[{"name":"a","vram":1,"keep_alive":"-1s"}]}`, `consumer "a": keep_alive is -1s`},
		{"negative switch_cost", `{"consumers":[{"name":"a","vram":1,"switch_cost":"-1s"}]}`, `consumer "a": switch_cost is -1s`},
		{"negative budget of its own", `{"consumers":[{"name":"a","vram":1,"budget":"-1s"}]}`, `consumer "a": budget is -1s`},
		{"negative load_timeout of its own", `{"consumers":[{"name":"a","vram":1,"load_timeout":"-1s"}]}`, `consumer "a": load_timeout is -1s`},
		{"negative unload_timeout of its own", `{"consumers":[{"name":"a","vram":1,"unload_timeout":"-1s"}]}`, `consumer "a": unload_timeout is -1s`},
		{"unknown coexistence", `{"consumers":[{"name":"a","vram":1,"can_coexist_with":["wisper"]},{"name":"whisper","vram":1}]}`, `consumer "a": unknown consumer in can_coexist_with "wisper": did you mean whisper? allowed: whisper`},
		{"no port", `{"consumers":[{"name":"a","vram":1,"upstream":"localhost"}]}`, `consumer "a": upstream "localhost" is not of the form host:port`},
		{"no host", `{"consumers":[{"name":"a","vram":1,"upstream":":80"}]}`, `upstream ":80" is not of the form host:port`},
		{"URL", `{"consumers":[{"name":"a","vram":1,"upstream":"http://h:80/x"}]}`, `leave out http:// and any path, as in h:80`},
		{"path", `{"consumers":[{"name":"a","vram":1,"upstream":"h:80/x"}]}`, `the port is "80/x", but must be a number from 1 to 65535`},
		{"port 0", `{"consumers":[{"name":"a","vram":1,"upstream":"h:0"}]}`, `the port is "0"`},
		{"port 65536", `{"consumers":[{"name":"a","vram":1,"upstream":"h:65536"}]}`, `the port is "65536"`},
		{"unset environment variable", `{"consumers":[{"name":"a","vram":1,"upstream":"{env.TEST_UNSET_VARIABLE}"}]}`, `consumer "a": upstream "{env.TEST_UNSET_VARIABLE}"`},
		{"gpu_routes", `{"consumers":[{"name":"a","vram":1,"gpu_routes":["PSOT /x"]}]}`, `consumer "a": gpu_routes: route "PSOT /x": unknown method "PSOT": did you mean POST?`},
		{"bypass", `{"consumers":[{"name":"a","vram":1,"bypass":["x"]}]}`, `consumer "a": bypass: route "x": the path must begin with a slash`},
		{"touch", `{"consumers":[{"name":"a","vram":1,"touch":["/*/x"]}]}`, `consumer "a": touch: route "/*/x": a * is allowed only at the end`},
		{"unknown protocol", `{"consumers":[{"name":"a","vram":1,"lifecycle":{"protocol":"htpt"}}]}`, `consumer "a": unknown lifecycle "htpt": did you mean http? allowed: http, test_protocol`},
		{"protocol of another type", `{"consumers":[{"name":"a","vram":1,"lifecycle":{"protocol":1}}]}`, `consumer "a": lifecycle: protocol must be a string`},
		{"lifecycle of another type", `{"consumers":[{"name":"a","vram":1,"lifecycle":[]}]}`, `consumer "a": lifecycle: it must be a JSON object`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := Resolve(decode(t, tc.text), presets)
			if err == nil {
				t.Fatal("no error")
			}
			if got := err.Error(); !strings.Contains(got, tc.want) || strings.Contains(got, "\n") {
				t.Errorf("error %q\nwant one line with %q", got, tc.want)
			}
		})
	}
}

func TestASecretInAnUpstreamIsNotShown(t *testing.T) {
	for _, upstream := range []string{"http://user:hunter2@host:80", "user:hunter2@host:80"} {
		err := CheckUpstream(upstream)
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: error %v", upstream, err)
		}
	}
}

func TestGoodUpstreamsPass(t *testing.T) {
	for _, upstream := range []string{"127.0.0.1:8188", "localhost:1", "[::1]:65535", "my-host.example:80"} {
		if err := CheckUpstream(upstream); err != nil {
			t.Errorf("%s: %v", upstream, err)
		}
	}
}

func TestNegativeAmountsSetInGoAreRefused(t *testing.T) {
	b := &Broker{
		Cushion: new(gpu.Bytes(-1)), Reserve: -1, MaxBody: -1, MaxBuffered: -1,
		Consumers: []*Consumer{{Name: "a", VRAM: -1, Residual: -1}},
	}
	err := Resolve(b, nil)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{"cushion is -1 ", "reserve is -1 ", "max_body is -1 ", "max_buffered is -1 ", "vram is -1 ", "residual is -1 "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q lacks %q", err, want)
		}
	}
}

func TestVRAMMayBeMissingWhereNothingIsEvicted(t *testing.T) {
	for _, scheduler := range []string{Locked, Passthrough} {
		if err := Resolve(decode(t, `{"scheduler":"`+scheduler+`","consumers":[{"name":"a"}]}`), nil); err != nil {
			t.Errorf("%s: %v", scheduler, err)
		}
	}
}

func TestAllFaultsAreToldAtOnce(t *testing.T) {
	b := decode(t, `{"scheduler":"x","max_queue":-1,"overtake_min":"2m","overtake_max":"1m","gpu":{"driver":"x"},
		"consumers":[{"name":"a","upstream":"x","bypass":["x","y"]},{"name":"a","vram":1,"concurrency":-3,"can_coexist_with":["b"]},{"name":"c","vram":1,"preset":"x"}]}`)
	err := Resolve(b, presets)
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		"gpu driver", "scheduler", "max_queue", "overtake_min",
		"upstream", "bypass: route \"x\"", "bypass: route \"y\"",
		"concurrency", "taken", "preset", "can_coexist_with",
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d faults, want %d:\n%v", len(lines), len(want), err)
	}
	for i, line := range lines {
		if !strings.Contains(line, want[i]) {
			t.Errorf("fault %d is %q, want one about %s", i, line, want[i])
		}
	}
}
