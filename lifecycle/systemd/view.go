package systemd

import (
	"encoding/hex"
	"fmt"
	"syscall"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/gpu-broker/caddy-gpu-broker/internal/supervised"
)

// properties are some of a unit's, by name.
type properties map[string]dbus.Variant

// text, number and the like return a property, or its type's zero if it is not there or of another type.
func (p properties) text(name string) string {
	s, _ := p[name].Value().(string)
	return s
}

func (p properties) number(name string) int64 {
	switch v := p[name].Value().(type) {
	case uint32:
		return int64(v)
	case int32:
		return int64(v)
	case uint64:
		return int64(v)
	}
	return 0
}

func (p properties) id(name string) string {
	b, _ := p[name].Value().([]byte)
	return hex.EncodeToString(b)
}

// view is what systemd says of a unit at one moment.
type view struct {
	load, loadError string // LoadState: loaded, not-found, masked, bad-setting…
	active, sub     string // ActiveState and SubState
	run             string // InvocationID
	pid             int    // MainPID
	group           string // ControlGroup; empty: it has none now
	started         time.Time
	end             exit
	unmet           bool // the unit's conditions kept the latest start from happening
}

// readUnit reads the properties of a unit as such.
func (v *view) readUnit(p properties) {
	v.load, v.active, v.sub, v.run = p.text("LoadState"), p.text("ActiveState"), p.text("SubState"), p.id("InvocationID")
	if fault, _ := p["LoadError"].Value().([]any); len(fault) == 2 {
		text, _ := fault[1].(string)
		v.loadError = supervised.Line(text)
	}
}

// readService reads the properties of a service.
func (v *view) readService(p properties) {
	v.pid, v.group = int(p.number("MainPID")), p.text("ControlGroup")
	if us := p.number("ExecMainStartTimestamp"); us > 0 {
		v.started = time.UnixMicro(us)
	}
	v.end.read(p)
}

// alive reports whether something of the unit may have memory: also while it
// starts or stops, but not while systemd waits before it starts it again.
func (v *view) alive() bool {
	switch v.active {
	case "", "inactive", "failed", "maintenance":
		return false
	}
	return !v.waits()
}

// waits reports whether systemd waits before it starts the unit again, by Restart=.
func (v *view) waits() bool {
	return v.active == "activating" && (v.sub == "auto-restart" || v.sub == "auto-restart-queued")
}

// exit is how a service ended, as far as it is known.
type exit struct {
	result string // Result: success, exit-code, signal, oom-kill…
	code   int64  // ExecMainCode: CLD_EXITED, CLD_KILLED, CLD_DUMPED; 0: not known
	status int64  // ExecMainStatus: exit status or signal
}

// The values of ExecMainCode, which are those of waitid(2).
const (
	exited = 1
	killed = 2
	dumped = 3
)

// read takes what p says. systemd forgets a unit without trouble that has
// ended, and then says nothing: what is known then stays.
func (e *exit) read(p properties) {
	if result := p.text("Result"); result != "" && (result != "success" || e.result == "") {
		e.result = result
	}
	if code := p.number("ExecMainCode"); code != 0 {
		e.code, e.status = code, p.number("ExecMainStatus")
	}
}

// String is for people.
func (e exit) String() string {
	var how string
	switch e.code {
	case exited:
		how = fmt.Sprintf("exit status %d", e.status)
	case killed:
		how = fmt.Sprintf("killed by signal %d (%v)", e.status, syscall.Signal(e.status))
	case dumped:
		how = fmt.Sprintf("killed by signal %d (%v), core dumped", e.status, syscall.Signal(e.status))
	}
	why := map[string]string{
		"success":         "it ended by itself, or somebody stopped it",
		"oom-kill":        "the kernel killed it for lack of RAM: systemd says oom-kill",
		"watchdog":        "its watchdog heard nothing from it",
		"timeout":         "it took longer to start or stop than the unit allows: systemd says timeout",
		"start-limit-hit": "it was started too often: write StartLimitIntervalSec=0 into the unit",
		"resources":       "systemd lacked something that the unit asks for: systemd says resources",
	}[e.result]
	switch e.result {
	case "", "success":
	case "exit-code", "signal", "core-dump":
		if how == "" { // the main process did not get so far
			why = "a command of the unit other than the server itself failed: systemd says " + e.result
		}
	default:
		if why == "" {
			why = "systemd says " + supervised.Line(e.result)
		}
	}
	if why == "" && how == "" {
		why = "it ended"
	}
	switch {
	case how == "":
		return why
	case why == "":
		return how
	}
	return how + "; " + why
}
