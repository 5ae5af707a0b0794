#!/usr/bin/env bash
# Runs the end-to-end tests while their process, with the clients and the model servers in it, stands still for STALL seconds
# after every RUN seconds, as on a crowded machine. What fails takes a slow machine for a fault.
#
#	make stalls STALL=1.2 RUN=2 ARGS='-test.run TestH6'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../test/e2e"
tests=$(mktemp)
trap 'rm -f "$tests"' EXIT
go test -c -o "$tests" .
# shellcheck disable=SC2086
"$tests" -test.parallel 8 -test.skip '^(TestAlone|TestSoak)' -test.timeout 30m ${ARGS:-} &
pid=$!
while sleep "${RUN:-2}" && kill -STOP $pid 2>/dev/null; do
	sleep "${STALL:-1.2}"
	kill -CONT $pid
done
wait $pid
