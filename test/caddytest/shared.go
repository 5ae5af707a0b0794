package caddytest

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Patience bounds every wait of these tests: past it something hangs.
const Patience = 60 * time.Second

// builtDir is the folder of what the tests of a package have built.
var builtDir = filepath.Join(os.TempDir(), fmt.Sprintf("gpu-broker-caddytest-%d", os.Getpid()))

// Binary builds Caddy once for all tests of a package; $GPU_BROKER_CADDY names one that is built already.
var Binary = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("GPU_BROKER_CADDY"); path != "" {
		return path, nil
	}
	return build("caddy")
})

// Modelserver builds the pretending server once, as a program that the broker can start.
var Modelserver = sync.OnceValues(func() (string, error) { return build("modelserver") })

func build(name string) (string, error) {
	path := filepath.Join(builtDir, name)
	out, err := exec.Command("go", "build", "-o", path, "github.com/gpu-broker/caddy-gpu-broker/cmd/"+name).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", name, err, out)
	}
	return path, nil
}

// Exit ends the tests of a package; what they have built goes.
func Exit(code int) {
	_ = os.RemoveAll(builtDir)
	os.Exit(code)
}

// ports are handed out once, and from below those that the system gives to sockets by itself: Caddy shares a port
// with whoever else has it, and a test would speak to another's site. No model server has its default port among them.
var ports atomic.Int64

// FreePort is a port that no other test of this process has. Packages that are tested at the same time begin far apart.
func FreePort(t testing.TB) int {
	t.Helper()
	const first, count, apart = 13_000, 17_000, 10_507
	for range count {
		port := first + (os.Getpid()%count*apart+int(ports.Add(1)))%count
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
	t.Fatal("no free port")
	return 0
}

// FreeAddr is an address with such a port.
func FreeAddr(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", FreePort(t))
}

// PortRange is a range of such ports.
func PortRange(t testing.TB) string {
	t.Helper()
	const count = 4
	for {
		first, last := FreePort(t), 0
		for range count - 1 {
			last = FreePort(t)
		}
		if last-first == count-1 { // else others were given out meanwhile
			return fmt.Sprintf("%d-%d", first, last)
		}
	}
}

// Until polls a condition that has no signal of its own.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(Patience); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s in vain until %s", Patience, what)
		}
	}
}

// CAFile is the certificate of the local authority of a Caddy with its data in a folder.
func CAFile(dir string) string {
	return filepath.Join(dir, "data", "caddy", "pki", "authorities", "local", "root.crt")
}

// CA waits for that certificate.
func CA(t testing.TB, dir string) *x509.CertPool {
	t.Helper()
	pool := x509.NewCertPool()
	Until(t, "Caddy has made its local CA", func() bool {
		pem, err := os.ReadFile(CAFile(dir))
		return err == nil && pool.AppendCertsFromPEM(pem)
	})
	return pool
}

// CheckLog looks for what must not stand in a Caddy's log, and shows what matters of it if the test has failed.
func CheckLog(t testing.TB, file string) {
	t.Helper()
	log, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, bad := range []string{"panic:", `"msg":"bug"`} {
		if at := bytes.Index(log, []byte(bad)); at >= 0 {
			t.Errorf("caddy's log says %s:\n%s", bad, log[at:min(len(log), at+8000)])
		}
	}
	for _, race := range races(log) {
		t.Errorf("caddy raced:\n%s", race)
	}
	if t.Failed() {
		var ours []string
		for line := range strings.Lines(string(log)) {
			if strings.Contains(line, "gpu_broker") || !strings.Contains(line, `"level":"info"`) {
				ours = append(ours, line)
			}
		}
		t.Logf("caddy's log:\n%s", strings.Join(ours[max(0, len(ours)-100):], ""))
	}
}

// races are the data races in a log of a Caddy that was built with the race
// detector, but for one of Caddy's own (2.11.9): a reverse_proxy with
// stream_close_delay notes its timer when it is cleaned up, while a request of
// the earlier configuration copies the handler, whose methods have value receivers.
func races(log []byte) (found []string) {
	for _, block := range strings.Split(string(log), "==================") {
		if strings.Contains(block, "DATA RACE") && !strings.Contains(block, "reverseproxy.(*Handler).cleanupConnections()") {
			found = append(found, block)
		}
	}
	return found
}
