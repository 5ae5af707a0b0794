package simulated

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// helperDir makes the test binary a server that holds 2 GiB in that folder
// until its standard input ends.
const helperDir = "SIMULATED_TEST_HELPER_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(helperDir); dir != "" {
		h, err := NewHolder(dir, "victim")
		if err == nil {
			err = h.Set(0, 2*gpu.GiB)
		}
		if err != nil {
			panic(err)
		}
		_, _ = os.Stdout.WriteString("ready\n")
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0) // without Close, as a crash would
	}
	os.Exit(m.Run())
}

// open makes a sampler whose clock the test moves.
func open(t *testing.T, guest Simulated) (*sampler, *time.Time) {
	t.Helper()
	s, err := guest.Open(context.Background(), zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	clock := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	inner := s.(*sampler)
	inner.now = func() time.Time { return clock }
	return inner, &clock
}

func sample(t *testing.T, s gpu.Sampler) []gpu.Device {
	t.Helper()
	got, err := s.Sample(context.Background(), gpu.Full)
	if err != nil {
		t.Fatal(err)
	}
	return got.Devices
}

func used(t *testing.T, s gpu.Sampler, index int) gpu.Bytes {
	t.Helper()
	d := sample(t, s)[index]
	if !d.MemoryKnown {
		t.Fatalf("memory of GPU %d is not known: %s", index, d.Reason)
	}
	return d.Total - d.Free
}

func hold(t *testing.T, dir, name string) *Holder {
	t.Helper()
	h, err := NewHolder(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func set(t *testing.T, h *Holder, index int, b gpu.Bytes) {
	t.Helper()
	if err := h.Set(index, b); err != nil {
		t.Fatal(err)
	}
}

func TestMemoryOfSeveralServersIsAddedUpPerGPU(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{24 * gpu.GiB, 16 * gpu.GiB}, Dir: dir})
	a, b := hold(t, dir, "a"), hold(t, dir, "b")
	set(t, a, 0, 2*gpu.GiB)
	set(t, b, 0, 3*gpu.GiB)
	set(t, b, 1, gpu.GiB)

	devices := sample(t, s)
	if devices[0].Free != 19*gpu.GiB || devices[1].Free != 15*gpu.GiB {
		t.Errorf("free %v and %v, want 19GiB and 15GiB", devices[0].Free, devices[1].Free)
	}
	want := []gpu.Process{{PID: os.Getpid(), Name: "a", Used: 2 * gpu.GiB}, {PID: os.Getpid(), Name: "b", Used: 3 * gpu.GiB}}
	if got := devices[0].Processes; !devices[0].ProcessesKnown || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("processes %v, want %v", got, want)
	}
	if devices[0].UUID == devices[1].UUID || devices[1].Index != 1 {
		t.Errorf("identities %q and %q", devices[0].UUID, devices[1].UUID)
	}

	set(t, b, 0, 0)
	if got := used(t, s, 0); got != 2*gpu.GiB {
		t.Errorf("used %v after b freed GPU 0, want 2GiB", got)
	}
	set(t, b, 1, 0)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("files are left though nothing is held: %v", entries)
	}
	if err := a.Set(0, 1); err == nil {
		t.Error("Set after Close succeeded")
	}
}

func TestNamelessHolderIsNamedByItsPIDAndProgram(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{gpu.GiB}, Dir: dir})
	set(t, hold(t, dir, ""), 0, gpu.MiB)
	if _, err := os.Stat(filepath.Join(dir, strconv.Itoa(os.Getpid()))); err != nil {
		t.Error(err)
	}
	if got := sample(t, s)[0].Processes; len(got) != 1 || got[0].Name != comm(os.Getpid()) {
		t.Errorf("processes %v", got)
	}
}

func TestKilledServerFreesItsMemoryEvenBeforeItIsReaped(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{24 * gpu.GiB}, Dir: dir})
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), helperDir+"="+dir)
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stdin.Close() }()
	stdout, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = command.Wait() }()
	defer func() { _ = command.Process.Kill() }()
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		t.Fatalf("helper said %q, %v", line, err)
	}
	if got := used(t, s, 0); got != 2*gpu.GiB {
		t.Fatalf("used %v, want 2GiB", got)
	}
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); used(t, s, 0) != 0; {
		if time.Now().After(deadline) {
			t.Fatal("memory of a killed server is still used")
		}
		time.Sleep(time.Millisecond) // a kill is over when the kernel says so: it sends us no signal before we reap
	}
	if _, err := os.Stat(filepath.Join(dir, strconv.Itoa(command.Process.Pid)+"-victim")); !os.IsNotExist(err) {
		t.Errorf("the dead server's file is left: %v", err)
	}
}

