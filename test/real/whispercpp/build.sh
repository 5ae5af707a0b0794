#!/usr/bin/env bash
# Builds whisper.cpp's whisper-server into a cache outside the tree and prints the binary's path
# (alone on stdout; everything else goes to stderr, and nothing does when the binary is cached).
#
# The sources are in the npm package nodejs-whisper. The library that computes is llama.cpp's, which
# is there compiled (llamacpp/build.sh), so that this takes a quarter of a minute.
set -euo pipefail

name=whisper-server
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=SCRIPTDIR/../common.sh
source "$here/../common.sh"

npm_version=0.3.1
whisper_version=1.9.1
sources_sum=71ea2295456b691b91e459cdc97a46413d9ab80478f0e7370100449a45e75694a7f6237ac95473401142a954c659b93a59d8bde4d86fc1737316fb91edeacb5b

folder="$cache_dir/whispercpp-$whisper_version"

build() {
	need g++ node npm tar
	say "building (a quarter of a minute on two cores)"
	local ggml
	ggml="$(dirname "$("$here/../llamacpp/build.sh")")"
	npm_package nodejs-whisper "$npm_version" "$sources_sum" "$work/sources"

	local source="$work/sources/cpp/whisper.cpp" objects="$work/objects"
	echo "#define WHISPER_VERSION \"$whisper_version\"" >"$work/version.h"
	printf '%s\n' "$source"/src/whisper.cpp "$source"/examples/server/server.cpp \
		"$source"/examples/{common,common-whisper,grammar-parser}.cpp |
		compile "$objects" g++ -O1 -w -std=c++17 -DGGML_SHARED -DGGML_BACKEND_SHARED -DGGML_BACKEND_DL \
			-include "$work/version.h" "-I$source/include" "-I$source/src" "-I$source/examples" "-I$ggml/include"
	# shellcheck disable=SC2016 # $ORIGIN is for the loader
	g++ -o "$work/whisper-server" "$objects"/*.o -L"$ggml" -l:libggml.v0.4.0.so -l:libggml-base.so \
		-Wl,-rpath,'$ORIGIN' -pthread -s >&2

	# The server looks for its libraries beside itself.
	cp "$ggml"/libggml*.so "$folder/"
	mv "$work/whisper-server" "$folder/whisper-server"
}

build_once "$folder/whisper-server" build
echo "$folder/whisper-server"
