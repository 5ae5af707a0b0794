package auto

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

func TestWithoutAWorkingWayEachAttemptIsNamedAndTheRemedyToo(t *testing.T) {
	_, err := openAll(context.Background(), &way{name: "a", openErr: errors.New("no library")}, &way{name: "b", lookErr: errors.New("no driver")})
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{"no library", "no driver", "gpu static 24GiB"} {
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
	for text, good := range map[string]bool{"gpu auto": true, "gpu auto 24GiB": false, "gpu auto {\n path x\n}": false} {
		d := caddyfile.NewTestDispenser(text)
		d.Next()
		d.Next()
		if _, err := caddyfile.UnmarshalModule(d, "gpu_broker.samplers.auto"); (err == nil) != good {
			t.Errorf("%q: %v", text, err)
		}
	}
}
