#!/usr/bin/env bash
# Builds llama.cpp's llama-server into a cache outside the tree and prints the binary's path (alone
# on stdout; everything else goes to stderr, and nothing does when the binary is cached).
#
# npm has both halves of one llama.cpp release: its sources (node-llama-cpp carries them as a git
# bundle, for builds without a network) and its libraries, compiled. So only the server and what
# reads pictures are compiled here: half a minute on two cores.
set -euo pipefail

name=llama-server
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=SCRIPTDIR/../common.sh
source "$here/../common.sh"

npm_version=3.21.1 # llama.cpp v0.4.0
sources_sum=13737412fd956b4c33c9dbd7605c0cf47bf2a34ecfa168edf13ffd18c738dc2bedf18915fcd53fb5852010c0b582b4cfbf6a3d3d18d08b41b759be4ffdac2232
libraries_sum=4e8b63e914c3306a371682b6c8d51acffa069990f4a2502a4eb465b855169aed245b68bd4cecc7496d0e5820221a4cd10955f45ac5360b2510a3f5b6358b5d3c

folder="$cache_dir/llamacpp-$npm_version"

# together FILE SOURCE… writes one source file that reads the others.
together() {
	printf '#include "%s"\n' "${@:2}" >"$1"
}

build() {
	need g++ gcc git node npm tar
	say "building (half a minute on two cores)"
	npm_package node-llama-cpp "$npm_version" "$sources_sum" "$work/sources"
	npm_package @node-llama-cpp/linux-x64 "$npm_version" "$libraries_sum" "$work/libraries"
	git clone --quiet --config advice.detachedHead=false "$work/sources/llama/gitRelease.bundle" "$work/llama.cpp" >&2

	local source="$work/llama.cpp" generated="$work/generated" objects="$work/objects"
	# The definitions must be those that the libraries were compiled with: some change a class.
	local flags=(
		-O0 -w -std=c++17 -DLLAMA_SHARED -DGGML_SHARED -DGGML_BACKEND_SHARED -DGGML_BACKEND_DL
		-DLLAMA_SUBPROCESS -DMTMD_VIDEO
		-DCPPHTTPLIB_FORM_URL_ENCODED_PAYLOAD_MAX_LENGTH=1048576 -DCPPHTTPLIB_LISTEN_BACKLOG=512
		-DCPPHTTPLIB_REQUEST_URI_MAX_LENGTH=32768 -DCPPHTTPLIB_TCP_NODELAY=1
		"-I$generated" "-I$source" "-I$source/include" "-I$source/ggml/include" "-I$source/common"
		"-I$source/vendor" "-I$source/vendor/hash" "-I$source/tools/server" "-I$source/tools/mtmd"
	)

	# A server without its web page: the tool that packs the page makes an empty one.
	mkdir -p "$generated"
	g++ -O0 -std=c++17 -o "$work/embed" "$source/tools/ui/embed.cpp" >&2
	"$work/embed" "$generated/ui.cpp" "$generated/ui.h" >&2

	# Some dozens of small files that all read the same large headers take a quarter of the time when
	# the compiler reads them as one. Two lots of the server, for two cores.
	together "$generated/server1.cpp" "$source"/tools/server/server-[cst]*.cpp
	together "$generated/server2.cpp" "$source"/tools/server/{main,server}.cpp "$source"/tools/server/server-[!cst]*.cpp
	together "$generated/pictures1.cpp" "$source"/tools/mtmd/{clip,mtmd,mtmd-audio,mtmd-image}.cpp
	together "$generated/pictures2.cpp" "$source"/tools/mtmd/models/*.cpp
	printf '%s\n' "$generated"/*.cpp "$source"/tools/mtmd/mtmd-helper{,-gen}.cpp "$source/vendor/hash/hash.cpp" |
		sort -r | compile "$objects" g++ "${flags[@]}"
	printf '%s\n' "$source"/vendor/hash/xxhash/xxhash.c "$source"/vendor/hash/sha256/sha256.c |
		compile "$objects" gcc -O0 -w "-I$source/vendor/hash"
	echo "$source/vendor/hash/sha1/sha1.c" | compile "$objects" g++ -x c++ -O0 -w "-I$source/vendor/hash"

	local libraries="$work/libraries/bins/linux-x64"
	# shellcheck disable=SC2016 # $ORIGIN is for the loader
	g++ -o "$work/llama-server" "$objects"/*.o -L"$libraries" \
		-l:libllama-common.so -l:libllama.v0.4.0.so -l:libggml.v0.4.0.so -l:libggml-base.so \
		-Wl,-rpath,'$ORIGIN' -pthread -s >&2

	# The server looks for its libraries beside itself. whisper.cpp is built with ggml's declarations.
	# Docker's model runner knows the server by another name.
	mkdir -p "$folder/include"
	cp "$libraries"/*.so "$folder/"
	cp "$source"/ggml/include/*.h "$folder/include/"
	ln -sf llama-server "$folder/com.docker.llama-server"
	mv "$work/llama-server" "$folder/llama-server"
}

build_once "$folder/llama-server" build
echo "$folder/llama-server"
