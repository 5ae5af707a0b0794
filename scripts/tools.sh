#!/usr/bin/env bash
# Sees to it that what the tests need is there. As root it installs Debian packages;
# else it prints the line that does, and stops.
set -euo pipefail

if ! command -v go >/dev/null; then
	echo "Go is missing: install version 1.26 or later from go.dev" >&2
	exit 3
fi

missing=()
PATH="$PATH:/usr/sbin:/sbin" # where daemons are, also for whoever has no use for them
need_program() { command -v "$1" >/dev/null || missing+=("$2"); }
need_file() { [ -e "$1" ] || missing+=("$2"); }
need_header() { echo "#include <$1>" | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1 || missing+=("$2"); }

need_program gcc gcc
need_program g++ g++
need_program make make
need_program node nodejs
need_program npm npm
need_program curl curl
# A real llama-server is built from a bundle of git.
need_program git git
# A real ollama is built for the tests; its module lacks these headers.
need_header nlohmann/json.hpp nlohmann-json3-dev
need_header stb/stb_image.h libstb-dev
# The lifecycle systemd is tested with a real bus.
need_program dbus-daemon dbus-daemon
# It and docker are also tested with a real systemd and dockerd of their own, which only root can run (in namespaces, beside those of the host).
if [ "$(id -u)" -eq 0 ]; then
	need_file /usr/share/dbus-1/system.conf dbus
	need_program /lib/systemd/systemd systemd
	need_program /usr/lib/polkit-1/polkitd polkitd
	need_program dockerd docker.io
	need_program runc runc
	need_program containerd containerd
	need_program ip iproute2
fi

if [ ${#missing[@]} -eq 0 ]; then
	exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
	echo "The tests need packages that are missing. Install them and run this again:" >&2
	echo "    sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
	exit 3
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 "${missing[@]}"
