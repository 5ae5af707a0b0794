package caddyfile

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

func TestParseGlobalAddsToWhatExistsAndLeavesItAlone(t *testing.T) {
	existing, err := ParseGlobal(caddyfile.NewTestDispenser(`gpu_broker {
		max_queue 5
		consumer a {
			vram 1GiB
		}
	}`), nil)
	if err != nil {
		t.Fatal(err)
	}
	before := string(caddyconfig.JSON(existing, nil))
	both, err := ParseGlobal(caddyfile.NewTestDispenser(`gpu_broker {
		budget 1m
		consumer b {
			vram 2GiB
		}
	}`), existing)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(caddyconfig.JSON(existing, nil)); got != before {
		t.Errorf("existing became %s, was %s", got, before)
	}
	want := `{"max_queue":5,"budget":60000000000,"consumers":[` +
		`{"name":"a","vram":"1GiB","source":"Testfile:3"},{"name":"b","vram":"2GiB","source":"Testfile:3"}],` +
		`"sources":{"budget":"Testfile:2","max_queue":"Testfile:2"}}`
	if got := string(caddyconfig.JSON(both, nil)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestParseGlobalReturnsNoConfigWithAFault(t *testing.T) {
	b, err := ParseGlobal(caddyfile.NewTestDispenser("gpu_broker {\n\tmax_queue x\n}"), &config.Broker{MaxQueue: 3})
	if err == nil || b != nil {
		t.Errorf("config %v, error %v", b, err)
	}
}

func TestFaultsInAnImportedFileNameThatFile(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "speech.conf"), []byte("consumer a {\n\tvram 1GiB\n\tvarm 2\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte("{\n\tgpu_broker {\n\t\timport "+folder+"/*.conf\n\t\tmax_queue x\n\t}\n}\n"), nil)
	if err == nil {
		t.Fatal("no error")
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 2 || !strings.Contains(lines[0], "speech.conf:3") || !strings.Contains(lines[1], "Caddyfile:4") {
		t.Errorf("error %v", err)
	}
}

func TestEnvironmentVariablesOfTheTextAreSizes(t *testing.T) {
	t.Setenv("TEST_VRAM", "3GiB")
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte("{\n\tgpu_broker {\n\t\tconsumer a {\n\t\t\tvram {$TEST_VRAM}\n\t\t}\n\t}\n}\n"), nil)
	if err != nil || !strings.Contains(string(out), `"vram":"3GiB"`) {
		t.Errorf("%s, %v", out, err)
	}
}

func TestEveryFieldOfTheConfigHasItsWord(t *testing.T) {
	for _, tc := range []struct {
		of    any
		words map[string]word
	}{
		{config.Broker{}, brokerWords(&config.Broker{})},
		{config.Consumer{}, consumerWords(&config.Consumer{}, &lifecycle{})},
		{Route{}, routeWords(new(Route), newSaid(nil))},
	} {
		typ := reflect.TypeOf(tc.of)
		for i := range typ.NumField() {
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			switch name {
			case "", "name", "source", "sources":
				continue
			case "consumer": // stands after the directive
				continue
			case "default_any": // is the second argument of default
				continue
			case "fallback_as": // stands in the block of fallback
				continue
			case "auto_models":
				name = "models"
			case "consumers", "models", "unload_requests":
				name = strings.TrimSuffix(name, "s")
			}
			if _, ok := tc.words[name]; !ok {
				t.Errorf("%s has the field %s, but no such word", typ.Name(), name)
			}
		}
	}
}

func TestEarlierBlocksAreNotChangedByLaterOnes(t *testing.T) {
	parse := func(text string, existing *config.Broker) *config.Broker {
		b, err := ParseGlobal(caddyfile.NewTestDispenser(text), existing)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	first := parse("gpu_broker {\n\tstay_warm llm 1m\n\trestore a after 1m\n}", nil)
	before := string(caddyconfig.JSON(first, nil))
	second := parse("gpu_broker {\n\tstay_warm vision 2m\n\trestore b after 2m\n}", first)
	third := parse("gpu_broker {\n\tstay_warm audio 3m\n\trestore c after 3m\n}", first)
	if got := string(caddyconfig.JSON(first, nil)); got != before {
		t.Errorf("the first became %s, was %s", got, before)
	}
	if len(second.StayWarm) != 2 || second.Restore[1].Consumer != "b" || third.Restore[1].Consumer != "c" {
		t.Errorf("second %+v, third %+v", second, third)
	}
}

func FuzzParsingEndsInAConfigOrAnError(f *testing.F) {
	files, err := filepath.Glob("testdata/*/*.txt")
	if err != nil || len(files) == 0 {
		f.Fatalf("no seeds (%v)", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		input, _, _ := strings.Cut(string(text), "----------\n")
		f.Add(strings.TrimPrefix(input, "{\n"))
	}
	f.Fuzz(func(t *testing.T, text string) {
		tokens, err := caddyfile.Tokenize([]byte(text), "Testfile")
		if err != nil {
			return
		}
		b, err := ParseGlobal(caddyfile.NewDispenser(tokens), nil)
		if (b == nil) == (err == nil) {
			t.Fatalf("config %v, error %v", b, err)
		}
		if b != nil {
			roundTrip(t, caddyconfig.JSON(b, nil), new(config.Broker))
		}
		r, err := ParseRoute(caddyfile.NewDispenser(tokens))
		if (r == nil) == (err == nil) {
			t.Fatalf("route %v, error %v", r, err)
		}
		if r != nil {
			if err := r.Check(); err != nil {
				t.Fatalf("what was parsed is not valid: %v", err)
			}
			roundTrip(t, caddyconfig.JSON(r, nil), new(Route))
		}
	})
}

func TestN3_WhatAServerIsSentIsReadFromTheCaddyfile(t *testing.T) {
	text := func(model, fallback string) string {
		return "gpu_broker {\nconsumer hosted {\ncloud\n}\nconsumer a {\nfallback " + fallback + "\nmodel m {\n" + model + "\n}\n}\n}"
	}
	b, err := ParseGlobal(caddyfile.NewTestDispenser(text("send_as client\nset t 0.5\nset s \"7b x\"\nset q `\"5\"`\ndefault o `{\"a\":[1]}`\nstrip b c", "hosted {\nas gpt\n}")), nil)
	if err != nil {
		t.Fatal(err)
	}
	out, _ := json.Marshal(b.Consumers[1])
	for _, want := range []string{`"fallback":["hosted"],"fallback_as":{"hosted":"gpt"}`, `"send_as":"client"`,
		`"set":{"q":"5","s":"7b x","t":0.5}`, `"default":{"o":{"a":[1]}}`, `"strip":["b","c"]`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%s lacks %s", out, want)
		}
	}
	for want, tc := range map[string][2]string{
		"fallback: after is not supported yet: leave it out; a fallback is taken where the consumer can't serve without unloading another, at Testfile:7": {"vram 1GiB", "hosted {\nafter 20s\n}"},
		"write fallback CONSUMER { as NAME }, once for each, at Testfile:6":                                                                               {"vram 1GiB", "hosted other {\nas x\n}"},
		"fallback hosted: as is set twice, to x (Testfile:6) and to y: leave one of them out, at Testfile:9":                                              {"vram 1GiB", "hosted {\nas x\n}\nfallback hosted {\nas y\n}"},
		"set t is set twice, to 1 and to 2: leave one of them out, at Testfile:9":                                                                         {"set t 1\nset t 2", "hosted"},
		"write set FIELD VALUE, as in set temperature 0.7, at Testfile:8":                                                                                 {"set t", "hosted"},
		"write send_as NAME, or send_as client, at Testfile:8":                                                                                            {"send_as", "hosted"},
	} {
		_, err := ParseGlobal(caddyfile.NewTestDispenser(text(tc[0], tc[1])), nil)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
