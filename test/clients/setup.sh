#!/usr/bin/env bash
# Installs what package.json names into a cache outside the tree and prints the path of that node_modules
# (alone on stdout; everything else goes to stderr, and nothing does when it is cached).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

files=(package.json package-lock.json)
cache="${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME}/.cache}/caddy-gpu-broker"
installed="$cache/clients-$(sha256sum "${files[@]}" | sha256sum | cut -c1-16)"

say() { echo "node clients: $*" >&2; }

for program in node npm; do
	if ! command -v "$program" >/dev/null; then
		say "$program is missing. Install Node 20 or later with npm and run this again."
		exit 3
	fi
done
if [ ! -d "$installed" ]; then
	mkdir -p "$cache"
	# One installer at a time; whoever waited finds the folder there.
	exec 9>"$cache/clients.lock"
	flock 9
	if [ ! -d "$installed" ]; then
		started=$SECONDS
		staging="$(mktemp -d -p "$cache")"
		trap 'rm -rf "$staging"' EXIT
		cp "${files[@]}" "$staging/"
		(cd "$staging" && npm ci --omit=dev --ignore-scripts --no-audit --no-fund >&2)
		mv "$staging" "$installed"
		say "took $((SECONDS - started)) s: $installed"
	fi
fi
echo "$installed/node_modules"
