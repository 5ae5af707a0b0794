#!/usr/bin/env bash
# Installs the Node client with OpenAI's SDK into a cache outside the tree and prints its folder
# (alone on stdout; everything else goes to stderr, and nothing does when it is cached).
# The folder is a copy of client/ with its node_modules, named by what is in client/.
set -euo pipefail

client_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/client" && pwd)"
cache_dir="${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME}/.cache}/caddy-gpu-broker"
files=(package.json package-lock.json chat.mjs)
key="$(cd "$client_dir" && sha256sum "${files[@]}" | sha256sum | cut -c1-16)"
installed="$cache_dir/client-$key"

say() { echo "node client: $*" >&2; }

if [ ! -d "$installed" ]; then
	for program in node npm; do
		if ! command -v "$program" >/dev/null; then
			say "$program is missing. Install Node 20 or later with npm and run this again."
			exit 3
		fi
	done
	mkdir -p "$cache_dir"
	# One installer at a time; whoever waited finds the folder there.
	exec 9>"$cache_dir/client.lock"
	flock 9
	if [ ! -d "$installed" ]; then
		started=$SECONDS
		staging="$(mktemp -d -p "$cache_dir")"
		trap 'rm -rf "$staging"' EXIT
		(cd "$client_dir" && cp "${files[@]}" "$staging/")
		(cd "$staging" && npm ci --omit=dev --ignore-scripts --no-audit --no-fund >&2)
		mv "$staging" "$installed"
		say "took $((SECONDS - started)) s: $installed"
	fi
fi
echo "$installed"
