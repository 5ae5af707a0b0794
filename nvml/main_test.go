package nvml

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// buildStub makes the stub library where this build can use one.
var buildStub = func(string) error { return nil }

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "nvml-test-")
	if err != nil {
		panic(err)
	}
	if err := buildStub(dir); err != nil {
		_ = os.RemoveAll(dir)
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// dispenser is where a parser of the global option would be: at the module's name.
func dispenser(text string) *caddyfile.Dispenser {
	d := caddyfile.NewTestDispenser(text)
	d.Next()
	d.Next()
	return d
}

// meminfo writes an account of a system with so much memory.
func meminfo(t *testing.T, total, available gpu.Bytes) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "meminfo")
	text := "MemTotal:       " + kib(total) + " kB\nMemFree:          123 kB\nMemAvailable:   " + kib(available) + " kB\nHugePages_Total:       0\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
