package e2e

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// tripwire is an address that counts whoever connects to it.
type tripwire struct {
	addr string
	hits atomic.Int64
}

func newTripwire(t testing.TB) *tripwire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w := &tripwire{addr: l.Addr().String()}
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			w.hits.Add(1)
			_ = conn.Close()
		}
	})
	t.Cleanup(func() { _ = l.Close(); tasks.Wait() })
	return w
}

// file is what a folder says of one of its files.
type file struct {
	mode    fs.FileMode
	size    int64
	changed time.Time
	sum     [sha256.Size]byte
}

// tree is everything in a folder, by path.
func tree(t testing.TB, dir string) map[string]file {
	t.Helper()
	out := map[string]file{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		f := file{mode: info.Mode(), size: info.Size(), changed: info.ModTime()}
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			f.sum = sha256.Sum256(data)
		}
		out[path] = f
		return nil
	}))
	return out
}

// bench is a place in which caddy's commands are run: everything that they could write to or connect to is watched.
type bench struct {
	t      testing.TB
	dir    string // home, data, config and temporary files, and where the command runs
	wires  map[string]*tripwire
	config map[string]string // texts by name
	good   map[string]bool
}

// commands are those that must have no effect.
var commands = map[string][]string{
	"validate":         {"validate", "--adapter", "caddyfile"},
	"adapt":            {"adapt", "--adapter", "caddyfile"},
	"adapt --validate": {"adapt", "--adapter", "caddyfile", "--validate"},
}

func newBench(t testing.TB) *bench {
	t.Helper()
	b := &bench{t: t, dir: t.TempDir(), wires: map[string]*tripwire{}, config: map[string]string{}, good: map[string]bool{}}
	for _, name := range []string{"plain", "ollama", "comfyui", "admin", "proxy"} {
		b.wires[name] = newTripwire(t)
	}
	for _, dir := range []string{"home", "data", "config", "tmp", "bin", "gpu", "run"} {
		require.NoError(t, os.MkdirAll(filepath.Join(b.dir, dir), 0o755))
	}
	// Whoever asks the driver for the GPUs starts this.
	script := fmt.Sprintf("#!/bin/sh\necho started >> %s\nexit 1\n", filepath.Join(b.dir, "started"))
	require.NoError(t, os.WriteFile(filepath.Join(b.dir, "bin", "nvidia-smi"), []byte(script), 0o755))
	return b
}

// add adds a configuration: one that is good, changed by replacing from by to.
func (b *bench) add(name string, good bool, from, to string) {
	b.t.Helper()
	text := b.caddyfile()
	require.True(b.t, from == "" || strings.Contains(text, from), "%s: nothing to replace", name)
	b.config[name], b.good[name] = strings.Replace(text, from, to, 1), good
}

// caddyfile is a good configuration with all that could reach out.
func (b *bench) caddyfile() string {
	return fmt.Sprintf(`{
	admin %[1]s
	auto_https off
	gpu_broker {
		gpu simulated 16GiB {
			dir %[6]s
		}
		probe_interval 10ms
		idle_timeout 1s
		consumer plain {
			upstream %[2]s
			vram 3GiB
			health /health {
				loaded $.loaded
				resident_mib $.gpu_resident_mib
			}
			load POST /api/admin/load
			unload POST /api/admin/unload
		}
		consumer ollama {
			preset ollama
			upstream %[3]s
			vram 6GiB
			pin
		}
		consumer comfyui {
			preset comfyui
			upstream %[4]s
			vram 13GiB
		}
	}
}
http://%[7]s {
	handle_path /plain/* {
		gpu_broker plain
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle_path /comfyui/* {
		gpu_broker comfyui
		reverse_proxy %[4]s
	}
	handle_path /ollama/* {
		gpu_broker ollama
		reverse_proxy {
			dynamic gpu_broker
		}
	}
	handle /gpu/* {
		gpu_broker_status
	}
	reverse_proxy %[5]s
}
`, b.wires["admin"].addr, b.wires["plain"].addr, b.wires["ollama"].addr, b.wires["comfyui"].addr, b.wires["proxy"].addr,
		filepath.Join(b.dir, "gpu"), freeAddr(b.t))
}

