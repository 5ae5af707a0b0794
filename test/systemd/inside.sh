#!/usr/bin/env bash
# Runs a program with a systemd of its own, with D-Bus and polkit, in namespaces that end with it:
#     GPU_BROKER_CADDY=$PWD/bin/caddy go test -exec "$PWD/test/systemd/inside.sh" -tags real ./test/systemd/...
# The systemd sees no unit of this host and changes nothing on it. Needs root.
set -euo pipefail

say() { echo "systemd: $*" >&2; }

if [ "${1-}" != --in ]; then
	for program in /lib/systemd/systemd dbus-daemon /usr/lib/polkit-1/polkitd; do
		if ! command -v "$program" >/dev/null; then
			say "$program is missing: apt-get install -y systemd dbus polkitd"
			exit 3
		fi
	done
	if [ "$(id -u)" -ne 0 ]; then
		say "this needs root: it makes namespaces and mounts"
		exit 3
	fi
	# A control group of its own, so that what systemd makes is easily found and removed.
	tree="$(mktemp -d)"
	mount -t cgroup2 none "$tree"
	group="$tree/gpu-broker-systemd-$$"
	mkdir "$group"
	# A group can be removed once the kernel has buried the last process in it.
	trap 'for _ in $(seq 50); do find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true; [ -d "$group" ] || break; sleep 0.1; done; umount "$tree"; rmdir "$tree"' EXIT
	code=0
	(
		echo "$BASHPID" >"$group/cgroup.procs"
		exec unshare --mount --cgroup --ipc --uts --kill-child --fork "$0" --in "$@"
	) || code=$?
	exit "$code"
fi
shift

# In a mount namespace of our own. The units and the bus live in a /run that only it sees.
mount --make-rprivate /
mount -t tmpfs tmpfs /run
export TMPDIR=/run/tmp # so that nothing is left of tests that break off, either
mkdir -m 1777 "$TMPDIR"
if mountpoint -q /sys/fs/cgroup; then umount -R /sys/fs/cgroup; fi
mount -t cgroup2 none /sys/fs/cgroup
mount --bind /etc /etc
mount -o remount,bind,ro /etc
mkdir -p /etc/polkit-1/rules.d 2>/dev/null || true
mount -t tmpfs -o mode=755 tmpfs /etc/polkit-1/rules.d

units=/run/units
mkdir -p "$units" /run/none /run/dbus
cat >"$units/default.target" <<'UNIT'
[Unit]
Requires=dbus.service
After=dbus.service
UNIT
cat >"$units/dbus.socket" <<'UNIT'
[Unit]
DefaultDependencies=no
[Socket]
ListenStream=/run/dbus/system_bus_socket
UNIT
cat >"$units/dbus.service" <<'UNIT'
[Unit]
DefaultDependencies=no
Requires=dbus.socket
After=dbus.socket
[Service]
Type=notify
NotifyAccess=main
ExecStart=/usr/bin/dbus-daemon --system --address=systemd: --nofork --nopidfile --systemd-activation
ExecReload=/usr/bin/dbus-send --print-reply --system --type=method_call --dest=org.freedesktop.DBus / org.freedesktop.DBus.ReloadConfig
UNIT
cat >"$units/polkit.service" <<'UNIT'
[Unit]
DefaultDependencies=no
[Service]
Type=dbus
BusName=org.freedesktop.PolicyKit1
ExecStart=/usr/lib/polkit-1/polkitd --no-debug
UNIT

log=/run/systemd.log
env -i PATH="$PATH" container=gpu-broker SYSTEMD_UNIT_PATH="$units" SYSTEMD_GENERATOR_PATH=/run/none SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/none \
	unshare --pid --fork --kill-child --mount-proc \
	/lib/systemd/systemd --system --unit=default.target --log-target=console --show-status=0 >"$log" 2>&1 &
unshare=$!
trap 'kill -9 "$unshare"; wait "$unshare" 2>/dev/null || true' EXIT
for _ in $(seq 200); do
	systemd="$(cat "/proc/$unshare/task/$unshare/children" 2>/dev/null || true)"
	if [ -n "$systemd" ] && busctl --system --timeout=1 status org.freedesktop.systemd1 >/dev/null 2>&1; then
		code=0
		GPU_BROKER_SYSTEMD_UNITS="$units" nsenter --target "${systemd// /}" --pid --mount --wd="$PWD" "$@" || code=$?
		exit "$code"
	fi
	sleep 0.05
done
say "it did not start within 10 s:"
cat "$log" >&2
exit 1
