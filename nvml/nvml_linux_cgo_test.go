//go:build linux && cgo && !nonvml

package nvml

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/turn"
)

// stub is the path of the stub library. A process can use one library only, so
// the tests share it and vary its state.
var stub string

func init() {
	buildStub = func(dir string) error {
		stub = filepath.Join(dir, "libnvidia-ml.so.1")
		output, err := exec.Command("gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wl,-soname,libnvidia-ml.so.1",
			"-o", stub, filepath.Join("testdata", "nvml-stub.c")).CombinedOutput()
		if err != nil {
			return fmt.Errorf("building the stub library needs gcc: %w: %s", err, output)
		}
		return nil
	}
}

const (
	uuid0 = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
	uuid1 = "GPU-bbbbbbbb-0000-0000-0000-000000000001"
	// Total, reserved and used in MiB, percent, degrees, milliwatts, answer.
	good0 = "gpu " + uuid0 + " 24576 300 1000 42 61 250500 0"
	good1 = "gpu " + uuid1 + " 16384 200 0 0 35 20000 0"
)

// hardware is the stub's state, which a test may change at any time.
type hardware struct {
	t    *testing.T
	path string
}

func (h hardware) is(lines ...string) {
	h.t.Helper()
	// Renamed into place: the stub reads it at every call.
	if err := os.WriteFile(h.path+".new", []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		h.t.Fatal(err)
	}
	if err := os.Rename(h.path+".new", h.path); err != nil {
		h.t.Fatal(err)
	}
}

func newHardware(t *testing.T, lines ...string) hardware {
	t.Helper()
	h := hardware{t, filepath.Join(t.TempDir(), "state")}
	h.is(lines...)
	t.Setenv("NVML_STUB_STATE", h.path)
	return h
}

