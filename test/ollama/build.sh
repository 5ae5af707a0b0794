#!/usr/bin/env bash
# Builds ollama from its Go module into a cache outside the tree and prints the binary's path
# (alone on stdout; everything else goes to stderr, and nothing does when the binary is cached).
#
#   build.sh          install what the build needs, build, print the path
#   build.sh --deps   only see to what the build needs (nothing, when the binary is cached)
#
# The version is the one pinned in build/go.mod. Exit status 3: something must be installed first
# and we may not do so ourselves; the line to run is printed.
set -euo pipefail

module_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/build" && pwd)"
version="$(awk '$1 == "github.com/ollama/ollama" { print $2; exit }' "$module_dir/go.mod")"
cache_dir="${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME}/.cache}/caddy-gpu-broker/ollama-${version:?no ollama version in build/go.mod}"
binary="$cache_dir/ollama"

say() { echo "ollama build: $*" >&2; }

has_header() { echo "#include <$1>" | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1; }

missing_packages() {
	if ! command -v "${CXX:-g++}" >/dev/null; then
		echo g++
	fi
	has_header nlohmann/json.hpp || echo nlohmann-json3-dev
	has_header stb/stb_image.h || echo libstb-dev
}

see_to_packages() {
	local packages
	packages="$(missing_packages | tr '\n' ' ')"
	packages="${packages% }"
	if [ -z "$packages" ]; then
		return
	fi
	if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
		say "these Debian packages are missing: $packages. Install them and run this again:"
		echo "    sudo apt-get update && sudo apt-get install -y $packages" >&2
		exit 3
	fi
	say "installing $packages"
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq >&2
	# shellcheck disable=SC2086 # a list of names
	apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 $packages >&2
}

build() {
	local malgo started=$SECONDS
	say "building ollama $version (some minutes on two cores)"
	cd "$module_dir"
	export GOWORK=off CGO_ENABLED=1
	go mod download github.com/gen2brain/malgo
	malgo="$(go list -m -f '{{.Dir}}' github.com/gen2brain/malgo)"
	mkdir -p "$cache_dir/include/miniaudio"
	ln -sf "$malgo/miniaudio.h" "$cache_dir/include/miniaudio/miniaudio.h"

	# No -g: debug information of the C++ half only costs time and room.
	CGO_CFLAGS="-O2" CGO_CXXFLAGS="-O2 -I/usr/include/stb -I$cache_dir/include" \
		go build -trimpath -ldflags "-s -w -X github.com/ollama/ollama/version.Version=${version#v}" \
		-o "$unfinished" github.com/ollama/ollama >&2
	mv -f "$unfinished" "$binary"
	say "took $((SECONDS - started)) s: $binary"
}

if [ ! -x "$binary" ]; then
	mkdir -p "$cache_dir"
	# One builder at a time; whoever waited finds the binary there.
	exec 9>"$cache_dir/lock"
	flock 9
	if [ ! -x "$binary" ]; then
		see_to_packages
		if [ "${1:-}" != --deps ]; then
			unfinished="$cache_dir/ollama.unfinished.$$"
			trap 'rm -f "$unfinished"' EXIT
			build
		fi
	fi
fi
if [ "${1:-}" != --deps ]; then
	echo "$binary"
fi
