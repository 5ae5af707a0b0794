package config

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func TestIdleTimeIsTheConsumersElseItsCategorysElseTheBrokers(t *testing.T) {
	b := decode(t, `{"idle_timeout":"20m","stay_warm":{"vision":"7s","audio":"8s","never":0},"consumers":[
		{"name":"own","vram":1,"category":"llm","idle_timeout":"1s"},
		{"name":"own_zero","vram":1,"category":"llm","idle_timeout":0},
		{"name":"diffusion","vram":1,"category":"diffusion"},
		{"name":"llm","vram":1,"category":"llm"},
		{"name":"vision","vram":1,"category":"vision"},
		{"name":"audio","vram":1,"category":"audio"},
		{"name":"never","vram":1,"category":"never"},
		{"name":"unheard","vram":1,"category":"unheard"},
		{"name":"none","vram":1}]}`)
	for range 2 { // resolving again changes nothing
		if err := Resolve(b, nil); err != nil {
			t.Fatal(err)
		}
		for i, want := range []struct {
			idle time.Duration
			own  bool
		}{
			{time.Second, true},
			{0, true},
			{900 * time.Second, false},
			{300 * time.Second, false},
			{7 * time.Second, false},
			{8 * time.Second, false},
			{0, false},
			{20 * time.Minute, false},
			{20 * time.Minute, false},
		} {
			if c := b.Consumers[i]; c.Idle() != want.idle || c.OwnIdleTimeout() != want.own {
				t.Errorf("%s: idle %s, own %v; want %s, %v", c.Name, c.Idle(), c.OwnIdleTimeout(), want.idle, want.own)
			}
		}
	}
	if got := new(Broker).StayWarmOf("vision"); got != time.Minute {
		t.Errorf("vision's built-in time is %s", got)
	}
	if got := new(Broker).StayWarmOf("unheard"); got != DefaultIdleTimeout {
		t.Errorf("an unheard category's time is %s", got)
	}
}

func TestACategoryOfAPresetGivesWayToTheUsers(t *testing.T) {
	preset := func(string) (json.RawMessage, []string, error) {
		return json.RawMessage(`{"category":"diffusion","priority":200}`), nil, nil
	}
	b := decode(t, `{"consumers":[{"name":"a","vram":1,"preset":"x"},{"name":"b","vram":1,"preset":"x","category":"vision","priority":0}]}`)
	if err := Resolve(b, preset); err != nil {
		t.Fatal(err)
	}
	first, second := b.Consumers[0], b.Consumers[1]
	if first.Idle() != 15*time.Minute || first.EffectivePriority() != 200 {
		t.Errorf("the preset's: idle %s, priority %d", first.Idle(), first.EffectivePriority())
	}
	if second.Idle() != time.Minute || second.EffectivePriority() != 0 {
		t.Errorf("the user's: idle %s, priority %d", second.Idle(), second.EffectivePriority())
	}
}

func TestAnUnresolvedConsumerHasTheDefaultPriority(t *testing.T) {
	if got := new(Consumer).EffectivePriority(); got != 100 {
		t.Errorf("priority %d", got)
	}
}

