package caddyfile

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// linesOf compares an error's lines with what each is to hold.
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
		if !strings.Contains(lines[i], want[i]) {
			t.Errorf("fault %q, want %q", lines[i], want[i])
		}
	}
}

func TestCheckFindsAllFaultsOfARouteGivenAsJSON(t *testing.T) {
	r := Route{
		Bypass: []string{"x"}, Touch: []string{"PSOT /x"}, Budget: -1e9, MaxRun: new(caddy.Duration(-1e9)), MaxBody: -1, Headers: "offf",
		ModelFrom: []ModelFrom{{Source: "boby"}, {Source: "header"}, {Source: "path", Name: "/x"}, {Source: "path", Name: "/x?m=*"}, {}},
		Priority:  "soon", PriorityRange: &PriorityRange{Min: 5, Max: 4}, Metadata: []string{""}, KeepAlive: -1e9, Heartbeat: -1e9,
	}
	linesOf(t, r.Check(),
		`model_from: unknown place of a model's name "boby": did you mean body?`, `model_from: header ""`, `model_from: path "/x"`, `model_from: path "/x?m=*"`, `unknown place of a model's name ""`,
		`bypass: route "x": the path must begin`, `touch: route "PSOT /x"`, "budget is -1s: it must not be negative", "max_run is -1s", "keep_alive is -1s", "heartbeat is -1s",
		"max_body is -1 bytes: it must not be negative", `unknown headers setting "offf": did you mean off?`,
		`priority is "soon": it must be a number, or a placeholder`, "priority_range: it goes from 5 to 4", "metadata: the name of a field is empty",
	)
	if err := (&Route{}).Check(); err != nil {
		t.Errorf("an empty route: %v", err)
	}
}

func TestCheckFindsTheEndsOfAPriorityRangeOutsideAllPriorities(t *testing.T) {
	for _, r := range []PriorityRange{{Min: -1, Max: 5}, {Min: 5, Max: config.MaxPriority + 1}} {
		linesOf(t, (&Route{PriorityRange: &r}).Check(), "priority_range: priority is ")
	}
	for _, r := range []PriorityRange{{}, {Min: 7, Max: 7}, {Min: 0, Max: config.MaxPriority}} {
		if err := (&Route{PriorityRange: &r}).Check(); err != nil {
			t.Errorf("%+v: %v", r, err)
		}
	}
	for _, p := range []Priority{"-1", "1000001"} {
		linesOf(t, (&Route{Priority: p}).Check(), "priority is "+string(p)+": it must be from 0 to 1000000")
	}
}

func TestCheckFindsWordsOfARouteThatContradictEachOther(t *testing.T) {
	for _, tc := range []struct{ name, json, want string }{
		{"consumer and model_from", `{"consumer":"a","model_from":[{"source":"query"}]}`, "consumer a and model_from: which of the two?"},
		{"default without model_from", `{"consumer":"a","default":"b"}`, "default b is for requests that name no model"},
		{"fallback to itself", `{"consumer":"a","fallback":["b","a"]}`, "fallback names a, the consumer itself"},
		{"pin_primary and fallback", `{"consumer":"a","fallback":["b"],"pin_primary":true}`, "pin_primary and fallback: which of the two?"},
		{"stream_body and model_from body", `{"stream_body":true,"model_from":[{"source":"query"},{"source":"body"}]}`, "stream_body passes bodies on unread, but model_from body must"},
		{"stream_body and trust_body", `{"consumer":"a","stream_body":true,"trust_body":true}`, "but trust_body must"},
		{"stream_body and metadata", `{"consumer":"a","stream_body":true,"metadata":["x"]}`, "but metadata must"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := new(Route)
			if err := caddy.StrictUnmarshalJSON([]byte(tc.json), r); err != nil {
				t.Fatal(err)
			}
			linesOf(t, r.Check(), tc.want)
		})
	}
	for _, good := range []string{
		`{"stream_body":true,"model_from":[{"source":"query"},{"source":"header","name":"X-Model"},{"source":"path","name":"/m/*"}],"default":"b","fallback":["a"]}`,
		`{"consumer":"a","pin_primary":true,"trust_body":true,"metadata":["x"],"priority":"{http.request.header.X-Priority}"}`,
	} {
		r := new(Route)
		if err := caddy.StrictUnmarshalJSON([]byte(good), r); err != nil || r.Check() != nil {
			t.Errorf("%s: %v, %v", good, err, r.Check())
		}
	}
}

