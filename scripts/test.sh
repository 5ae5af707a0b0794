#!/usr/bin/env bash
# Runs make targets one after the other, says how long each took, and lists the tests that were skipped.
# Those joined by a plus run side by side.
#
#	scripts/test.sh TARGET TARGET+TARGET ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=.cache/tests
rm -rf "$results"
mkdir -p "$results"
times=()

report() {
	local status=$?
	if compgen -G "$results/*.json" >/dev/null; then
		printf '\n== all tests together\n'
		bin/gotestsum --format none --hide-summary failed,errors --raw-command -- cat "$results"/*.json || true
	fi
	printf '\n== time\n'
	printf '%s\n' "${times[@]}" "all: $SECONDS s"
	if [ "$status" -ne 0 ]; then
		printf '\nFAILED: make %s\n' "$stage"
	fi
}
trap report EXIT

for stage in "$@"; do
	printf '\n== make %s\n' "$stage"
	began=$SECONDS
	IFS=+ read -ra targets <<<"$stage"
	make --no-print-directory -j "${#targets[@]}" --output-sync=target "${targets[@]}"
	times+=("$stage: $((SECONDS - began)) s")
done
