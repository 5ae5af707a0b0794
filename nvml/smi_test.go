package nvml

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// fake is a nvidia-smi that is a shell script. It writes its arguments to
// calls; gpus and apps are shell code for the two questions.
type fake struct {
	t         *testing.T
	dir, path string
}

func newFake(t *testing.T, gpus, apps string) fake {
	t.Helper()
	f := fake{t, t.TempDir(), ""}
	f.path = filepath.Join(f.dir, "nvidia-smi")
	f.does(gpus, apps)
	return f
}

func (f fake) does(gpus, apps string) {
	f.t.Helper()
	script := "#!/bin/sh\necho \"$LC_ALL $*\" >>'" + f.dir + "/calls'\ncase \"$1\" in\n" +
		"--query-gpu=*)\n" + gpus + "\n;;\n--query-compute-apps=*)\n" + apps + "\n;;\nesac\n"
	if err := os.WriteFile(f.path, []byte(script), 0o700); err != nil {
		f.t.Fatal(err)
	}
}

func (f fake) calls() []string {
	text, _ := os.ReadFile(filepath.Join(f.dir, "calls"))
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

func (f fake) open(config NvidiaSMI) *smi {
	f.t.Helper()
	config.Path = f.path
	s, err := config.Open(context.Background(), zap.NewNop())
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		if err := s.Close(); err != nil {
			f.t.Error(err)
		}
	})
	return s.(*smi)
}

func prints(lines ...string) string {
	return "cat <<'END'\n" + strings.Join(lines, "\n") + "\nEND"
}

func lookSMI(t *testing.T, s gpu.Sampler) []gpu.Device {
	t.Helper()
	sample, err := s.Sample(context.Background(), gpu.Full)
	if err != nil {
		t.Fatal(err)
	}
	return sample.Devices
}

func TestNvidiaSMITellsGPUsAndProcesses(t *testing.T) {
	f := newFake(t, prints(row4090), prints("GPU-aaaa, 77, python3 a, b, 1024", "GPU-other, 78, x, 1"))
	s := f.open(NvidiaSMI{})
	d := lookSMI(t, s)
	if len(d) != 1 || d[0].Free != 23226*gpu.MiB || !d[0].ProcessesKnown || len(d[0].Processes) != 1 || d[0].Processes[0] != (gpu.Process{PID: 77, Name: "python3 a, b", Used: gpu.GiB}) {
		t.Errorf("%+v", d)
	}
	if _, err := s.Sample(context.Background(), gpu.Memory); err != nil {
		t.Fatal(err)
	}
	calls := f.calls()
	if len(calls) != 3 || !strings.HasPrefix(calls[0], "C --query-gpu=index,uuid,") || !strings.HasSuffix(calls[1], "--format=csv,noheader,nounits") {
		t.Errorf("calls %q: want two with the processes, one without, all with LC_ALL=C", calls)
	}
}

// FC-22: unified memory reports [N/A].
func TestFC22UnifiedMemoryIsNeitherZeroNorSkippedAndKeepsItsIndex(t *testing.T) {
	other := strings.NewReplacer("0, GPU-aaaa", "2, GPU-cccc").Replace(row4090)
	noMemory := "3, GPU-dddd, NVIDIA RTX A6000, 00000000:09:00.0, [N/A], [N/A], [N/A], [N/A], 0, 36, 4.20, [N/A]"
	f := newFake(t, prints(row4090, rowGB10, other, noMemory), prints("GPU-bbbb, 5, ollama, 4096"))
	s := f.open(NvidiaSMI{})
	s.meminfo = meminfo(t, 119*gpu.GiB, 64*gpu.GiB)
	d := lookSMI(t, s)
	if len(d) != 4 {
		t.Fatalf("%d devices, want 4", len(d))
	}
	for i, uuid := range []string{"GPU-aaaa", "GPU-bbbb", "GPU-cccc", "GPU-dddd"} {
		if d[i].Index != i || d[i].UUID != uuid {
			t.Errorf("place %d: index %d, %s", i, d[i].Index, d[i].UUID)
		}
	}
	if g := d[1]; !g.MemoryKnown || !g.Unified || g.Total != 119*gpu.GiB || g.Free != 64*gpu.GiB || len(g.Processes) != 1 {
		t.Errorf("GB10: %+v", g)
	}
	if g := d[3]; g.MemoryKnown || g.Unified || g.Health != gpu.Healthy {
		t.Errorf("A6000 that does not tell: %+v", g)
	}
}