func TestFileOfAnEarlierProcessWithTheSamePIDIsIgnored(t *testing.T) {
	if startTime(os.Getpid()) == "" {
		t.Log("no /proc: start times are not compared here")
		return
	}
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{gpu.GiB}, Dir: dir})
	write(t, dir, strconv.Itoa(os.Getpid())+"-old", "#start 1\n0 1MiB\n")
	if got := used(t, s, 0); got != 0 {
		t.Errorf("used %v, want nothing", got)
	}
}

func TestFreedMemoryShowsAfterTheReleaseDelayAndGrowthAtOnce(t *testing.T) {
	dir := t.TempDir()
	s, clock := open(t, Simulated{Totals: []gpu.Bytes{24 * gpu.GiB}, Dir: dir, ReleaseDelay: caddy.Duration(800 * time.Millisecond)})
	h := hold(t, dir, "h")
	steps := []struct {
		after time.Duration
		hold  gpu.Bytes
		used  gpu.Bytes
	}{
		{0, 4 * gpu.GiB, 4 * gpu.GiB},
		{time.Millisecond, 10 * gpu.GiB, 10 * gpu.GiB},
		{time.Millisecond, 3 * gpu.GiB, 10 * gpu.GiB},      // 7 freed here
		{400 * time.Millisecond, 0, 10 * gpu.GiB},          // 3 freed here
		{399 * time.Millisecond, 0, 10 * gpu.GiB},          // 799 ms: not yet
		{time.Millisecond, 0, 3 * gpu.GiB},                 // 800 ms: the 7 are back
		{time.Millisecond, 5 * gpu.GiB, 8 * gpu.GiB},       // growth beside the ghost
		{399 * time.Millisecond, 5 * gpu.GiB, 5 * gpu.GiB}, // the 3 are back
		{24 * time.Hour, 30 * gpu.GiB, 24 * gpu.GiB},       // never above the total
	}
	for i, step := range steps {
		*clock = clock.Add(step.after)
		set(t, h, 0, step.hold)
		if got := used(t, s, 0); got != step.used {
			t.Errorf("step %d: used %v, want %v", i, got, step.used)
		}
	}
}

func TestDeadProcessLeavesTheListAtOnceThoughItsMemoryDoesNot(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{24 * gpu.GiB}, Dir: dir, ReleaseDelay: caddy.Duration(time.Hour)})
	h := hold(t, dir, "h")
	set(t, h, 0, gpu.GiB)
	sample(t, s)
	set(t, h, 0, 0)
	if d := sample(t, s)[0]; len(d.Processes) != 0 || d.Total-d.Free != gpu.GiB {
		t.Errorf("processes %v, used %v; want none and 1GiB", d.Processes, d.Total-d.Free)
	}
}

func TestProcessesOffHidesWhoHoldsTheMemory(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{gpu.GiB}, Dir: dir, Processes: "off"})
	set(t, hold(t, dir, "h"), 0, gpu.MiB)
	d := sample(t, s)[0]
	if d.ProcessesKnown || len(d.Processes) != 0 || d.Total-d.Free != gpu.MiB {
		t.Errorf("known %v, %v, used %v", d.ProcessesKnown, d.Processes, d.Total-d.Free)
	}
}

func TestOutsidersCountWithoutALivingProcess(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{24 * gpu.GiB}, Dir: dir})
	game, err := NewOutsider(dir, "game")
	if err != nil {
		t.Fatal(err)
	}
	set(t, game, 0, 9*gpu.GiB)
	write(t, dir, "outsider-desktop", "0 1GiB\n")
	d := sample(t, s)[0]
	if d.Free != 14*gpu.GiB || len(d.Processes) != 2 || d.Processes[0] != (gpu.Process{Name: "desktop", Used: gpu.GiB}) || d.Processes[1].Name != "game" {
		t.Errorf("free %v, processes %v", d.Free, d.Processes)
	}
	if err := game.Close(); err != nil {
		t.Fatal(err)
	}
	if got := used(t, s, 0); got != gpu.GiB {
		t.Errorf("used %v after the game ended, want 1GiB", got)
	}
}

func TestStateFileLosesOneGPUAndKeepsTheOther(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{24 * gpu.GiB, 16 * gpu.GiB}, Dir: dir})
	before := sample(t, s)
	if err := WriteState(dir, "lost 0", "baseline 1 300MiB"); err != nil {
		t.Fatal(err)
	}
	got := sample(t, s)
	if got[0].Health != gpu.Lost || got[0].MemoryKnown || got[0].UUID != before[0].UUID || got[0].Reason == "" {
		t.Errorf("lost GPU: %+v", got[0])
	}
	if got[1].Health != gpu.Healthy || got[1].Total-got[1].Free != 300*gpu.MiB {
		t.Errorf("other GPU: %+v", got[1])
	}
	if err := WriteState(dir); err != nil {
		t.Fatal(err)
	}
	if got := sample(t, s); got[0].Health != gpu.Healthy || got[1].Free != 16*gpu.GiB {
		t.Errorf("after all is well again: %+v", got)
	}
}