func openStub(t *testing.T) *sampler {
	t.Helper()
	s, err := (&NVML{Library: stub}).Open(context.Background(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s.(*sampler)
}

func look(t *testing.T, s gpu.Sampler) []gpu.Device {
	t.Helper()
	sample, err := s.Sample(context.Background(), gpu.Full)
	if err != nil {
		t.Fatal(err)
	}
	return sample.Devices
}

func TestNVMLTellsWhatTheDriverTells(t *testing.T) {
	newHardware(t, good0, good1)
	s := openStub(t)
	devices := look(t, s)
	if len(devices) != 2 {
		t.Fatalf("%d devices, want 2", len(devices))
	}
	d := devices[0]
	if d.Index != 0 || d.UUID != uuid0 || d.Name != "Stub GPU 0" || d.Health != gpu.Healthy ||
		d.Total != 24576*gpu.MiB || d.Free != 23276*gpu.MiB || !d.MemoryKnown || d.Unified ||
		d.Utilisation != 42 || d.Temperature != 61 || d.Power != 250.5 || !d.ProcessesKnown {
		t.Errorf("first device: %+v", d)
	}
	sample, err := s.Sample(context.Background(), gpu.Memory)
	if err != nil {
		t.Fatal(err)
	}
	if d := sample.Devices[0]; d.ProcessesKnown || d.Utilisation != -1 || d.Free != 23276*gpu.MiB {
		t.Errorf("a look at the memory alone: %+v", d)
	}
}

func TestNVMLSeesMemoryMove(t *testing.T) {
	h := newHardware(t, good0)
	s := openStub(t)
	for _, used := range []int{0, 20000, 512, 24276} {
		h.is(fmt.Sprintf("gpu %s 24576 300 %d 0 30 20000 0", uuid0, used))
		want := gpu.Bytes(24576-300-used) * gpu.MiB
		if d := look(t, s)[0]; d.Free != want || d.Total != 24576*gpu.MiB {
			t.Errorf("%d MiB used: free %v, want %v", used, d.Free, want)
		}
	}
}

func TestLostGPUKeepsItsIdentityAndTheOtherGoesOn(t *testing.T) {
	h := newHardware(t, good0, good1)
	s := openStub(t)
	look(t, s)
	for code, answer := range map[int]string{15: "GPU is lost", 16: "reset"} {
		h.is(fmt.Sprintf("gpu %s 24576 300 1000 42 61 250500 %d", uuid0, code), good1)
		devices := look(t, s)
		if len(devices) != 2 {
			t.Fatalf("answer %d: %d devices, want 2", code, len(devices))
		}
		if d := devices[0]; d.Health != gpu.Lost || d.UUID != uuid0 || d.Name != "Stub GPU 0" || d.Total != 24576*gpu.MiB || d.MemoryKnown || !strings.Contains(d.Reason, answer) {
			t.Errorf("answer %d: lost device %+v", code, d)
		}
		if d := devices[1]; d.Health != gpu.Healthy || d.UUID != uuid1 || d.Free != 16184*gpu.MiB {
			t.Errorf("answer %d: other device %+v", code, d)
		}
	}
	h.is(good0, good1)
	if d := look(t, s)[0]; d.Health != gpu.Healthy || d.UUID != uuid0 || !d.MemoryKnown || d.Reason != "" {
		t.Errorf("after it came back: %+v", d)
	}
}

func TestGPULostBeforeTheFirstLookIsListedAsLost(t *testing.T) {
	newHardware(t, "gpu "+uuid0+" 24576 300 0 0 0 0 15", good1)
	devices := look(t, openStub(t))
	if len(devices) != 2 || devices[0].Health != gpu.Lost || devices[0].UUID == "" || devices[1].UUID != uuid1 || !devices[1].MemoryKnown {
		t.Errorf("%+v", devices)
	}
}

func TestGPUThatIsNoLongerListedIsLost(t *testing.T) {
	h := newHardware(t, good0, good1)
	s := openStub(t)
	look(t, s)
	h.is(good1) // which now has index 0
	devices := look(t, s)
	if len(devices) != 2 {
		t.Fatalf("%+v", devices)
	}
	for _, d := range devices {
		if (d.UUID == uuid0) != (d.Health == gpu.Lost) {
			t.Errorf("%+v", d)
		}
	}
}

func TestAllOf33ProcessesAreSeen(t *testing.T) {
	lines := []string{good0}
	for i := range 33 {
		lines = append(lines, fmt.Sprintf("proc 0 %d %d", 4000000+i, 100+i))
	}
	newHardware(t, lines...)
	d := look(t, openStub(t))[0]
	if !d.ProcessesKnown || len(d.Processes) != 33 {
		t.Fatalf("known %v, %d processes", d.ProcessesKnown, len(d.Processes))
	}
	for i, p := range d.Processes {
		if p.PID != 4000000+i || p.Used != gpu.Bytes(100+i)*gpu.MiB {
			t.Errorf("process %d: %+v", i, p)
		}
	}
}

func TestProcessSizeThatTheDriverDoesNotTellIsNotASize(t *testing.T) {
	newHardware(t, good0, fmt.Sprintf("proc 0 %d -1", os.Getpid()))
	p := look(t, openStub(t))[0].Processes
	if len(p) != 1 || p[0].Used != -1 || p[0].PID != os.Getpid() || p[0].Name == "" {
		t.Errorf("%+v", p)
	}
}

func TestProcessesOfADriverThatGarblesThemAreUnknown(t *testing.T) {
	for version, known := range map[string]bool{"535.54.03": false, "535.104.05": true} {
		newHardware(t, "driver "+version, good0, "proc 0 4000001 100")
		d := func() gpu.Device {
			// A sampler of its own: the version is read when the driver starts.
			s, err := (&NVML{Library: stub}).Open(context.Background(), zap.NewNop())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			return look(t, s)[0]
		}()
		if d.ProcessesKnown != known || (len(d.Processes) == 1) != known || !d.MemoryKnown {
			t.Errorf("driver %s: %+v", version, d)
		}
	}
}

func TestUnsupportedMemoryIsTheSystemsOnlyOnUnifiedGPUs(t *testing.T) {
	newHardware(t, good0, good1, "nomem 0", "name 0 NVIDIA GB10", "nomem 1", "name 1 NVIDIA GeForce RTX 4090", "proc 0 4000001 100")
	s := openStub(t)
	s.meminfo = meminfo(t, 120*gpu.GiB, 77*gpu.GiB)
	devices := look(t, s)
	if d := devices[0]; !d.MemoryKnown || !d.Unified || d.Total != 120*gpu.GiB || d.Free != 77*gpu.GiB || len(d.Processes) != 1 || d.Health != gpu.Healthy {
		t.Errorf("unified: %+v", d)
	}
	if d := devices[1]; d.MemoryKnown || d.Unified || d.Free != 0 || d.Health != gpu.Healthy || !strings.Contains(d.Reason, "does not tell") || d.Index != 1 {
		t.Errorf("discrete: %+v", d)
	}
}

func TestMIGGPUHasACapacityAndNoKnownMemory(t *testing.T) {
	newHardware(t, good0, "mig 0")
	if d := look(t, openStub(t))[0]; d.MemoryKnown || d.Total != 24576*gpu.MiB || d.Health != gpu.Healthy || !strings.Contains(d.Reason, "MIG") {
		t.Errorf("%+v", d)
	}
}

func TestLibraryErrorsAreLostTelemetryAndPass(t *testing.T) {
	h := newHardware(t, "init 18", good0)
	s := openStub(t)
	for range 3 {
		sample, err := s.Sample(context.Background(), gpu.Memory)
		if err == nil || len(sample.Devices) != 0 || !strings.Contains(err.Error(), "error 18") || !strings.Contains(err.Error(), "reboot") {
			t.Fatalf("init 18: %+v, %v", sample, err)
		}
	}
	h.is("init 0", good0)
	look(t, s)
	// The running driver begins to fail on everything, as after an upgrade.
	h.is("gpu "+uuid0+" 24576 300 0 0 0 0 999", "gpu "+uuid1+" 16384 200 0 0 0 0 999")
	if sample, err := s.Sample(context.Background(), gpu.Full); err == nil || len(sample.Devices) != 0 || !strings.Contains(err.Error(), "error 999") {
		t.Errorf("999 everywhere: %+v, %v", sample, err)
	}
	h.is("init 999", good0)
	if _, err := s.Sample(context.Background(), gpu.Full); err == nil {
		t.Error("init 999: no error")
	}
	h.is(good0)
	if d := look(t, s)[0]; d.Health != gpu.Healthy || !d.MemoryKnown {
		t.Errorf("after all is well again: %+v", d)
	}
}

func TestUnknownErrorOfOneGPUIsNeitherALossNorTheEndOfTheOther(t *testing.T) {
	h := newHardware(t, good0, good1)
	s := openStub(t)
	look(t, s)
	h.is("gpu "+uuid0+" 24576 300 0 0 0 0 999", good1)
	devices := look(t, s)
	if d := devices[0]; d.Health != gpu.Healthy || d.MemoryKnown || d.UUID != uuid0 || d.Reason == "" {
		t.Errorf("sick: %+v", d)
	}
	if d := devices[1]; !d.MemoryKnown || d.UUID != uuid1 {
		t.Errorf("other: %+v", d)
	}
}

func TestForbiddenGPUIsLeftOut(t *testing.T) {
	h := newHardware(t, "gpu "+uuid0+" 24576 300 0 0 0 0 4", good1)
	s := openStub(t)
	if devices := look(t, s); len(devices) != 1 || devices[0].UUID != uuid1 || devices[0].Index != 1 {
		t.Errorf("%+v", devices)
	}
	h.is("driver 999.00")
	s2 := openStub(t)
	if _, err := s2.Sample(context.Background(), gpu.Memory); err == nil || !strings.Contains(err.Error(), "no GPU") {
		t.Errorf("without GPUs: %v", err)
	}
}

func TestSeveralSamplersShareTheLibrary(t *testing.T) {
	newHardware(t, good0)
	a := openStub(t)
	b, err := (&NVML{Library: stub}).Open(context.Background(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	look(t, a)
	look(t, b)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	look(t, a) // the driver is let go by the last only
}

func TestAnotherLibraryNeedsARestart(t *testing.T) {
	newHardware(t, good0)
	openStub(t)
	if _, err := (&NVML{Library: "/elsewhere/libnvidia-ml.so.1"}).Open(context.Background(), zap.NewNop()); err == nil || !strings.Contains(err.Error(), "restart") {
		t.Errorf("%v, want an error that asks for a restart", err)
	}
}

func TestUnusableLibrariesAreRefusedBeforeAnythingIsCalled(t *testing.T) {
	if err := examine(filepath.Join(t.TempDir(), "libnvidia-ml.so.1")); err == nil || !strings.Contains(err.Error(), "No such file") {
		t.Errorf("missing library: %v, want the loader's own words", err)
	}
	// A library that is none of NVIDIA's: a call into it would end the process.
	if err := examine("libc.so.6"); err == nil || !strings.Contains(err.Error(), "nvmlInit") {
		t.Errorf("wrong library: %v", err)
	}
	fresh := &process{turn: turn.New()}
	if err := fresh.use(filepath.Join(t.TempDir(), "none.so")); err == nil || fresh.api != nil || fresh.users != 0 {
		t.Errorf("%v, %+v", err, fresh)
	}
}

func TestLookEndsWithItsContextThoughTheDriverHangs(t *testing.T) {
	newHardware(t, good0)
	s := openStub(t)
	if err := library.turn.Take(context.Background()); err != nil { // a look that does not come back
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Sample(ctx, gpu.Memory); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	library.turn.Give()
	look(t, s)
}

func TestNVMLCaddyfile(t *testing.T) {
	module, err := caddyfile.UnmarshalModule(dispenser("gpu nvml {\n library /x/libnvidia-ml.so.1\n}"), "gpu_broker.samplers.nvml")
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := json.Marshal(module); string(got) != `{"library":"/x/libnvidia-ml.so.1"}` {
		t.Errorf("%s", got)
	}
	for _, text := range []string{"gpu nvml 24GiB", "gpu nvml {\n path x\n}", "gpu nvml {\n library\n}", "gpu nvml {\n library a b\n}", "gpu nvml {\n library a\n library b\n}"} {
		if _, err := caddyfile.UnmarshalModule(dispenser(text), "gpu_broker.samplers.nvml"); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}