func TestACloudConsumerNeedsNothingAndMayHaveAnUpstream(t *testing.T) {
	b := decode(t, `{"reserved_interactive":{"places":1,"below":50},"consumers":[
		{"name":"bare","cloud":true},
		{"name":"full","cloud":true,"upstream":"api.example.com:443","alias":["gpt-4o"],"category":"llm","priority":5,"concurrency":8,"max_run":"1m","bypass":["/v1/models"],
		 "pin":false,"lifecycle":{"protocol":"http"}},
		{"name":"local","vram":1,"fallback":["full","bare"]}]}`)
	for range 2 {
		if err := Resolve(b, nil); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCreditTellsZeroFromAbsent(t *testing.T) {
	for text, want := range map[string]*caddy.Duration{`{}`: nil, `{"credit":0}`: new(caddy.Duration(0)), `{"credit":"1m"}`: new(caddy.Duration(time.Minute))} {
		b := decode(t, text)
		if err := Resolve(b, nil); err != nil {
			t.Fatal(err)
		}
		if (b.Credit == nil) != (want == nil) || want != nil && *b.Credit != *want {
			t.Errorf("%s: credit %v", text, b.Credit)
		}
	}
}

func TestVictimsAreOfAnyPriorityUnlessOnlyLowerOnesAreAllowed(t *testing.T) {
	for text, want := range map[string]bool{`{}`: false, `{"victim_priority":"any"}`: false, `{"victim_priority":"lower"}`: true} {
		b := decode(t, text)
		if err := Resolve(b, nil); err != nil || b.OnlyLowerVictims() != want {
			t.Errorf("%s: only lower %v, %v", text, b.OnlyLowerVictims(), err)
		}
	}
}

func TestPlaceholdersInTheRequestLogAreExpanded(t *testing.T) {
	t.Setenv("TEST_FOLDER", "logs")
	b := decode(t, `{"request_log":"{env.TEST_FOLDER}/requests.csv"}`)
	if err := Resolve(b, nil); err != nil || b.RequestLog != "logs/requests.csv" {
		t.Errorf("request_log %q, %v", b.RequestLog, err)
	}
}

func TestAliasesThatNameOneConsumerPass(t *testing.T) {
	b := decode(t, `{"consumers":[
		{"name":"qwen","vram":1,"alias":["qwen2.5:7b","hf.co/Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M","qwen","qwen2.5:7b"]},
		{"name":"other","vram":1,"alias":["Qwen","QWEN2.5:7b","模型"]}]}`)
	if err := Resolve(b, nil); err != nil {
		t.Error(err)
	}
}

func TestEachFaultOfTheQueuesWordsIsTold(t *testing.T) {
	one := func(fields string) string { return `{"consumers":[{"name":"a","vram":1,` + fields + `}]}` }
	two := func(first, second string) string {
		return `{"consumers":[{"name":"ollama","vram":1` + first + `},{"name":"comfyui","vram":1` + second + `}]}`
	}
	cloud := func(fields string) string {
		return `{"consumers":[{"name":"a","cloud":true,` + fields + `},{"name":"b","vram":1}]}`
	}
	for _, tc := range []struct{ name, text, want string }{
		{"negative credit", `{"credit":"-1s"}`, "gpu_broker: credit is -1s: it must not be negative"},
		{"negative client_cooldown", `{"client_cooldown":"-1s"}`, "gpu_broker: client_cooldown is -1s"},
		{"victim_priority", `{"victim_priority":"lowr"}`, `gpu_broker: unknown victim_priority "lowr": did you mean lower? allowed: any, lower`},
		{"negative stay_warm", `{"stay_warm":{"llm":"-1s"}}`, "gpu_broker: stay_warm llm is -1s: it must not be negative"},
		{"stay_warm of no word", `{"stay_warm":{"a b":"1s"}}`, `gpu_broker: stay_warm: category "a b": write diffusion, llm, vision, or a word of your own`},
		{"no places", `{"reserved_interactive":{"places":0,"below":100}}`, "gpu_broker: reserved_interactive has 0 places: it must be from 1 to less than max_queue, which is 512"},
		{"all places", `{"max_queue":16,"reserved_interactive":{"places":16,"below":100}}`, "reserved_interactive has 16 places: it must be from 1 to less than max_queue, which is 16"},
		{"places for nobody", `{"reserved_interactive":{"places":16,"below":0}}`, "reserved_interactive is for priorities below 0: it must be from 1 to 1000000"},
		{"places below what can't be", `{"reserved_interactive":{"places":16,"below":1000001}}`, "reserved_interactive is for priorities below 1000001"},
		{"request_log", `{"request_log":"{env.TEST_UNSET_FOLDER}/x"}`, `gpu_broker: request_log "{env.TEST_UNSET_FOLDER}/x": `},

		{"priority below the range", one(`"priority":-1`), `consumer "a": priority is -1: it must be from 0 to 1000000; lower is more urgent`},
		{"priority above the range", one(`"priority":1000001`), `consumer "a": priority is 1000001: it must be from 0 to 1000000`},
		{"category", one(`"category":"a b"`), `consumer "a": category "a b": write diffusion, llm, vision, or a word of your own`},
		{"negative reserved places of concurrency", one(`"reserved_interactive":-1`), `consumer "a": reserved_interactive is -1: it must not be negative`},
		{"reserved places of concurrency without the broker's", one(`"concurrency":2,"reserved_interactive":1`), `consumer "a": reserved_interactive needs the broker's, which says what is urgent, as in reserved_interactive 16 below 100`},
		{
			"all of the concurrency reserved", `{"reserved_interactive":{"places":1,"below":50},"consumers":[{"name":"a","vram":1,"concurrency":2,"reserved_interactive":2}]}`,
			`consumer "a": reserved_interactive is 2: it must be less than concurrency, which is 2, or no other request would ever run`,
		},

		{"empty alias", one(`"alias":[""]`), `consumer "a": alias "" is empty`},
		{"alias with a tab", one(`"alias":["a\tb"]`), `consumer "a": alias "a\tb" holds '\t': only spaces and characters that can be seen`},
		{"alias with a wide space", one(`"alias":["a\u00a0b"]`), `holds '\u00a0': only spaces`},
		{"alias that ends with a space", one(`"alias":["a "]`), `consumer "a": alias "a " begins or ends with a space`},
		{"alias with a control character", one(`"alias":["a\u0000"]`), `alias "a\x00" holds '\x00'`},
		{"long alias", one(`"alias":["` + strings.Repeat("x", 257) + `"]`), "an alias has 257 bytes: at most 256 are allowed"},
		{"alias of two", two(`,"source":"F:1","alias":["m"]`, `,"alias":["m"]`), `consumer "comfyui": alias "m" is an alias of consumer "ollama" (F:1), too`},
		{"alias that is another's name", two(`,"alias":["comfyui"]`, `,"source":"F:9"`), `consumer "ollama": alias "comfyui" is the name of consumer "comfyui" (F:9)`},

		{"conflict with nobody", two(`,"conflicts_with":["comfy"]`, ""), `consumer "ollama": unknown consumer in conflicts_with "comfy": did you mean comfyui? allowed: comfyui`},
		{"conflict with itself", two(`,"conflicts_with":["ollama"]`, ""), `consumer "ollama": conflicts_with names the consumer itself`},
		{"conflict with whom it coexists", two(`,"conflicts_with":["comfyui"],"can_coexist_with":["comfyui"]`, ""), `consumer "ollama": conflicts_with names comfyui, though can_coexist_with keeps the two together`},
		{"conflict with who coexists with it", two(`,"conflicts_with":["comfyui"]`, `,"can_coexist_with":["ollama"]`), `consumer "ollama": conflicts_with names comfyui, though can_coexist_with keeps`},
		{"conflict with a cloud", two(`,"conflicts_with":["gpt"]`, `},{"name":"gpt","cloud":true`), `consumer "ollama": conflicts_with names gpt, which is a cloud consumer`},
		{"fallback to nobody", two(`,"fallback":["comfyu"]`, ""), `consumer "ollama": unknown consumer in fallback "comfyu": did you mean comfyui? allowed: comfyui`},
		{"fallback to itself", two(`,"fallback":["comfyui","ollama"]`, ""), `consumer "ollama": fallback names the consumer itself`},

		{"cloud with vram", cloud(`"vram":1`), `consumer "a": vram has no meaning for a cloud consumer`},
		{"cloud with gpu", cloud(`"gpu":1`), `consumer "a": gpu has no meaning`},
		{"cloud with lock", cloud(`"lock":"none"`), `consumer "a": lock has no meaning`},
		{"cloud with can_coexist_with", cloud(`"can_coexist_with":["b"]`), `can_coexist_with has no meaning`},
		{"cloud with conflicts_with", cloud(`"conflicts_with":["b"]`), `conflicts_with has no meaning`},
		{"cloud with reserved_interactive", cloud(`"concurrency":2,"reserved_interactive":1`), `reserved_interactive has no meaning`},
		{"cloud with pin", cloud(`"pin":true`), `pin has no meaning`},
		{"cloud with no_evict", cloud(`"no_evict":true`), `no_evict has no meaning`},
		{"cloud with vram_managed", cloud(`"vram_managed":true`), `vram_managed has no meaning`},
		{"cloud with keep_alive", cloud(`"keep_alive":"1m"`), `keep_alive has no meaning`},
		{"cloud with residual", cloud(`"residual":1`), `residual has no meaning`},
		{"cloud with async", cloud(`"async":true`), `async has no meaning`},
		{"cloud with processes", cloud(`"processes":["x"]`), `processes has no meaning`},
		{"cloud with a lifecycle", cloud(`"lifecycle":{"health":{"path":"/"}}`), `lifecycle has no meaning for a cloud consumer, which holds no memory here: leave it out`},
		{"cloud with another lifecycle", cloud(`"lifecycle":{"protocol":"test_protocol"}`), `lifecycle has no meaning`},
		{"cloud with a bad upstream", cloud(`"upstream":"https://api.example.com"`), `consumer "a": upstream "https://api.example.com" is not of the form host:port`},

		{"restore of nobody", `{"restore":[{"consumer":"b","after":"1m"}],"consumers":[{"name":"a1","vram":1}]}`, `gpu_broker: unknown consumer in restore "b"`},
		{"restore where there is none", `{"restore":[{"consumer":"b","after":"1m"}]}`, `unknown consumer in restore "b": there is none`},
		{"restore of a cloud", `{"restore":[{"consumer":"a","after":"1m"}],"consumers":[{"name":"a","cloud":true}]}`, `gpu_broker: restore names a, which is a cloud consumer`},
		{"restore of a disabled one", `{"restore":[{"consumer":"a","after":"1m"}],"consumers":[{"name":"a","vram":1,"enabled":"off"}]}`, `gpu_broker: restore names a, which has enabled off`},
		{"restore at once", `{"restore":[{"consumer":"a","after":0}],"consumers":[{"name":"a","vram":1}]}`, `gpu_broker: restore of "a": after is 0s: it must be above 0, as in restore a after 2m`},
		{"restore twice", `{"restore":[{"consumer":"a","after":"1m"},{"consumer":"a","after":"2m"}],"consumers":[{"name":"a","vram":1}]}`, `gpu_broker: restore names a twice`},
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

func TestAFaultOfACloudConsumerNamesThePresetThatMayHaveBroughtIt(t *testing.T) {
	err := Resolve(decode(t, `{"consumers":[{"name":"a","cloud":true,"preset":"comfyui"}]}`), presets)
	if err == nil {
		t.Fatal("no error")
	}
	lines := strings.Split(err.Error(), "\n")
	want := []string{"pin", "keep_alive", "residual", "async", "lifecycle"}
	if len(lines) != len(want) {
		t.Fatalf("%d faults, want %d:\n%v", len(lines), len(want), err)
	}
	for i, line := range lines {
		if !strings.HasPrefix(line, `consumer "a": `+want[i]+" has no meaning") || !strings.HasSuffix(line, "leave it, or the preset that brings it, out") {
			t.Errorf("fault %q, want one about %s and the preset", line, want[i])
		}
	}
}

func TestAllFaultsAmongConsumersAreToldAtOnce(t *testing.T) {
	err := Resolve(decode(t, `{
		"victim_priority":"x","credit":"-1s","restore":[{"consumer":"nobody","after":"-1s"}],
		"consumers":[
			{"name":"a","vram":1,"alias":["b"," "],"priority":-1,"conflicts_with":["a","x"],"fallback":["a","y"],"reserved_interactive":1},
			{"name":"b","vram":1}]}`), nil)
	if err == nil {
		t.Fatal("no error")
	}
	want := []string{
		"victim_priority", "credit", "priority is -1", "less than concurrency", "needs the broker's",
		`alias "b"`, `alias " "`, "conflicts_with names the consumer itself", `in conflicts_with "x"`,
		"fallback names the consumer itself", `in fallback "y"`, `in restore "nobody"`, `restore of "nobody"`,
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

func TestFaultsOfTheBrokersSettingsNameTheirPlaces(t *testing.T) {
	b := decode(t, `{
		"max_queue": 10, "reserved_interactive": {"places": 20, "below": 100}, "overtake_min": "5m", "overtake_max": "1m",
		"request_log": "{env.TEST_UNSET_FOLDER}/x", "stay_warm": {"llm": "-1s"}, "budget": "-1s", "gpu": {"driver": "test_crad"},
		"restore": [{"consumer": "a", "after": "1m", "source": "f:11"}, {"consumer": "a", "after": "2m", "source": "f:12"}, {"consumer": "zz", "after": "2m"}],
		"sources": {"max_queue": "f:1", "reserved_interactive": "f:2", "overtake_min": "f:3", "overtake_max": "f:4", "request_log": "f:5", "stay_warm": "f:6", "gpu": "f:7"},
		"consumers": [{"name": "a", "vram": 1}]
	}`)
	linesOf(t, Resolve(b, nil),
		"gpu_broker (f:7): unknown gpu driver", "gpu_broker: budget is -1s", "gpu_broker (f:6): stay_warm llm is -1s",
		"gpu_broker (f:2): reserved_interactive has 20 places", "gpu_broker (f:5): request_log", "gpu_broker (f:3): overtake_min is 5m0s",
		"gpu_broker (f:12): restore names a twice", `gpu_broker: unknown consumer in restore "zz"`)
	delete(b.Sources, "overtake_min")
	if title := b.title("overtake_min", "overtake_max"); title != "gpu_broker (f:4)" {
		t.Errorf("without the first place the title is %s", title)
	}
}

func TestEachFaultOfAPresetNamesItsConsumer(t *testing.T) {
	two := func(string) (json.RawMessage, []string, error) {
		return nil, nil, errors.Join(errors.New("one"), errors.New("two"))
	}
	linesOf(t, Resolve(decode(t, `{"consumers":[{"name":"a","vram":1,"preset":"x.json","source":"f:3"}]}`), two),
		`consumer "a" (f:3): preset x.json: one`, `consumer "a" (f:3): preset x.json: two`)
}

func TestWhatIsFaultyIsLeftEmptyAndTheRestIsNot(t *testing.T) {
	b := decode(t, `{"gpu":{"driver":"test_crad"},"consumers":[null,
		{"name":"preset","vram":1,"preset":"comfui"}, {"name":"unknown","vram":1,"lifecycle":{"protocol":"htpt"}}, {"name":"malformed","vram":1,"lifecycle":{"protocol":7}},
		{"name":"other","upstream":"x"}, {"name":"none","vram":1}]}`)
	if Resolve(b, presets) == nil {
		t.Fatal("no error")
	}
	if len(b.GPURaw) > 0 {
		t.Errorf("the driver is %s", b.GPURaw)
	}
	for _, c := range b.Consumers[1:4] {
		if len(c.LifecycleRaw) > 0 {
			t.Errorf("the lifecycle of %s is %s", c.Name, c.LifecycleRaw)
		}
	}
	for _, c := range b.Consumers[4:] {
		if string(c.LifecycleRaw) != `{"protocol":"http"}` {
			t.Errorf("the lifecycle of %s is %s", c.Name, c.LifecycleRaw)
		}
	}
}

// linesOf compares an error's lines with how each is to begin.
func linesOf(t *testing.T, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d faults, want %d: %v", len(lines), len(want), err)
	}
	for i := range want {
		if !strings.HasPrefix(lines[i], want[i]) {
			t.Errorf("fault %q, want %q", lines[i], want[i])
		}
	}
}
