package systemd

import (
	"errors"
	"fmt"

	"github.com/godbus/dbus/v5"

	"github.com/gpu-broker/caddy-gpu-broker/internal/supervised"
)

// action is what polkit must allow.
const action = "org.freedesktop.systemd1.manage-units"

// ref is a unit, and whose it is.
type ref struct {
	name string
	user bool
}

func (r ref) String() string { return r.name }

// systemctl is a command for people.
func (r ref) systemctl(verb string) string {
	return "systemctl" + r.option() + " " + verb + " " + r.name
}

// journal is the command that shows what the unit has printed.
func (r ref) journal() string { return "journalctl" + r.option() + " -u " + r.name }

func (r ref) option() string {
	if r.user {
		return " --user"
	}
	return ""
}

// explained says what an error of D-Bus means, and what to do. doing is such as "starting".
func explained(err error, doing string, unit ref) error {
	var fault dbus.Error
	if !errors.As(err, &fault) {
		return fmt.Errorf("%s unit %s: %w", doing, unit, err)
	}
	said := supervised.Line(fault.Error())
	switch fault.Name {
	case "org.freedesktop.DBus.Error.AccessDenied", "org.freedesktop.DBus.Error.AuthFailed",
		"org.freedesktop.DBus.Error.InteractiveAuthorizationRequired", "org.freedesktop.PolicyKit1.Error.NotAuthorized":
		return fmt.Errorf("%s unit %s is not allowed to %s: polkit must grant the action %s for this unit: "+
			"install packaging/polkit/50-gpu-broker.rules with the unit named in it, see docs/install.md, or use a unit of this user, with `user` (%s)", doing, unit, supervised.WhoAmI(), action, said)
	case "org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner", "org.freedesktop.DBus.Error.Spawn.ChildExited":
		return fmt.Errorf("%s unit %s: systemd is not on this bus: does this host run it, and is it reached from in here? (%s)", doing, unit, said)
	case "org.freedesktop.systemd1.NoSuchUnit":
		return fmt.Errorf("%s unit %s: systemd knows no such unit: look at `%s` (%s)", doing, unit, unit.systemctl("cat"), said)
	case "org.freedesktop.systemd1.UnitMasked":
		return fmt.Errorf("%s unit %s: it is masked: undo that with `%s` (%s)", doing, unit, unit.systemctl("unmask"), said)
	}
	return fmt.Errorf("%s unit %s: systemd answers %s: %s", doing, unit, fault.Name, said)
}

// unloadable says why a unit can't be started, if it can't.
func (v *view) unloadable(unit ref) error {
	switch v.load {
	case "not-found":
		return fmt.Errorf("systemd knows no unit %s: write it, then `systemctl%s daemon-reload`", unit, unit.option())
	case "masked":
		return fmt.Errorf("unit %s is masked: undo that with `%s`", unit, unit.systemctl("unmask"))
	case "bad-setting", "error":
		return fmt.Errorf("unit %s can't be read: %s: look at `%s`", unit, v.loadError, unit.systemctl("status"))
	}
	return nil
}

// came says what a job's result means, nil if it is done.
func came(result, doing string, unit ref, v *view) error {
	var text string
	switch result {
	case "done":
		return nil
	case "failed":
		text = v.end.String()
	case "timeout":
		text = "it took longer than the unit allows (JobTimeoutSec=)"
	case "canceled":
		text = "somebody else has asked systemd for the opposite, or cancelled it"
	case "dependency":
		text = "a unit that it requires has failed"
	case "skipped":
		text = "systemd left it out: look at the unit's conditions"
	case "invalid", "assert", "unsupported":
		text = "the unit does not allow it (an assertion of it, or RefuseManualStart=)"
	default:
		text = "see the journal"
	}
	return fmt.Errorf("%s unit %s: systemd says %q: %s; see `%s`", doing, unit, supervised.Line(result), text, unit.journal())
}
