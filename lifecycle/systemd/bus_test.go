package systemd_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	_ "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/systemd"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	unit     = "llama.service"
	unitPath = dbus.ObjectPath("/org/freedesktop/systemd1/unit/llama_2eservice")
	manager  = dbus.ObjectPath("/org/freedesktop/systemd1")
	iface    = "org.freedesktop.systemd1"
)

// bus is a D-Bus of the test's own: the real daemon.
type bus struct {
	path   string // of its socket
	config string
	daemon *exec.Cmd
}

func newBus(t *testing.T) *bus {
	t.Helper()
	dir := t.TempDir()
	b := &bus{path: filepath.Join(dir, "bus"), config: filepath.Join(dir, "bus.conf")}
	require.NoError(t, os.WriteFile(b.config, []byte(`<busconfig><type>session</type><listen>unix:path=`+b.path+`</listen><auth>EXTERNAL</auth>
		<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/></policy></busconfig>`), 0o600))
	b.start(t)
	t.Cleanup(func() { b.stop() })
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+b.path)
	return b
}

func (b *bus) start(t *testing.T) {
	t.Helper()
	b.daemon = exec.Command("dbus-daemon", "--config-file="+b.config, "--nofork", "--nopidfile", "--print-address")
	out, err := b.daemon.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, b.daemon.Start(), "dbus-daemon must be installed: apt-get install dbus-daemon")
	_, err = bufio.NewReader(out).ReadString('\n') // it prints its address once it listens
	require.NoError(t, err)
}

func (b *bus) stop() {
	_ = b.daemon.Process.Kill()
	_ = b.daemon.Wait() // it was killed
	_ = os.Remove(b.path)
}

// pretender is a systemd with one unit, on the bus.
type pretender struct {
	t       *testing.T
	conn    *dbus.Conn
	address string // where the unit's server listens while it runs

	mu      sync.Mutex
	unit    map[string]dbus.Variant
	service map[string]dbus.Variant
	server  net.Listener
	starts  int
	runs    byte // makes invocation IDs
	jobs    int
	calls   []string
	// start and stop say what comes of a job; an error refuses it.
	start, stop func() (string, *dbus.Error)
}

func newPretender(t *testing.T) *pretender {
	t.Helper()
	p := &pretender{t: t, address: lifecycletest.FreeAddress(t), service: map[string]dbus.Variant{}}
	p.unit = variants(map[string]any{"LoadState": "loaded", "LoadError": []any{"", ""}, "ActiveState": "inactive", "SubState": "dead", "InvocationID": []byte{}})
	p.start = func() (string, *dbus.Error) { p.run(); return "done", nil }
	p.stop = func() (string, *dbus.Error) { p.end("inactive", "success", 2, 15); return "done", nil }
	p.join()
	t.Cleanup(func() {
		p.conn.Close()
		p.end("inactive", "success", 1, 0)
	})
	return p
}

func variants(in map[string]any) map[string]dbus.Variant {
	out := map[string]dbus.Variant{}
	for k, v := range in {
		if pair, ok := v.([]any); ok { // (ss)
			out[k] = dbus.MakeVariant(struct{ A, B string }{pair[0].(string), pair[1].(string)})
			continue
		}
		out[k] = dbus.MakeVariant(v)
	}
	return out
}

// join takes systemd's name on the bus.
func (p *pretender) join() {
	p.t.Helper()
	conn, err := dbus.Connect(os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"))
	require.NoError(p.t, err)
	p.mu.Lock()
	p.conn = conn // before it is called
	p.mu.Unlock()
	require.NoError(p.t, conn.ExportMethodTable(map[string]any{
		"LoadUnit":  func(string) (dbus.ObjectPath, *dbus.Error) { p.note("LoadUnit"); return unitPath, nil },
		"Subscribe": func() *dbus.Error { p.note("Subscribe"); return nil },
		"StartUnit": func(name, mode string) (dbus.ObjectPath, *dbus.Error) {
			return p.job("StartUnit "+name+" "+mode, &p.start)
		},
		"StopUnit": func(name, mode string) (dbus.ObjectPath, *dbus.Error) {
			return p.job("StopUnit "+name+" "+mode, &p.stop)
		},
	}, manager, iface+".Manager"))
	require.NoError(p.t, conn.ExportMethodTable(map[string]any{
		"GetAll": func(of string) (map[string]dbus.Variant, *dbus.Error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			out := map[string]dbus.Variant{}
			from := p.unit
			if of == iface+".Service" {
				from = p.service
			}
			for k, v := range from {
				out[k] = v
			}
			return out, nil
		},
	}, unitPath, "org.freedesktop.DBus.Properties"))
	reply, err := conn.RequestName(iface, 0)
	require.NoError(p.t, err)
	require.Equal(p.t, dbus.RequestNameReplyPrimaryOwner, reply)
}

func (p *pretender) note(call string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, call)
}

