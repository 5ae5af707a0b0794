#!/usr/bin/env bash
# Runs a program in namespaces in which it can start a Docker daemon of its own:
#     go test -exec "$PWD/test/docker/inside.sh" -tags real ./test/docker/...
# The daemon pulls nothing, has no network, ends with the namespaces and leaves nothing behind. Needs root.
set -euo pipefail

say() { echo "docker: $*" >&2; }

if [ "${1-}" != --in ]; then
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
	# A control group of its own, so that what the daemon makes is easily found and removed.
	tree="$(mktemp -d)"
	mount -t cgroup2 none "$tree"
	group="$tree/gpu-broker-docker-$$"
	mkdir "$group"
	# A group can be removed once the kernel has buried the last process in it.
	trap 'for _ in $(seq 50); do find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true; [ -d "$group" ] || break; sleep 0.1; done; umount "$tree"; rmdir "$tree"' EXIT
	code=0
	(
		echo "$BASHPID" >"$group/cgroup.procs"
		exec unshare --mount --cgroup --ipc --uts --net --pid --kill-child --mount-proc --fork "$0" --in "$@"
	) || code=$?
	exit "$code"
fi
shift

# In namespaces of our own. What the daemon keeps is in a /run that only it sees.
mount --make-rprivate /
mount -t tmpfs tmpfs /run
if mountpoint -q /sys/fs/cgroup; then umount -R /sys/fs/cgroup; fi
mount -t cgroup2 none /sys/fs/cgroup
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