// run runs a command on a configuration. data is the data folder; the bench's own if empty.
func (b *bench) run(command, config, data string) (output string, err error) {
	b.t.Helper()
	bin, err := caddy()
	require.NoError(b.t, err)
	cmd := exec.Command(bin, slices.Concat(commands[command], []string{"--config", filepath.Join(b.dir, "Caddyfile-"+config)})...)
	cmd.Dir = filepath.Join(b.dir, "run")
	cmd.Env = b.env(data)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// env is the environment of a command.
func (b *bench) env(data string) []string {
	if data == "" {
		data = filepath.Join(b.dir, "data")
	}
	return []string{
		"PATH=" + filepath.Join(b.dir, "bin") + string(os.PathListSeparator) + os.Getenv("PATH"),
		"HOME=" + filepath.Join(b.dir, "home"), "XDG_DATA_HOME=" + data,
		"XDG_CONFIG_HOME=" + filepath.Join(b.dir, "config"), "TMPDIR=" + filepath.Join(b.dir, "tmp"),
		"GPU_BROKER_SIM_DIR=" + filepath.Join(b.dir, "gpu"),
	}
}

// save writes the configurations down.
func (b *bench) save() {
	for name, text := range b.config {
		require.NoError(b.t, os.WriteFile(filepath.Join(b.dir, "Caddyfile-"+name), []byte(text), 0o644))
	}
}

// untouched checks that nobody was connected to.
func (b *bench) untouched(what string) {
	b.t.Helper()
	for name, w := range b.wires {
		require.Zero(b.t, w.hits.Load(), "%s connected to %s", what, name)
	}
}

// fill adds a good configuration and those that fail in each way.
func (b *bench) fill() {
	b.add("good", true, "", "")
	b.add("auto", true, "gpu simulated 16GiB {\n\t\t\tdir "+filepath.Join(b.dir, "gpu")+"\n\t\t}", "gpu auto")
	b.add("nvidia-smi", true, "gpu simulated 16GiB {\n\t\t\tdir "+filepath.Join(b.dir, "gpu")+"\n\t\t}", "gpu nvidia_smi")
	// For a Caddy that runs: its own admin endpoint, in place of the one that is watched.
	b.config["running"] = strings.Replace(b.config["nvidia-smi"], b.wires["admin"].addr, freeAddr(b.t), 1)
	b.add("unknown word", false, "vram 3GiB", "vrm 3GiB")
	b.add("bad size", false, "vram 3GiB", "vram 8XB")
	b.add("unknown consumer", false, "gpu_broker plain", "gpu_broker plane")
	b.add("bad path", false, "$.loaded", "$.[[[")
	b.add("unknown preset", false, "preset comfyui", "preset comfy")
	b.add("a lifecycle that can't do what is wanted", false, "preset ollama", "preset ollama\n\t\t\tmodels auto\n\t\t\tcatalog off")
	b.add("another app fails", false, "http://", "https://other.localhost {\n\ttls /nowhere/cert.pem /nowhere/key.pem\n}\nhttp://")
	b.save()
}

func TestValidateAndAdaptConnectToNobodyStartNothingAndWriteNothing(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.fill()
	for config, good := range b.good {
		for command := range commands {
			before := tree(t, b.dir)
			out, err := b.run(command, config, "")
			what := fmt.Sprintf("%s of %q", command, config)
			if good {
				require.NoError(t, err, "%s: %s", what, out)
			} else if command != "adapt" { // some faults are found only when the configuration is provisioned
				require.Error(t, err, "%s: %s", what, out)
			}
			b.untouched(what)
			require.Equal(t, before, tree(t, b.dir), what)
		}
	}

	// What is watched here is what a Caddy that runs does.
	before := tree(t, b.dir)
	cmd := exec.Command(must(caddy()), "run", "--adapter", "caddyfile", "--config", filepath.Join(b.dir, "Caddyfile-running"))
	cmd.Dir, cmd.Env = filepath.Join(b.dir, "run"), b.env("")
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	deadline := time.Now().Add(patience)
	for b.wires["plain"].hits.Load() == 0 || b.wires["ollama"].hits.Load() == 0 || b.wires["comfyui"].hits.Load() == 0 ||
		!exists(filepath.Join(b.dir, "started")) || len(tree(t, filepath.Join(b.dir, "data"))) == 1 {
		require.True(t, time.Now().Before(deadline), "a running Caddy probes, asks for GPUs and keeps files")
		time.Sleep(5 * time.Millisecond)
	}
	require.NotEqual(t, before, tree(t, b.dir))
}

// What is refused at the start is refused before, all of it, each with its place.
func TestValidateSaysWhatLifecyclesCannotDo(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.add("no catalog", false, "preset ollama", "preset ollama\n\t\t\tmodels auto\n\t\t\tcatalog off")
	b.config["no catalog"] = strings.Replace(b.config["no catalog"], "unload POST /api/admin/unload", "unload POST /api/admin/unload\n\t\t\tmodel small", 1)
	b.add("no load", false, "probe_interval 10ms", "probe_interval 10ms\n\t\trestore comfyui after 2m")
	b.save()
	for name, want := range map[string][]string{
		"no catalog": {`consumer \"plain\" (`, "can't unload one by its name", `consumer \"ollama\" (`, "models auto, but its lifecycle has no catalog"},
		"no load":    {`consumer \"comfyui\" (`, "restore names it, but it has no load route"},
	} {
		out, err := b.run("validate", name, "")
		require.Error(t, err, name)
		for _, text := range want {
			require.Contains(t, out, text, name)
		}
		require.Contains(t, out, "Caddyfile-"+name+":")
		b.untouched(name)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// restart ends the site's Caddy and starts it anew.
func (s *site) restart() {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(syscall.SIGTERM))
	ended := make(chan error, 1)
	old := s.cmd
	go func() { ended <- old.Wait() }()
	select {
	case err := <-ended:
		require.NoError(s.t, err)
	case <-time.After(patience):
		s.t.Fatal("caddy did not stop")
	}
	s.startAgain()
}

// killed ends the site's Caddy as kill -9 does, and starts it anew.
func (s *site) killed() {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Kill())
	_ = s.cmd.Wait() // it reports that it was killed
	s.startAgain()
}

// startAgain starts the site's Caddy, which has ended.
func (s *site) startAgain() {
	s.t.Helper()
	old := s.cmd
	log, err := os.OpenFile(filepath.Join(s.dir, "caddy.log"), os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(s.t, err)
	defer log.Close()
	s.cmd = exec.Command(old.Path, old.Args[1:]...)
	s.cmd.Env, s.cmd.Stdout, s.cmd.Stderr = old.Env, log, log
	require.NoError(s.t, s.cmd.Start())
	s.client.CloseIdleConnections()
	s.until("the site answers again", func() bool {
		resp, err := s.client.Get(s.url + "/gpu/healthz")
		if err == nil {
			_ = resp.Body.Close()
		}
		return err == nil && resp.StatusCode == 200
	})
}

func TestValidateBesideARunningCaddyTouchesNothingOfIt(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.fill()
	s := start(t, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}})
	s.serve("a")
	s.serve("b") // something was learnt
	own := s.caddyfileNow()
	b.config["that of the running one"], b.good["that of the running one"] = own, true
	b.save()
	s.restart() // what was learnt is written at the end
	require.Len(t, learntFiles(t, s.dir), 1)
	s.until("b is known to be loaded", func() bool { return s.state("b") == "READY" && s.state("a") == "IDLE" })
	loads := s.servers["a"].Stats().LoadsStarted + s.servers["b"].Stats().LoadsStarted
	data := filepath.Join(s.dir, "data")
	before := s.status()
	kept := quietTree(s, data)
	for config, good := range b.good {
		for command := range commands {
			out, err := b.run(command, config, data)
			if good {
				require.NoError(t, err, "%s of %q: %s", command, config, out)
			}
			b.untouched(command + " of " + config)
			require.Equal(t, kept, tree(t, data), "%s of %q", command, config)
		}
	}
	after := s.status()
	for name := range before.Consumers {
		require.Equal(t, before.Consumers[name].Slots, after.Consumers[name].Slots)
		require.Equal(t, before.Consumers[name].LastUsed, after.Consumers[name].LastUsed)
	}
	require.Equal(t, loads, s.servers["a"].Stats().LoadsStarted+s.servers["b"].Stats().LoadsStarted)
	require.Equal(t, 1, s.unloadCalls(), "a's for b, before all this")
	s.warm("/b/synthesize", "x")
}

// caddyfileNow is the text of the running configuration.
func (s *site) caddyfileNow() string {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dir, "Caddyfile"))
	require.NoError(s.t, err)
	return string(text)
}

// learntFiles are the files in which a site keeps what it has learnt.
func learntFiles(t testing.TB, dir string) []string {
	t.Helper()
	var found []string
	require.NoError(t, filepath.WalkDir(filepath.Join(dir, "data"), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // one that was being written has its own name now
			return nil
		}
		if err == nil && d.Name() == "learnt.json" {
			found = append(found, path)
		}
		return err
	}))
	return found
}

// quietTree is a folder's content once the site itself writes no more to it.
func quietTree(s *site, dir string) (now map[string]file) {
	s.t.Helper()
	began, last := time.Now(), map[string]file{}
	s.until("the data folder is quiet", func() bool {
		now = tree(s.t, dir)
		same := len(now) == len(last)
		for path, f := range now {
			same = same && last[path] == f
		}
		if !same {
			began, last = time.Now(), now
		}
		return time.Since(began) > 2*time.Second
	})
	return now
}