// called counts the calls that begin with text.
func (p *pretender) called(text string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, call := range p.calls {
		if strings.HasPrefix(call, text) {
			n++
		}
	}
	return n
}

// job answers with a job, whose end it tells at once, often before the answer itself: both orders must do.
func (p *pretender) job(call string, does *func() (string, *dbus.Error)) (dbus.ObjectPath, *dbus.Error) {
	p.note(call)
	p.mu.Lock()
	p.jobs++
	id, come := uint32(p.jobs), *does
	p.mu.Unlock()
	path := dbus.ObjectPath(fmt.Sprintf("%s/job/%d", manager, id))
	result, refused := come()
	if refused != nil {
		return "", refused
	}
	if result != "" { // else it goes on for ever
		p.emit(manager, iface+".Manager.JobRemoved", id, path, unit, result)
	}
	return path, nil
}

// will says what comes of the jobs to come.
func (p *pretender) will(job *func() (string, *dbus.Error), come func() (string, *dbus.Error)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	*job = come
}

func (p *pretender) emit(path dbus.ObjectPath, name string, values ...any) {
	p.mu.Lock()
	conn := p.conn
	p.mu.Unlock()
	_ = conn.Emit(path, name, values...) // the bus may be down
}

// set changes the unit, and tells.
func (p *pretender) set(unit, service map[string]any) {
	p.mu.Lock()
	for k, v := range variants(unit) {
		p.unit[k] = v
	}
	for k, v := range variants(service) {
		p.service[k] = v
	}
	p.mu.Unlock()
	if service != nil {
		p.emit(unitPath, "org.freedesktop.DBus.Properties.PropertiesChanged", iface+".Service", variants(service), []string{})
	}
	if unit != nil {
		p.emit(unitPath, "org.freedesktop.DBus.Properties.PropertiesChanged", iface+".Unit", variants(unit), []string{})
	}
}

// run starts the unit's server.
func (p *pretender) run() {
	p.mu.Lock()
	p.runs++
	id := make([]byte, 16)
	id[0] = p.runs
	if p.server == nil {
		listener, err := net.Listen("tcp", p.address)
		if err != nil {
			panic(err)
		}
		p.server = listener
	}
	p.mu.Unlock()
	p.set(map[string]any{"ActiveState": "active", "SubState": "running", "InvocationID": id},
		map[string]any{"MainPID": uint32(4711), "ControlGroup": "/system.slice/" + unit, "Result": "success",
			"ExecMainCode": int32(0), "ExecMainStatus": int32(0), "ExecMainStartTimestamp": uint64(time.Now().UnixMicro())})
}

// end ends it.
func (p *pretender) end(state, result string, code, status int32) {
	p.mu.Lock()
	if p.server == nil {
		p.mu.Unlock()
		return
	}
	p.server.Close()
	p.server = nil
	p.mu.Unlock()
	p.set(map[string]any{"ActiveState": state, "SubState": "dead"},
		map[string]any{"MainPID": uint32(0), "ControlGroup": "", "Result": result, "ExecMainCode": code, "ExecMainStatus": status})
}

// open makes a driver of the unit.
func (p *pretender) open() (lifecycle.Supervisor, chan string) {
	p.t.Helper()
	return lifecycletest.Open(p.t, new(systemd.Lifecycle), `{"unit": "llama"}`, p.address)
}

func provision(t *testing.T, config string) (*systemd.Lifecycle, error) {
	t.Helper()
	return lifecycletest.Provision(t, new(systemd.Lifecycle), config)
}
