#!/usr/bin/env bash
# Runs a test program by one of the inside.sh, in namespaces with a daemon of its own. Where this machine can't make
# these, the program runs as it is, and its tests are skipped with the reason, which the list at the end of `make test` shows:
#     go test -exec "$PWD/test/inside.sh $PWD/test/systemd/inside.sh" -tags real ./test/systemd/...
set -euo pipefail
inside="$1"
shift
if why="$("$inside" true 2>&1)"; then
	exec "$inside" "$@"
fi
GPU_BROKER_CANNOT="${why:-its namespaces can not be made here}" exec "$@"
