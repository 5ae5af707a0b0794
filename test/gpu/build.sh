#!/usr/bin/env bash
# Builds what test/gpu/run.sh needs on a machine that has a GPU but no Go:
# stripped programs, packed with gzip (Python's own library unpacks it), in
# bin/gpu, which git ignores.
#
#	caddy        with cgo: reads the GPU by NVML
#	caddy-nocgo  without cgo, as xcaddy builds by default: reads it by nvidia-smi
#	runner       drives the check and measures
#	SOURCE       what they were built from
#
# It needs Go and gcc, and an x86-64 Linux with glibc like the other machine's,
# or an older one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly out=bin/gpu
readonly limit_mib=48 # well under the 64 MiB that can be carried together with the tree

# NVML's functions are bound at their first call. A linker that binds eagerly
# (-z now, as hardened distributions have it) makes a program that does not
# start, so lazy binding is asked for by name.
readonly lazy='-s -w "-extldflags=-Wl,-z,lazy"'
export CGO_CFLAGS="${CGO_CFLAGS:--O2 -Wno-deprecated-declarations}"

mkdir -p "$out"
rm -f "$out"/*

echo "building caddy (cgo), runner (cgo), caddy-nocgo ..."
CGO_ENABLED=1 go build -trimpath -tags netgo,osusergo -ldflags "$lazy" -o "$out/caddy" ./cmd/caddy
CGO_ENABLED=1 go build -trimpath -tags netgo,osusergo -ldflags "$lazy" -o "$out/runner" ./test/gpu/runner
CGO_ENABLED=0 go build -trimpath -ldflags '-s -w' -o "$out/caddy-nocgo" ./cmd/caddy

# Both of the first must know NVML, and must start without it.
for program in caddy runner; do
	if ! grep -q nvmlDeviceGetMemoryInfo "$out/$program"; then
		echo "$out/$program has no NVML in it: is cgo switched off?" >&2
		exit 1
	fi
done
"$out/caddy" version >/dev/null
"$out/caddy-nocgo" version >/dev/null
"$out/runner" -help 2>/dev/null

{
	echo "commit: $(git describe --always --dirty 2>/dev/null || echo unknown)"
	echo "go: $(go env GOVERSION) $(go env GOOS)/$(go env GOARCH)"
	if command -v objdump >/dev/null; then
		echo "needs: glibc $(objdump -T "$out/caddy" "$out/runner" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1 | cut -d_ -f2)"
	fi
} >"$out/SOURCE"

total=0
printf '%-14s %10s %10s\n' program MiB packed
for program in caddy caddy-nocgo runner; do
	plain=$(stat -c %s "$out/$program")
	gzip -9 --no-name --force "$out/$program"
	packed=$(stat -c %s "$out/$program.gz")
	total=$((total + packed))
	awk -v n="$program" -v a="$plain" -v b="$packed" 'BEGIN { printf "%-14s %10.1f %10.1f\n", n, a / 2^20, b / 2^20 }'
done
awk -v t="$total" 'BEGIN { printf "%-14s %10s %10.1f\n", "in all", "", t / 2^20 }'
cat "$out/SOURCE"
if ((total > limit_mib << 20)); then
	echo "bin/gpu is larger than $limit_mib MiB: it would not travel" >&2
	exit 1
fi
