#!/usr/bin/env bash
# Runs a program in namespaces in which it can start a Docker daemon of its own:
#     GPU_BROKER_CADDY=$PWD/bin/caddy go test -exec "$PWD/test/docker/inside.sh" -tags real ./test/docker/...
# The daemon pulls nothing, has no network, ends with the namespaces and leaves nothing behind. Needs root.
set -euo pipefail

say() { echo "docker: $*" >&2; }

# The hierarchies of control groups of version 1, by their controllers; none where memory is version 2's, as Docker then wants that alone.
old=()
if grep -qE '^[0-9]+:memory:' /proc/self/cgroup; then
	mapfile -t old < <(cut -d: -f2 /proc/self/cgroup | grep .)
fi
# Mounts such a hierarchy.
mount_old() {
	mkdir "$2"
	case "$1" in
	name=*) mount -t cgroup -o "none,$1" none "$2" ;;
	*) mount -t cgroup -o "$1" none "$2" ;;
	esac
}

if [ "${1-}" != --in ] && [ "${1-}" != --leaf ]; then
	for program in dockerd containerd runc; do
		if ! command -v "$program" >/dev/null; then
			say "$program is missing: apt-get install -y --no-install-recommends docker.io"
			exit 3
		fi
	done
	if [ "$(id -u)" -ne 0 ]; then
		say "this needs root: it makes namespaces and mounts"
		exit 3
	fi
	# Control groups of its own, so that what the daemon makes is easily found and removed.
	tree="$(mktemp -d)"
	group="gpu-broker-docker-$$"
	# A group can be removed once the kernel has buried the last process in it.
	clean() {
		for _ in $(seq 50); do
			find "$tree"/*/"$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
			compgen -G "$tree/*/$group" >/dev/null || break
			sleep 0.1
		done
		for hierarchy in "$tree"/*; do
			umount "$hierarchy"
			rmdir "$hierarchy"
		done
		rmdir "$tree"
	}
	trap clean EXIT
	mkdir "$tree/unified"
	mount -t cgroup2 none "$tree/unified"
	for hierarchy in "${old[@]}"; do mount_old "$hierarchy" "$tree/${hierarchy#name=}"; done
	for hierarchy in "$tree"/*; do
		mkdir "$hierarchy/$group"
		for needed in cpuset.cpus cpuset.mems; do
			if [ -e "$hierarchy/$needed" ]; then cat "$hierarchy/$needed" >"$hierarchy/$group/$needed"; fi
		done
	done
	code=0
	(
		for hierarchy in "$tree"/*; do echo "$BASHPID" >"$hierarchy/$group/cgroup.procs"; done
		exec unshare --mount --cgroup --ipc --uts --net "$0" --leaf "$tree/unified/$group/leaf" "$@"
	) || code=$?
	exit "$code"
fi
if [ "$1" = --leaf ]; then
	# In version 2 a group with processes of its own gives no controllers to those below it.
	mkdir "$2"
	echo $$ >"$2/cgroup.procs"
	shift 2
	exec unshare --pid --kill-child --mount-proc --fork "$0" --in "$@"
fi
shift

# In namespaces of our own. What the daemon keeps is in a /run that only it sees.
mount --make-rprivate /
mount -t tmpfs tmpfs /run
export TMPDIR=/run/tmp # so that nothing is left of tests that break off, either
mkdir -m 1777 "$TMPDIR"
umount -a -t cgroup,cgroup2 # what is mounted elsewhere, too: containerd takes the first that it finds
if mountpoint -q /sys/fs/cgroup; then umount -R /sys/fs/cgroup; fi
if [ ${#old[@]} -eq 0 ]; then
	mount -t cgroup2 none /sys/fs/cgroup
	for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
		echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control || true # some are not to be had
	done
else
	mount -t tmpfs tmpfs /sys/fs/cgroup
	for hierarchy in "${old[@]}"; do mount_old "$hierarchy" "/sys/fs/cgroup/${hierarchy#name=}"; done
fi
ip link set lo up

export DOCKER_HOST=unix:///run/engine/docker.sock
mkdir -p /run/engine
# The tests start the daemon by this, and start it anew.
cat >/run/engine/start <<SCRIPT
#!/usr/bin/env bash
exec dockerd --data-root /run/engine/data --exec-root /run/engine/run --pidfile /run/engine/pid --live-restore \\
	--log-level error --storage-driver vfs --iptables=false --bridge=none --ip-forward=false --ip-masq=false --host "$DOCKER_HOST"
SCRIPT
chmod +x /run/engine/start
export GPU_BROKER_DOCKERD=/run/engine/start
# Not exec: the first process of a PID namespace has to bury the orphans of the others.
"$@"
