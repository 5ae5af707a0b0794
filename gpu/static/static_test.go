package static

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func unmarshal(text string) (caddyfile.Unmarshaler, error) {
	d := caddyfile.NewTestDispenser(text)
	d.Next()
	d.Next()
	return caddyfile.UnmarshalModule(d, "gpu_broker.samplers.static")
}

func TestDeclaredGPUsAreHealthyAndTheirMemoryIsUnknown(t *testing.T) {
	module, err := unmarshal("gpu static 24GiB 16 GiB")
	if err == nil {
		t.Fatalf("a unit without a number was taken: %+v", module)
	}
	module, err = unmarshal("gpu static 24GiB 16GB")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := json.Marshal(module); err != nil || string(text) != `{"totals":["24GiB","15625000KiB"]}` {
		t.Errorf("JSON %s, %v", text, err)
	}
	s, err := module.(gpu.Guest).Open(context.Background(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	got, err := s.Sample(context.Background(), gpu.Full)
	if err != nil || len(got.Devices) != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	for i, total := range []gpu.Bytes{24 * gpu.GiB, 16e9} {
		d := got.Devices[i]
		if d.Index != i || d.Total != total || d.MemoryKnown || d.ProcessesKnown || d.Health != gpu.Healthy || d.Reason == "" {
			t.Errorf("device %d: %+v", i, d)
		}
	}
	if got.Devices[0].UUID == got.Devices[1].UUID {
		t.Error("two devices have one identity")
	}
}

func TestConfigurationWithoutSizesIsRefused(t *testing.T) {
	for _, s := range []Static{{}, {Totals: []gpu.Bytes{gpu.GiB, 0}}, {Totals: []gpu.Bytes{-1}}} {
		if s.Validate() == nil {
			t.Errorf("%+v was taken", s)
		}
		if _, err := s.Open(context.Background(), zap.NewNop()); err == nil {
			t.Errorf("%+v was opened", s)
		}
	}
	if _, err := unmarshal("gpu static 1GiB {\n dir x\n}"); err == nil {
		t.Error("an option was taken")
	}
}