func TestErrorsOfNvidiaSMIAreLostTelemetryWithWhatToDo(t *testing.T) {
	for script, parts := range map[string][]string{
		"echo 'No devices were found'; exit 6": {"No devices were found", "status 6"},
		"echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML library version: 1'; exit 18": {"mismatch", "status 18", "reboot"},
		"echo 'Failed to initialize NVML: Unknown Error'; exit 255":                                                  {"Unknown Error", "container"},
		"echo \"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure.\"; exit 9":  {"couldn't communicate", "kernel module"},
		"echo 'on standard error' >&2; exit 4":                                                                       {"on standard error", "may not use"},
		"exit 12":                                                                                                    {"status 12", "libnvidia-ml"},
		"kill -9 $$":                                                                                                 {"status -1"},
		"echo '0, GPU-a, half a li'":                                                                                 {"half a li", "no GPU"},
		"echo 'WARNING: infoROM is corrupted at gpu 0000:01:00.0'; echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18": {"mismatch", "status 18", "reboot"},
		"true": {"no GPU"},
		`echo 'Field "uuid" is not a valid field to query.'; exit 2`:                                                {"valid field", "too old"},
		prints(strings.NewReplacer("24564, 912, 23226", "[Unknown Error], ERR!, [Unknown Error]").Replace(row4090)): {"no GPU answers", "Unknown Error"},
	} {
		s := newFake(t, script, "").open(NvidiaSMI{})
		sample, err := s.Sample(context.Background(), gpu.Full)
		if err == nil || len(sample.Devices) != 0 {
			t.Errorf("%s: %+v, want an error", script, sample)
			continue
		}
		for _, part := range parts {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %q does not say %q", script, err, part)
			}
		}
	}
}

func TestFieldsThatAnOldDriverDoesNotKnowAreLeftOut(t *testing.T) {
	f := newFake(t, `case "$1" in
*memory.reserved*) echo 'Field "memory.reserved" is not a valid field to query.'; exit 2 ;;
*mig.mode*) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2 ;;
esac
`+prints("0, GPU-aaaa, Tesla K80, 00000000:01:00.0, 11441, 100, 11341, 3, 40, 50.5"), "")
	s := f.open(NvidiaSMI{})
	for range 2 {
		if d := lookSMI(t, s)[0]; d.Free != 11341*gpu.MiB || d.Utilisation != 3 || d.Temperature != 40 || d.Power != 50.5 {
			t.Errorf("%+v", d)
		}
	}
	if calls := f.calls(); len(calls) != 3+1+2 {
		t.Errorf("%d calls, want two failed ones at first and none after: %q", len(calls), calls)
	}
}

func TestFailingProcessQueryMeansUnknownAndNotNobody(t *testing.T) {
	for _, apps := range []string{"echo broken; exit 255", "echo 'no row'"} {
		d := lookSMI(t, newFake(t, prints(row4090), apps).open(NvidiaSMI{}))[0]
		if d.ProcessesKnown || len(d.Processes) != 0 || !d.MemoryKnown {
			t.Errorf("%s: %+v", apps, d)
		}
	}
	if d := lookSMI(t, newFake(t, prints(row4090), "true").open(NvidiaSMI{}))[0]; !d.ProcessesKnown {
		t.Errorf("an empty list is a known one: %+v", d)
	}
}

