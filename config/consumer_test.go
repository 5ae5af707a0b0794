package config

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestAConsumerKeepsZeroValuesThatWereGiven(t *testing.T) {
	const text = `{"name":"a","vram":"6GiB","can_coexist_with":[],"keep_alive":0,"lock":"","pin":false}`
	var c Consumer
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(&c)
	if err != nil {
		t.Fatal(err)
	}
	if string(out) != text {
		t.Errorf("got  %s\nwant %s", out, text)
	}
	byValue, err := json.Marshal([]Consumer{c})
	if err != nil || string(byValue) != "["+text+"]" {
		t.Errorf("by value: %s, %v", byValue, err)
	}
}

func TestAConsumerThatWasChangedSinceIsWrittenOnce(t *testing.T) {
	c := Consumer{Name: "a"}
	c.Explicit("pin")
	c.Explicit("lifecycle")
	c.Explicit("name")
	c.Explicit("no such field")
	c.Pin = true
	out, err := json.Marshal(c)
	if err != nil || string(out) != `{"name":"a","pin":true}` {
		t.Errorf("got %s, %v", out, err)
	}
	var back Consumer
	if err := json.Unmarshal(out, &back); err != nil || !back.Pin {
		t.Errorf("%s reads as %+v, %v", out, back, err)
	}
}

func TestUnknownFieldsOfAConsumerAreAllTold(t *testing.T) {
	var b Broker
	err := caddy.StrictUnmarshalJSON([]byte(`{"consumers":[{"name":"a","varm":1,"up_stream":"x"}]}`), &b)
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		`consumer "a": unknown field "varm": did you mean vram?`,
		`consumer "a": unknown field "up_stream": did you mean upstream?`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q lacks %q", err, want)
		}
	}
}

func TestAConsumerOfTheWrongTypeIsRefusedByName(t *testing.T) {
	for text, want := range map[string]string{
		`{"name":"a","vram":"lots"}`: `consumer "a": `,
		`{"name":"a","pin":"yes"}`:   `consumer "a": `,
		`"a"`:                        "must be a JSON object",
		`[]`:                         "must be a JSON object",
	} {
		err := json.Unmarshal([]byte(text), new(Consumer))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", text, err, want)
		}
	}
}

func TestAllFieldsOfAConsumerSurviveARoundTrip(t *testing.T) {
	c := Consumer{
		Name: "a", Preset: "p", Enabled: Off, Upstream: "h:1", VRAM: gpu.GiB, GPU: 1, Concurrency: 2, Lock: LockNone,
		CanCoexistWith: []string{"b"}, Pin: true, NoEvict: true, VRAMManaged: true, KeepAlive: 1, SwitchCost: 2,
		IdleTimeout: new(caddy.Duration(7)), MaxRun: new(caddy.Duration(8)),
		Residual: 3, Async: true, Processes: []string{"x"}, GPURoutes: []string{"/a"}, FreeRoutes: []string{"/g"}, NamedRoutes: []string{"/h"}, UnlistedRequests: "gpu", PathMatch: []string{"suffix"}, Bypass: []string{"/b"}, Touch: []string{"/c"},
		Alias: []string{"d"}, ReservedInteractive: 9, Priority: new(10), ConflictsWith: []string{"e"}, Fallback: []string{"f"}, SendAs: "i", FallbackAs: map[string]string{"f": "j"}, PinPrimary: true, FoldKeys: true, Unlisted: true, Cloud: true, Category: "llm",
		Models: []*Model{{Name: "m"}}, AutoModels: true, ModelFrom: []ModelFrom{{Source: "body"}}, Shares: "g", AsyncRoutes: []string{"/d"}, StartOn: []string{"/e"}, StopsWhenLeft: Off, Blocked: []string{"/f"}, UnloadRequests: []UnloadRequest{{Route: "/g", Zero: "z"}}, PinnedSet: map[string]json.RawMessage{"k": json.RawMessage("-1")},
		Budget: 4, LoadTimeout: 5, UnloadTimeout: 6, LifecycleRaw: json.RawMessage(`{"protocol":"http"}`), Source: "f:1",
	}
	v := reflect.ValueOf(c)
	for i := range v.NumField() {
		if v.Type().Field(i).IsExported() && v.Field(i).IsZero() {
			t.Errorf("this test forgets %s", v.Type().Field(i).Name)
		}
	}
	out, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var back Consumer
	if err := json.Unmarshal(out, &back); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back, c) {
		t.Errorf("got  %+v\nwant %+v", back, c)
	}
}
