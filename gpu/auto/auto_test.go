package auto

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// way is a guest and its sampler in one, with answers of the test's choice.
type way struct {
	name             string
	openErr, lookErr error
	devices          []gpu.Device
	hangs            bool
	opened, closed   int
}

func (w *way) Open(context.Context, *zap.Logger) (gpu.Sampler, error) {
	if w.openErr != nil {
		return nil, w.openErr
	}
	w.opened++
	return w, nil
}
func (w *way) Name() string               { return w.name }
func (w *way) Why() string                { return "unused" }
func (w *way) MinInterval() time.Duration { return time.Second }
func (w *way) Close() error               { w.closed++; return nil }
func (w *way) Sample(ctx context.Context, _ gpu.Detail) (gpu.Sample, error) {
	if w.hangs {
		<-ctx.Done()
		return gpu.Sample{}, ctx.Err()
	}
	return gpu.Sample{Devices: w.devices}, w.lookErr
}

func openAll(ctx context.Context, ways ...*way) (gpu.Sampler, error) {
	var a Auto
	for _, w := range ways {
		a.attempts = append(a.attempts, attempt{w.name, w})
	}
	return a.Open(ctx, zap.NewNop())
}

var one = []gpu.Device{{UUID: "GPU-a", Health: gpu.Healthy}}

func TestFirstWayThatReallyWorksServes(t *testing.T) {
	absent := &way{name: "absent", openErr: errors.New("no library")}
	mute := &way{name: "mute", lookErr: errors.New("driver\nmismatch")}
	empty := &way{name: "empty"}
	good := &way{name: "good", devices: one}
	never := &way{name: "never", devices: one}
	s, err := openAll(context.Background(), absent, mute, empty, good, never)
	if err != nil {
		t.Fatal(err)
	}
	if s.Name() != "good" || never.opened != 0 {
		t.Errorf("%s serves; the one after it was opened %d times", s.Name(), never.opened)
	}
	for _, part := range []string{"chose good", "no library", "driver; mismatch", "lists no GPU"} {
		if !strings.Contains(s.Why(), part) {
			t.Errorf("%q does not say %q", s.Why(), part)
		}
	}
	if mute.closed != 1 || empty.closed != 1 || good.closed != 0 {
		t.Errorf("closed: mute %d, empty %d, good %d", mute.closed, empty.closed, good.closed)
	}
	if err := s.Close(); err != nil || good.closed != 1 {
		t.Errorf("%v, closed %d", err, good.closed)
	}
}

func TestWithoutAWorkingWayEachAttemptIsNamed(t *testing.T) {
	_, err := openAll(context.Background(), &way{name: "a", openErr: errors.New("no library")}, &way{name: "b", lookErr: errors.New("no driver")})
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{"no library", "no driver"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}

func TestChoiceEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	hangs := &way{name: "hangs", hangs: true}
	next := &way{name: "next", devices: one}
	if _, err := openAll(ctx, hangs, next); !errors.Is(err, context.DeadlineExceeded) || hangs.closed != 1 || next.opened != 0 {
		t.Errorf("%v, closed %d, next opened %d", err, hangs.closed, next.opened)
	}
}

