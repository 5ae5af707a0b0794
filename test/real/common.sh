# For the build scripts beside this file: sourced, not run.

cache_dir="${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME}/.cache}/caddy-gpu-broker"

say() { echo "$name build: $*" >&2; }

# Exit status 3: something must be installed first, and we do not do so ourselves.
need() {
	local program missing=
	for program in "$@"; do
		command -v "$program" >/dev/null || missing+=" $program"
	done
	if [ -n "$missing" ]; then
		say "these programs are missing:$missing. Install them (scripts/tools.sh does) and run this again."
		exit 3
	fi
	if [ "$(uname -sm)" != "Linux x86_64" ]; then
		say "want Linux on x86-64, found $(uname -sm): the libraries that the build starts from are made for that alone."
		exit 3
	fi
}

# npm_package NAME VERSION SHA512 FOLDER unpacks one npm package, without those it depends on.
npm_package() {
	local download archive
	download="$(mktemp -d -p "$cache_dir")"
	archive="$download/$(npm pack --silent --pack-destination "$download" "$1@$2")"
	if ! echo "$3  $archive" | sha512sum --check --status; then
		say "$1 $2 is not the package that was tried: want sha512 $3, found $(sha512sum "$archive" | cut -d' ' -f1)"
		exit 1
	fi
	mkdir -p "$4"
	tar -xzf "$archive" -C "$4" --strip-components 1
	rm -rf "$download"
}

# compile OUTPUT_FOLDER COMPILER FLAG… reads names of source files and compiles them, one job a core.
compile() {
	local output="$1"
	shift
	mkdir -p "$output"
	xargs -P "$(nproc)" -I{} bash -c 'out="$0/$(basename "$1").o"; shift; "$@" -o "$out"' "$output" {} "$@" -c {} >&2
}

# build_once FILE FUNCTION: one builder at a time; whoever waited finds the file there.
build_once() {
	if [ ! -e "$1" ]; then
		mkdir -p "$(dirname "$1")"
		exec 9>"$(dirname "$1").lock"
		flock 9
		if [ ! -e "$1" ]; then
			local started=$SECONDS
			work="$(mktemp -d -p "$cache_dir")"
			trap 'rm -rf "$work"' EXIT
			"$2"
			say "took $((SECONDS - started)) s: $1"
		fi
		flock -u 9
	fi
}
