package caddyfile

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func init() {
	caddy.RegisterModule(testCard{})
	caddy.RegisterModule(otherCard{})
	caddy.RegisterModule(silentCard{})
	caddy.RegisterModule(testProtocol{})
	httpcaddyfile.RegisterGlobalOption("gpu_broker", func(d *caddyfile.Dispenser, earlier any) (any, error) {
		var existing *config.Broker
		if app, ok := earlier.(httpcaddyfile.App); ok {
			existing = new(config.Broker)
			if err := caddy.StrictUnmarshalJSON(app.Value, existing); err != nil {
				return nil, err
			}
		}
		b, err := ParseGlobal(d, existing)
		if err != nil {
			return nil, err
		}
		return httpcaddyfile.App{Name: "gpu_broker", Value: caddyconfig.JSON(b, nil)}, nil
	})
}

// testCard is a sampler's configuration: `test_card [SIZE] { total SIZE }`.
type testCard struct {
	Total gpu.Bytes `json:"total,omitempty"`
}

func (testCard) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "gpu_broker.samplers.test_card", New: func() caddy.Module { return new(testCard) }}
}

func (c *testCard) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	args := d.RemainingArgs()
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		args = append(args, d.RemainingArgs()...)
	}
	for _, arg := range args {
		var err error
		if c.Total, err = gpu.ParseBytes(arg); err != nil {
			return d.WrapErr(err)
		}
	}
	return nil
}

// otherCard is another sampler, without settings.
type otherCard struct{}

func (otherCard) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "gpu_broker.samplers.other_card", New: func() caddy.Module { return new(otherCard) }}
}

func (*otherCard) UnmarshalCaddyfile(*caddyfile.Dispenser) error { return nil }

// silentCard is a sampler that a Caddyfile can't configure.
type silentCard struct{}

func (silentCard) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "gpu_broker.samplers.silent_card", New: func() caddy.Module { return new(silentCard) }}
}

// testProtocol is a lifecycle's configuration: `test_protocol fast|slow`.
type testProtocol struct {
	Speed string `json:"speed,omitempty"`
}

func (testProtocol) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "gpu_broker.lifecycles.test_protocol", New: func() caddy.Module { return new(testProtocol) }}
}

func (p *testProtocol) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.AllArgs(&p.Speed) {
		return d.ArgErr()
	}
	return wrap(d, known("speed", []string{"fast", "slow"})(p.Speed))
}

func wrap(d *caddyfile.Dispenser, err error) error {
	if err == nil {
		return nil
	}
	return d.WrapErr(err)
}

func TestGlobalOptionsBecomeTheExpectedJSONOrErrors(t *testing.T) {
	golden(t, "testdata/global", func(t *testing.T, input string) (json.RawMessage, error) {
		adapter := caddyconfig.GetAdapter("caddyfile")
		out, _, err := adapter.Adapt([]byte(input), nil)
		if err != nil {
			return nil, err
		}
		var adapted struct {
			Apps struct {
				Broker json.RawMessage `json:"gpu_broker"`
			} `json:"apps"`
		}
		if err := json.Unmarshal(out, &adapted); err != nil {
			t.Fatal(err)
		}
		roundTrip(t, adapted.Apps.Broker, new(config.Broker))
		return adapted.Apps.Broker, nil
	})
}

func TestDirectivesBecomeTheExpectedJSONOrErrors(t *testing.T) {
	golden(t, "testdata/route", func(t *testing.T, input string) (json.RawMessage, error) {
		r, err := ParseRoute(caddyfile.NewTestDispenser(input))
		if err != nil {
			return nil, err
		}
		if err := r.Check(); err != nil {
			t.Errorf("what was parsed is not valid: %v", err)
		}
		out := caddyconfig.JSON(r, nil)
		roundTrip(t, out, new(Route))
		return out, nil
	})
}

// roundTrip checks that Caddy can read the JSON strictly, and that nothing gets lost.
func roundTrip(t *testing.T, raw json.RawMessage, into any) {
	t.Helper()
	if err := caddy.StrictUnmarshalJSON(raw, into); err != nil {
		t.Fatalf("%s\ncan't be read: %v", raw, err)
	}
	again := caddyconfig.JSON(into, nil)
	if got, want := canonical(t, again), canonical(t, raw); got != want {
		t.Errorf("after a round trip:\n%s\nbefore:\n%s", got, want)
	}
}

// golden runs every file of folder: an input, a line of dashes, then the
// expected JSON, or the expected faults in order, a part of each in a line.
func golden(t *testing.T, folder string, adapt func(*testing.T, string) (json.RawMessage, error)) {
	files, err := filepath.Glob(filepath.Join(folder, "*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no files in %s (%v)", folder, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, ok := strings.Cut(strings.ReplaceAll(string(text), "\r\n", "\n"), "----------\n")
			if !ok {
				t.Fatal("the file has no line of dashes")
			}
			got, err := adapt(t, input)
			if json.Valid([]byte(want)) {
				if err != nil {
					t.Fatal(err)
				}
				if got, want := canonical(t, got), canonical(t, json.RawMessage(want)); got != want {
					t.Errorf("got:\n%s\nwant:\n%s", got, want)
				}
				return
			}
			if err == nil {
				t.Fatalf("no error, but\n%s", got)
			}
			compareFaults(t, err, strings.Split(strings.TrimSpace(want), "\n"))
		})
	}
}

func compareFaults(t *testing.T, err error, want []string) {
	t.Helper()
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("a secret is shown: %v", err)
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d faults, want %d:\n%v", len(lines), len(want), err)
	}
	for i, line := range lines {
		if !strings.Contains(line, want[i]) {
			t.Errorf("fault %d is\n%s\nwant\n%s", i+1, line, want[i])
		}
		if !strings.Contains(line, ", at Caddyfile:") && !strings.Contains(line, ", at Testfile:") {
			t.Errorf("fault %d names no file and line: %s", i+1, line)
		}
	}
}

// canonical is JSON with sorted keys, indented.
func canonical(t *testing.T, raw json.RawMessage) string {
	t.Helper()
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
	out, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
