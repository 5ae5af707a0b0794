#!/usr/bin/env bash
# Checks that each example is formatted as `caddy fmt` does it, and is a valid configuration.
#
#	scripts/examples.sh CADDY
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
caddy=$1

export TABBY_ADMIN_KEY=none # a placeholder without a value would be a fault

for example in examples/*/Caddyfile examples/servers/*/Caddyfile; do
	echo "$example"
	# It prints the whole file; what differs begins with + or -.
	if ! difference="$("$caddy" fmt --diff "$example")"; then
		grep '^[-+]' <<<"$difference"
		echo "run: $caddy fmt --overwrite $example" >&2
		exit 1
	fi
	if ! log="$("$caddy" validate --config "$example" 2>&1)"; then
		echo "$log" >&2
		exit 1
	fi
done