func TestLostTelemetryIsAnErrorAndNotALostGPU(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{gpu.GiB}, Dir: dir})
	if err := WriteState(dir, "telemetry lost"); err != nil {
		t.Fatal(err)
	}
	if got, err := s.Sample(context.Background(), gpu.Memory); err == nil || len(got.Devices) != 0 {
		t.Errorf("%+v, %v; want an error", got, err)
	}
}

func TestFilesThatCannotBeUnderstoodAreNamed(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	for file, text := range map[string]string{
		self + "-x": "0 many\n", self + "-y": "zero 1GiB\n", self + "-z": "7 1GiB\n", "state": "lots 0\n", "outsider-x": "0\n",
	} {
		dir := t.TempDir()
		s, _ := open(t, Simulated{Totals: []gpu.Bytes{gpu.GiB}, Dir: dir})
		write(t, dir, file, text)
		if _, err := s.Sample(context.Background(), gpu.Memory); err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s with %q: %v, want an error that names it", file, text, err)
		}
	}
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{gpu.GiB}, Dir: dir})
	write(t, dir, "README", "0 1GiB\n")
	write(t, dir, ".1-a.tmp", "0 1G")
	if got := used(t, s, 0); got != 0 {
		t.Errorf("files of no meaning count: used %v", got)
	}
	if err := WriteState(dir, "lose 1"); err == nil {
		t.Error("WriteState took a line of no meaning")
	}
}

func TestLooksNeverSeeHalfAWrite(t *testing.T) {
	dir := t.TempDir()
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{24 * gpu.GiB, 24 * gpu.GiB}, Dir: dir})
	h := hold(t, dir, "h")
	set(t, h, 1, gpu.GiB)
	var wait sync.WaitGroup
	wait.Go(func() {
		for i := range 300 {
			if err := h.Set(0, gpu.Bytes(i)*gpu.MiB); err != nil {
				t.Error(err)
			}
		}
	})
	for range 300 {
		if got := used(t, s, 1); got != gpu.GiB {
			t.Fatalf("used %v on GPU 1, want 1GiB at all times", got)
		}
	}
	wait.Wait()
}

func TestHolderRefusesWhatCannotBe(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a/b", "a\nb"} {
		if _, err := NewHolder(dir, name); err == nil {
			t.Errorf("name %q was taken", name)
		}
	}
	if _, err := NewOutsider(dir, ""); err == nil {
		t.Error("a nameless outsider was taken")
	}
	h := hold(t, dir, "h")
	if h.Set(-1, 1) == nil || h.Set(0, -1) == nil {
		t.Error("a negative index or size was taken")
	}
}

func TestDefaultDirIsTakenFromTheEnvironment(t *testing.T) {
	t.Setenv(DirEnv, "")
	if got := DefaultDir(); filepath.Dir(got) != filepath.Clean(os.TempDir()) {
		t.Errorf("default folder %s is not in the folder for temporary files", got)
	}
	dir := filepath.Join(t.TempDir(), "new")
	t.Setenv(DirEnv, dir)
	s, _ := open(t, Simulated{Totals: []gpu.Bytes{gpu.GiB}})
	set(t, hold(t, "", "h"), 0, gpu.MiB)
	if got := used(t, s, 0); got != gpu.MiB || s.dir != dir {
		t.Errorf("used %v in %s, want 1MiB in %s", got, s.dir, dir)
	}
}

func TestCaddyfile(t *testing.T) {
	module, err := caddyfile.UnmarshalModule(dispenser(`gpu simulated 24GiB 16GiB {
		dir /x
		release_delay 800ms
		processes off
	}`), "gpu_broker.samplers.simulated")
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(module)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"totals":["24GiB","16GiB"],"dir":"/x","release_delay":800000000,"processes":"off"}`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, text := range []string{
		"gpu simulated 8XB", "gpu simulated 1GiB {\n speed 3\n}", "gpu simulated 1GiB {\n dir\n}", "gpu simulated 1GiB {\n dir a b\n}",
		"gpu simulated 1GiB {\n dir a\n dir b\n}", "gpu simulated 1GiB {\n release_delay soon\n}",
	} {
		if _, err := caddyfile.UnmarshalModule(dispenser(text), "gpu_broker.samplers.simulated"); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}

func TestConfigurationFaultsAreToldAllAtOnce(t *testing.T) {
	err := (&Simulated{Totals: []gpu.Bytes{0}, ReleaseDelay: -1, Processes: "perhaps"}).Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, part := range []string{"no memory", "release_delay", "perhaps"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not speak of %q", err, part)
		}
	}
	if err := new(Simulated).Validate(); err == nil || !strings.Contains(err.Error(), "simulated 24GiB") {
		t.Errorf("without a size: %v", err)
	}
}

// dispenser is where a parser of the global option would be: at the module's name.
func dispenser(text string) *caddyfile.Dispenser {
	d := caddyfile.NewTestDispenser(text)
	d.Next()
	d.Next()
	return d
}

func write(t *testing.T, dir, file, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
