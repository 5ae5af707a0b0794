#!/usr/bin/env bash
# Builds Docker's model runner from its Go module into a cache outside the tree and prints the
# binary's path (alone on stdout; everything else goes to stderr, and nothing does when the binary is
# cached). It runs llama.cpp's server, which llamacpp/build.sh builds.
#
# The version is the one pinned in build/go.mod, and so is the Go that it needs.
set -euo pipefail

name=model-runner
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=SCRIPTDIR/../common.sh
source "$here/../common.sh"

version="$(awk '/github.com\/docker\/model-runner v/ { print $NF; exit }' "$here/build/go.mod")"
GOTOOLCHAIN="$(awk '$1 == "toolchain" { print $2; exit }' "$here/build/go.mod")"
folder="$cache_dir/modelrunner-${version:?no version in build/go.mod}"

build() {
	say "building (half a minute on two cores)"
	export GOTOOLCHAIN GOWORK=off GOFLAGS=-mod=readonly CGO_ENABLED=0
	go -C "$here/build" build -trimpath -ldflags "-s -w" -o "$work/model-runner" github.com/docker/model-runner >&2
	mv "$work/model-runner" "$folder/model-runner"
}

build_once "$folder/model-runner" build
echo "$folder/model-runner"