func TestARouteNamesOnlyConsumersThatThereAre(t *testing.T) {
	names := []string{"ollama", "comfyui"}
	linesOf(t, (&Route{}).CheckNames(names), "name the consumer that serves these requests: gpu_broker NAME; there are ollama, comfyui; or say where requests name a model: model_from")
	linesOf(t, (&Route{Consumer: "olama", Fallback: []string{"comfyui", "comfy"}}).CheckNames(names),
		`unknown consumer "olama": did you mean ollama? allowed: comfyui, ollama`, `unknown consumer in fallback "comfy": did you mean comfyui?`)
	linesOf(t, (&Route{ModelFrom: []ModelFrom{{Source: config.FromBody}}, Default: "olama"}).CheckNames(names), `unknown consumer in default "olama": did you mean ollama?`)
	for _, good := range []Route{
		{Consumer: "ollama", Fallback: names[1:]},
		{ModelFrom: []ModelFrom{{Source: config.FromBody}}},
		{ModelFrom: []ModelFrom{{Source: config.FromBody}}, Default: "ollama", Fallback: names},
	} {
		if err := good.CheckNames(names); err != nil {
			t.Errorf("%+v: %v", good, err)
		}
	}
}

func TestARouteLooksIntoBodiesOnlyIfAWordNeedsIt(t *testing.T) {
	for text, want := range map[string]bool{
		`{"consumer":"a"}`:                              false,
		`{"model_from":[{"source":"query"}]}`:           false,
		`{"consumer":"a","keep_alive":"5m"}`:            false,
		`{"model_from":[{"source":"body"}]}`:            true,
		`{"consumer":"a","trust_body":true}`:            true,
		`{"consumer":"a","metadata":["x"]}`:             true,
		`{"consumer":"a","metadata":[],"headers":"on"}`: false,
	} {
		r := new(Route)
		if err := caddy.StrictUnmarshalJSON([]byte(text), r); err != nil || r.ReadsBody() != want {
			t.Errorf("%s: reads %v, %v", text, r.ReadsBody(), err)
		}
	}
}

func TestTheFieldOfAModelsNameHasADefaultWhereOneIsUsual(t *testing.T) {
	for m, want := range map[ModelFrom]string{
		{Source: "body"}:                    "model",
		{Source: "query"}:                   "model",
		{Source: "body", Name: "engine"}:    "engine",
		{Source: "header", Name: "X-Model"}: "X-Model",
		{Source: "header"}:                  "",
	} {
		if got := m.Field(); got != want {
			t.Errorf("%+v: %q, want %q", m, got, want)
		}
	}
}

func TestAPriorityIsANumberOrTextInJSON(t *testing.T) {
	for text, want := range map[string]Priority{`7`: "7", `"7"`: "7", `"{x}"`: "{x}", `0`: "0"} {
		var p Priority
		if err := json.Unmarshal([]byte(text), &p); err != nil || p != want {
			t.Errorf("%s: %q, %v", text, p, err)
		}
	}
	for _, text := range []string{`1.5`, `true`, `[]`, `{}`} {
		if err := json.Unmarshal([]byte(text), new(Priority)); err == nil || !strings.Contains(err.Error(), "priority must be a whole number") {
			t.Errorf("%s: error %v", text, err)
		}
	}
	for p, want := range map[Priority]string{"7": `7`, "{x}": `"{x}"`} {
		if out, err := json.Marshal(p); err != nil || string(out) != want {
			t.Errorf("%q is written as %s, %v", p, out, err)
		}
	}
	if n, ok := Priority("7").Number(); n != 7 || !ok {
		t.Errorf("number %d, %v", n, ok)
	}
	for _, p := range []Priority{"", "{x}"} {
		if _, ok := p.Number(); ok {
			t.Errorf("%q is taken for a number", p)
		}
	}
}

func TestAPriorityIsBroughtIntoItsRange(t *testing.T) {
	r := &PriorityRange{Min: 50, Max: 200}
	for n, want := range map[int]int{-5: 50, 49: 50, 50: 50, 100: 100, 200: 200, 201: 200} {
		if got := r.Clamp(n); got != want {
			t.Errorf("%d: %d, want %d", n, got, want)
		}
	}
	var none *PriorityRange
	for n, want := range map[int]int{-5: 0, 7: 7, config.MaxPriority + 1: config.MaxPriority} {
		if got := none.Clamp(n); got != want {
			t.Errorf("without a range, %d: %d, want %d", n, got, want)
		}
	}
}