func TestLostGPUOfNvidiaSMIKeepsItsIdentityAndTheOtherGoesOn(t *testing.T) {
	second := "1, GPU-bbbb, NVIDIA RTX A6000, 00000000:0A:00.0, 49140, 10, 48680, 450, 0, 36, 4.20, [N/A]"
	lost := "[GPU is lost]"
	both := prints(row4090, second)
	for name, after := range map[string]string{
		"row with identity":    prints(row4090, "1, GPU-bbbb, NVIDIA RTX A6000, 00000000:0A:00.0"+strings.Repeat(", "+lost, 8)),
		"row without identity": prints(row4090, "1"+strings.Repeat(", "+lost, 11)),
		"row is gone":          prints(row4090),
		"the run fails": `case "$*" in *--id=GPU-aaaa) ` + prints(row4090) + `
exit 0 ;; esac
echo 'Unable to determine the device handle for GPU0000:0A:00.0: GPU is lost.  Reboot the system to recover this GPU'; exit 15`,
	} {
		f := newFake(t, both, "")
		s := f.open(NvidiaSMI{})
		lookSMI(t, s)
		f.does(after, "")
		for range 2 {
			d := lookSMI(t, s)
			if len(d) != 2 {
				t.Fatalf("%s: %+v", name, d)
			}
			if g := d[1]; g.Health != gpu.Lost || g.UUID != "GPU-bbbb" || g.Name != "NVIDIA RTX A6000" || g.Index != 1 || g.Total != 49140*gpu.MiB || g.MemoryKnown || g.Reason == "" {
				t.Errorf("%s: lost one: %+v", name, g)
			}
			if g := d[0]; g.Health != gpu.Healthy || g.Free != 23226*gpu.MiB {
				t.Errorf("%s: other: %+v", name, g)
			}
		}
		f.does(both, "")
		if d := lookSMI(t, s); len(d) != 2 || d[1].Health != gpu.Healthy || d[1].UUID != "GPU-bbbb" {
			t.Errorf("%s: after it came back: %+v", name, d)
		}
	}
}

func TestOnlyGPUBeingLostIsALostGPU(t *testing.T) {
	f := newFake(t, prints(row4090), "")
	s := f.open(NvidiaSMI{})
	lookSMI(t, s)
	f.does("echo 'Unable to determine the device handle for GPU0000:01:00.0: Unknown Error'; exit 255", "")
	if d := lookSMI(t, s); len(d) != 1 || d[0].Health != gpu.Lost || d[0].UUID != "GPU-aaaa" {
		t.Errorf("%+v", d)
	}
}

func TestHangingNvidiaSMIIsKilledInTime(t *testing.T) {
	for name, hang := range map[string]string{
		"itself":                       "exec sleep 600",
		"a child that holds its pipes": "sleep 5 & wait",
	} {
		f := newFake(t, hang, "")
		s := f.open(NvidiaSMI{Timeout: caddy.Duration(100 * time.Millisecond)})
		start := time.Now()
		_, err := s.Sample(context.Background(), gpu.Memory)
		if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 10*time.Second {
			t.Errorf("%s: %v after %v", name, err, time.Since(start))
		}
		if err := s.Close(); err != nil { // waits until nothing runs
			t.Errorf("%s: %v", name, err)
		}
		f.does(prints(row4090), "")
		s.timeout = defaultTimeout
		lookSMI(t, s)
	}
}

func TestSecondRunNeverJoinsOneThatHangs(t *testing.T) {
	f := newFake(t, prints(row4090), "")
	s := f.open(NvidiaSMI{})
	if err := smiTurn.Take(context.Background()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := s.Sample(ctx, gpu.Memory); err == nil || !strings.Contains(err.Error(), "earlier look") {
		t.Errorf("%v", err)
	}
	smiTurn.Give()
	if calls := f.calls(); len(calls) != 1 || calls[0] != "" {
		t.Errorf("it was run: %q", calls)
	}
}

func TestOutputWithoutEndIsNotKept(t *testing.T) {
	s := newFake(t, "exec head -c 5000000 /dev/zero", "").open(NvidiaSMI{})
	if _, err := s.Sample(context.Background(), gpu.Memory); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("%v", err)
	}
}