// The machine's own ways, on a machine that has a nvidia-smi alone.
func TestNvidiaSMIServesWhereNVMLDoesNot(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\necho '0, GPU-aaaa, NVIDIA GeForce RTX 4090, 00000000:01:00.0, 24564, 912, 23226, 426, 37, 51, 61.25, [N/A]'\n"
	if err := os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	s, err := new(Auto).Open(context.Background(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	if s.Name() == "nvml" {
		return // this machine has a real GPU: the first way works
	}
	if s.Name() != "nvidia_smi" || !strings.Contains(s.Why(), "gpu nvml") {
		t.Errorf("%s: %s", s.Name(), s.Why())
	}
	if sample, err := s.Sample(context.Background(), gpu.Memory); err != nil || len(sample.Devices) != 1 || sample.Devices[0].UUID != "GPU-aaaa" {
		t.Errorf("%+v, %v", sample, err)
	}
}

// Beside a card of NVIDIA's whose driver does not answer, the small GPU inside
// the processor is not the one that is meant.
func TestAMDServesOnlyWithoutAnNVIDIACard(t *testing.T) {
	for name, c := range map[string]struct {
		vendor, class string
		serves        bool
	}{
		"NVIDIA's display": {"0x10de\n", "0x030000\n", false},
		"NVIDIA's other":   {"0x10de\n", "0x030200\n", false},
		"NVIDIA's sound":   {"0x10de\n", "0x040300\n", true},
		"another's":        {"0x1002\n", "0x030000\n", true},
	} {
		dir := t.TempDir()
		for file, text := range map[string]string{"vendor": c.vendor, "class": c.class} {
			if err := os.MkdirAll(filepath.Join(dir, "0000:01:00.0"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "0000:01:00.0", file), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		w := &way{name: "amdgpu", devices: one}
		a := Auto{attempts: []attempt{{"nvml", &way{openErr: errors.New("driver mismatch")}}, {"amdgpu", alone{w, dir}}}}
		s, err := a.Open(context.Background(), zap.NewNop())
		if (err == nil) != c.serves || (w.opened == 1) != c.serves {
			t.Errorf("%s: %v, opened %d times", name, err, w.opened)
		}
		if c.serves {
			_ = s.Close()
			continue
		}
		for _, part := range []string{"driver mismatch", "0000:01:00.0", "gpu amdgpu"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q does not say %q", name, err, part)
			}
		}
	}
}

func TestCaddyfile(t *testing.T) {
	for text, good := range map[string]bool{
		"gpu auto": true, "gpu auto {\n fallback 24GiB\n}": true, "gpu auto {\n fallback 24GiB 16GiB\n}": true,
		"gpu auto 24GiB": false, "gpu auto {\n path x\n}": false, "gpu auto {\n fallback\n}": false, "gpu auto {\n fallback much\n}": false,
		"gpu auto {\n fallback 24GiB\n fallback 16GiB\n}": false,
	} {
		d := caddyfile.NewTestDispenser(text)
		d.Next()
		d.Next()
		if _, err := caddyfile.UnmarshalModule(d, "gpu_broker.samplers.auto"); (err == nil) != good {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestN5_DeclaredSizesServeUntilTheGPUsCanBeRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &way{name: "w", openErr: errors.New("no driver")}
		a := Auto{attempts: []attempt{{"w", w}}, Fallback: []gpu.Bytes{24 * gpu.GiB, 16 * gpu.GiB}}
		s, err := a.Open(t.Context(), zap.NewNop())
		if err != nil {
			t.Fatal(err)
		}
		look := func() []gpu.Device {
			t.Helper()
			sample, err := s.Sample(t.Context(), gpu.Full)
			if err != nil {
				t.Fatal(err)
			}
			return sample.Devices
		}
		d := look()
		if len(d) != 2 || d[0].Total != 24*gpu.GiB || d[1].Total != 16*gpu.GiB || d[0].UUID == d[1].UUID {
			t.Fatalf("%+v", d)
		}
		for _, g := range d {
			if g.Health != gpu.Healthy || g.MemoryKnown || !strings.Contains(g.Reason, "no driver") {
				t.Errorf("%+v", g)
			}
		}
		if s.Name() != "fallback" || !strings.Contains(s.Why(), "no driver") {
			t.Errorf("%s: %s", s.Name(), s.Why())
		}

		w.openErr, w.devices = nil, one
		if look(); w.opened != 0 {
			t.Error("it is tried again at once")
		}
		time.Sleep(retry) // of the bubble's clock: no time is spent
		if d := look(); len(d) != 1 || d[0].UUID != "GPU-a" || s.Name() != "w" || s.MinInterval() != w.MinInterval() {
			t.Errorf("%s: %+v", s.Name(), d)
		}
		w.lookErr = errors.New("driver gone")
		if _, err := s.Sample(t.Context(), gpu.Full); err == nil {
			t.Error("telemetry that fails later is an error: the GPUs are known")
		}
		if err := s.Close(); err != nil || w.closed != 1 {
			t.Errorf("%v, closed %d", err, w.closed)
		}
	})
}

func TestK6_AnUnknownSizeIsTheDeclaredOne(t *testing.T) {
	w := &way{name: "w", devices: []gpu.Device{
		{UUID: "GPU-a", Health: gpu.Healthy, Reason: "not permitted"},
		{UUID: "GPU-b", Index: 1, Health: gpu.Lost, Reason: "needs a reset"},
		{UUID: "GPU-c", Index: 2, Health: gpu.Healthy, Total: gpu.GiB, MemoryKnown: true},
		{UUID: "GPU-d", Index: 3, Health: gpu.Healthy},
	}}
	a := Auto{attempts: []attempt{{"w", w}}, Fallback: []gpu.Bytes{24 * gpu.GiB, 16 * gpu.GiB, 8 * gpu.GiB}}
	s, err := a.Open(t.Context(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	sample, err := s.Sample(t.Context(), gpu.Full)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []gpu.Bytes{24 * gpu.GiB, 0, gpu.GiB, 0} {
		if d := sample.Devices[i]; d.Total != want || d.MemoryKnown != (i == 2) {
			t.Errorf("%+v", d)
		}
	}
	if r := sample.Devices[0].Reason; !strings.Contains(r, "not permitted") || !strings.Contains(r, "declares") {
		t.Errorf("%q", r)
	}
}

func TestFallbackSizesMustBeAboveZero(t *testing.T) {
	if (&Auto{Fallback: []gpu.Bytes{gpu.GiB, 0}}).Validate() == nil || (&Auto{Fallback: []gpu.Bytes{gpu.GiB}}).Validate() != nil {
		t.Error("sizes are not checked")
	}
}

func TestN2_AFallbackSizeWithoutAUnitIsDoubted(t *testing.T) {
	doubts := (&Auto{Fallback: []gpu.Bytes{24 * gpu.GiB, 24, 8192}}).Doubts()
	if len(doubts) != 2 {
		t.Fatal(doubts)
	}
	if want := "gpu auto: fallback: the memory of GPU 1 is 24 bytes, because a number without a unit counts bytes: did you mean 24GiB?"; doubts[0].Error() != want {
		t.Errorf("%v; want %s", doubts[0], want)
	}
	if !strings.Contains(doubts[1].Error(), "did you mean 8192MiB?") {
		t.Error(doubts[1])
	}
	if doubts := new(Auto).Doubts(); len(doubts) > 0 {
		t.Error(doubts)
	}
}