func TestNvidiaSMIIsFoundOnThePath(t *testing.T) {
	f := newFake(t, prints(row4090), "")
	t.Setenv("PATH", f.dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	s, err := new(NvidiaSMI).Open(context.Background(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	if s.MinInterval() != defaultInterval || !strings.Contains(s.Why(), f.path) {
		t.Errorf("%v, %s", s.MinInterval(), s.Why())
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := (&NvidiaSMI{Path: filepath.Join(f.dir, "none")}).Open(context.Background(), zap.NewNop()); err == nil {
		t.Error("a program that is not there was opened")
	}
}

func TestNvidiaSMICaddyfile(t *testing.T) {
	module, err := caddyfile.UnmarshalModule(dispenser("gpu nvidia_smi {\n path /x/nvidia-smi\n interval 2s\n timeout 20s\n}"), "gpu_broker.samplers.nvidia_smi")
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := json.Marshal(module); string(got) != `{"path":"/x/nvidia-smi","interval":2000000000,"timeout":20000000000}` {
		t.Errorf("%s", got)
	}
	for _, text := range []string{
		"gpu nvidia_smi 24GiB", "gpu nvidia_smi {\n library x\n}", "gpu nvidia_smi {\n path\n}", "gpu nvidia_smi {\n path a\n path b\n}",
		"gpu nvidia_smi {\n interval soon\n}", "gpu nvidia_smi {\n timeout 1s 2s\n}",
	} {
		if _, err := caddyfile.UnmarshalModule(dispenser(text), "gpu_broker.samplers.nvidia_smi"); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
	if err := (&NvidiaSMI{Interval: -1, Timeout: -1}).Validate(); err == nil || !strings.Contains(err.Error(), "interval") || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("%v", err)
	}
}

const warning = "WARNING: infoROM is corrupted at gpu 0000:01:00.0"

func TestK6_RowsCountWhateverStandsAroundThem(t *testing.T) {
	second := strings.NewReplacer("0, GPU-aaaa", "1, GPU-bbbb", ":01:", ":02:").Replace(row4090)
	for name, script := range map[string]string{
		"warning before":          prints(warning, row4090, second),
		"warning between, blanks": prints("", row4090, warning, "", second, " "),
		"on standard error":       "echo '" + warning + "' >&2\n" + prints(row4090, second),
		"exit 14":                 prints(row4090, second) + "\necho '" + warning + "'; exit 14",
		"exit 14 without a word":  prints(row4090, second) + "\nexit 14",
		"exit 255":                prints(row4090, second) + "\necho 'something else'; exit 255",
	} {
		d := lookSMI(t, newFake(t, script, prints(warning, "GPU-bbbb, 5, ollama, 4096")+"\nexit 14").open(NvidiaSMI{}))
		if len(d) != 2 {
			t.Fatalf("%s: %+v", name, d)
		}
		for i := range d {
			if g := d[i]; g.Health != gpu.Healthy || !g.MemoryKnown || g.Free != 23226*gpu.MiB || !g.ProcessesKnown || len(g.Processes) != i {
				t.Errorf("%s: %+v", name, g)
			}
		}
		if d[0].Reason == "" {
			t.Errorf("%s: nothing is told", name)
		}
		if strings.Contains(d[0].Reason, "infoROM is corrupted at") && d[1].Reason != "" {
			t.Errorf("%s: GPU 1 is blamed for GPU 0: %q", name, d[1].Reason)
		}
	}
}

func TestK6_WhatIsPrintedBesideRowsIsLoggedOnce(t *testing.T) {
	core, logs := observer.New(zap.WarnLevel)
	f := newFake(t, prints(row4090, warning), "")
	config := NvidiaSMI{Path: f.path}
	s, err := config.Open(context.Background(), zap.New(core))
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		lookSMI(t, s)
	}
	if logs.Len() != 1 || !strings.Contains(logs.All()[0].ContextMap()["printed"].(string), "infoROM") {
		t.Errorf("%+v", logs.All())
	}
}

func TestK6_OneDeadCardOfTwoIsLostFromTheFirstLookOnAndComesBack(t *testing.T) {
	const handle = "Unable to determine the device handle for GPU 0000:0A:00.0: Unknown Error"
	first := strings.NewReplacer("0, GPU-aaaa", "INDEX, GPU-aaaa").Replace(row4090)
	second := "INDEX, GPU-bbbb, NVIDIA RTX A6000, 00000000:0A:00.0, 49140, 10, 48680, 450, 0, 36, 4.20, [N/A]"
	at := func(row, index string) string { return strings.Replace(row, "INDEX", index, 1) }
	for name, c := range map[string]struct{ script, alive, dead string }{
		"the first, and nothing after it is printed": {`case "$*" in
*--id=1*|*--id=GPU-aaaa*) ` + prints(at(first, "1")) + `
exit 0 ;;
*--id=0*|*query-gpu*noheader,nounits) echo '` + handle + `'; exit 255 ;;
esac
echo 'No devices were found'; exit 6`, at(first, "1"), at(second, "0")},
		"the second, after the row of the first": {prints(at(first, "0")) + "\necho '" + handle + "'; exit 255", at(first, "0"), at(second, "1")},
		"the second, and the run succeeds":       {prints(at(first, "0"), handle), at(first, "0"), at(second, "1")},
	} {
		f := newFake(t, c.script, "")
		s := f.open(NvidiaSMI{})
		for range 2 {
			d := lookSMI(t, s)
			if len(d) != 2 {
				t.Fatalf("%s: %+v", name, d)
			}
			for _, g := range d {
				if alive := g.UUID == "GPU-aaaa"; alive != (g.Health == gpu.Healthy) || alive != g.MemoryKnown || !alive && !strings.Contains(g.Reason, "Unable") {
					t.Errorf("%s: %+v", name, g)
				}
			}
		}
		f.does(prints(c.alive, c.dead), "")
		d := lookSMI(t, s)
		if len(d) != 2 || d[0].Health != gpu.Healthy || d[1].Health != gpu.Healthy {
			t.Errorf("%s: after it came back: %+v", name, d)
		}
	}
}

func TestK6_TheOnlyCardThatCannotBeOpenedIsLostAndNotNothing(t *testing.T) {
	f := newFake(t, "echo 'Unable to determine the device handle for GPU 0000:0A:00.0: GPU is lost.'; exit 15", "")
	s := f.open(NvidiaSMI{})
	for range 2 {
		if d := lookSMI(t, s); len(d) != 1 || d[0].Health != gpu.Lost || !strings.Contains(d[0].Reason, "GPU is lost") {
			t.Errorf("%+v", d)
		}
	}
	f.does(prints(row4090), "")
	if d := lookSMI(t, s); len(d) != 1 || d[0].Health != gpu.Healthy || d[0].UUID != "GPU-aaaa" {
		t.Errorf("after it came back: %+v", d)
	}
}

func TestK6_EachRunHasTheWholeTimeout(t *testing.T) {
	const slow = "sleep 0.6\n"
	s := newFake(t, slow+prints(row4090), slow+prints("GPU-aaaa, 5, ollama, 4096")).open(NvidiaSMI{Timeout: caddy.Duration(time.Second)})
	d := lookSMI(t, s)
	if len(d) != 1 || !d[0].MemoryKnown || len(d[0].Processes) != 1 {
		t.Errorf("two runs of 0.6s each within a timeout of 1s: %+v", d)
	}
	s.timeout = 200 * time.Millisecond
	if _, err := s.Sample(context.Background(), gpu.Memory); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a run of 0.6s within a timeout of 0.2s: %v", err)
	}
}

func TestK6_AChildThatKeepsThePipeCostsNoLook(t *testing.T) {
	const child = "\nsleep 30 &\necho $! >\"$0.child\""
	f := newFake(t, prints(row4090)+child, prints("GPU-aaaa, 5, ollama, 4096"))
	t.Cleanup(func() { _ = exec.Command("sh", "-c", "kill $(cat '"+f.path+".child')").Run() })
	if d := lookSMI(t, f.open(NvidiaSMI{})); len(d) != 1 || !d[0].MemoryKnown || len(d[0].Processes) != 1 {
		t.Errorf("%+v", d)
	}
}

func TestK6_ANameMayHoldCommas(t *testing.T) {
	f := newFake(t, prints(strings.Replace(row4090, "GeForce RTX 4090", "RTX 4090, Founders, 24 GB", 1)), "")
	if d := lookSMI(t, f.open(NvidiaSMI{})); len(d) != 1 || !d[0].MemoryKnown || d[0].Name != "NVIDIA RTX 4090, Founders, 24 GB" || d[0].Free != 23226*gpu.MiB {
		t.Errorf("%+v", d)
	}
}
