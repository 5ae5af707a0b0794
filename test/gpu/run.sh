#!/usr/bin/env bash
# The check on a machine with an NVIDIA GPU: two model servers that do not fit
# into the GPU together take turns behind Caddy, and a report says what a swap
# costs. It needs python3 with PyTorch, nvidia-smi, and bin/gpu as build.sh
# leaves it; no Go.
#
#	test/gpu/run.sh [option...]
#
#	--share PERCENT   what each server takes of the card (55: two do not fit)
#	--swaps N         how many swaps (10)
#	--nocgo           the Caddy without cgo, which reads the GPU by nvidia-smi
#	--rehearse        no GPU: a simulated one, and servers that pretend
#	--rehearse-nvml   the same, but seen through a stub of NVML and a pretended
#	                  nvidia-smi; needs gcc
#
# The report goes to standard output and, with the logs, into $OUT if that is
# set. The exit status is 0 if all checks hold. It takes about a minute, at most
# six, and ends every process that it has started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

share=55 swaps=10 device=cuda program=caddy sampler=nvml rehearsal=
while (($#)); do
	case $1 in
	--share) share=${2:?--share wants a number} && shift ;;
	--swaps) swaps=${2:?--swaps wants a number} && shift ;;
	--nocgo) program=caddy-nocgo sampler=nvidia_smi ;;
	--rehearse) rehearsal=simulated device=cpu ;;
	--rehearse-nvml) rehearsal=nvml device=cpu ;;
	*)
		sed -n '2,/^set/p' "${BASH_SOURCE[0]}" | grep '^#' >&2
		exit 2
		;;
	esac
	shift
done
if [[ $rehearsal == simulated ]]; then
	sampler=simulated
fi

readonly rehearsal_total=16384 # MiB of the simulated card
readonly overhead=1024         # MiB that a claim adds to the model: context, libraries, workspace

fail() {
	echo "run.sh: $*" >&2
	exit 2
}

# --- what was started is ended, by its number, in every case

work=$(mktemp -d)
readonly work
pids=()

cleanup() {
	local status=$? pid deadline=$((SECONDS + 10))
	trap - EXIT
	trap '' INT TERM
	for pid in "${pids[@]}"; do
		kill -TERM "$pid" 2>/dev/null || true
	done
	for pid in "${pids[@]}"; do
		while kill -0 "$pid" 2>/dev/null; do
			if ((SECONDS >= deadline + 5)); then
				echo "run.sh: process $pid does not end: the driver holds it" >&2
				continue 2
			elif ((SECONDS >= deadline)); then
				kill -KILL "$pid" 2>/dev/null || true
			fi
			sleep 0.1
		done
		wait "$pid" 2>/dev/null || true
	done
	if ((status != 0)); then
		for log in "$work"/*.log; do
			[[ -e $log ]] || continue
			echo "--- the end of $(basename "$log")" >&2
			tail -n 25 "$log" >&2
		done
	fi
	if [[ -n ${OUT:-} ]]; then
		cp "$work"/*.log "$work"/report.md "$work"/Caddyfile "$OUT"/ 2>/dev/null || true
	fi
	rm -rf "$work"
	exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start NAME COMMAND... runs a process whose words go into NAME.log.
start() {
	local name=$1
	shift
	"$@" >"$work/$name.log" 2>&1 </dev/null &
	pids+=($!)
}

# --- the programs

unpack() {
	[[ -e bin/gpu/$1.gz ]] || fail "bin/gpu/$1.gz is missing: run test/gpu/build.sh where Go is, and carry bin/gpu"
	python3 - "bin/gpu/$1.gz" "$work/$1" <<-'PY'
		import gzip, os, shutil, sys
		with gzip.open(sys.argv[1]) as packed, open(sys.argv[2], "wb") as plain:
		    shutil.copyfileobj(packed, plain)
		os.chmod(sys.argv[2], 0o755)
	PY
}
command -v python3 >/dev/null || fail "python3 is missing"
unpack "$program"
unpack runner
export HOME=$work XDG_DATA_HOME=$work/data XDG_CONFIG_HOME=$work/config

# --- the GPU, or what stands for it

mkdir "$work/gpu"
server_options=() runner_options=()
case $rehearsal in
simulated)
	total=$rehearsal_total
	about="simulated GPU; not a measurement"
	gpu="simulated ${total}MiB {
			dir $work/gpu
			release_delay 200ms
		}"
	# Caddy is to see freed memory later than the runner does: each counts the delay from its own looks.
	runner_options=(-sim-dir "$work/gpu" -sim-total "${total}MiB" -sim-delay 100ms -poll 5ms)
	;;
nvml)
	mkdir "$work/lib" "$work/bin"
	gcc -shared -fPIC -O1 -Wl,-soname,libnvidia-ml.so.1 -o "$work/lib/libnvidia-ml.so.1" nvml/testdata/nvml-stub.c
	export LD_LIBRARY_PATH=$work/lib NVML_STUB_STATE=$work/nvml.state
	export PRETEND_DIR=$work/gpu PRETEND_TOTAL=$rehearsal_total
	printf '#!/bin/sh\nexec python3 "%s" smi "$@"\n' "$PWD/test/gpu/pretend.py" >"$work/bin/nvidia-smi"
	chmod +x "$work/bin/nvidia-smi"
	export PATH=$work/bin:$PATH
	start pretend python3 test/gpu/pretend.py nvml "$NVML_STUB_STATE"
	;;
esac
if [[ $rehearsal != simulated ]]; then
	line=$(timeout 30 nvidia-smi --id=0 --query-gpu=memory.total,driver_version,name --format=csv,noheader,nounits) || fail "nvidia-smi fails or does not answer: $line"
	IFS=, read -r total driver name <<<"$line"
	total=${total// /}
	[[ $total =~ ^[0-9]+$ ]] || fail "nvidia-smi does not tell the memory of GPU 0: $line"
	about="driver${driver},${name}, kernel $(uname -r)"
	gpu=$sampler
	runner_options=()
	# The servers use the GPU that the driver counts as the first.
	export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0
fi
if [[ -n $rehearsal ]]; then
	server_options=(--sim-dir "$work/gpu" --sim-total "$(awk -v t="$total" 'BEGIN { print t / 1024 }')")
fi

# Where the loader does not find NVML although nvidia-smi does, say where it is.
if [[ $rehearsal != simulated ]] && ! python3 -c 'import ctypes; ctypes.CDLL("libnvidia-ml.so.1")' 2>/dev/null; then
	for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib/wsl/lib; do
		if [[ -e $folder/libnvidia-ml.so.1 ]]; then
			export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
			about+="; libnvidia-ml.so.1 from $folder"
			break
		fi
	done
fi

size=$((total * share / 100))
claim=$((size + overhead))
((2 * size > total)) || fail "--share $share: two of $size MiB fit into $total MiB, so there would be nothing to swap"
about+="; $program, $(tr '\n' ' ' <bin/gpu/SOURCE 2>/dev/null || echo "build not known")"

# --- servers and Caddy

read -r alpha beta web admin < <(python3 -c '
import socket
taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(s.getsockname()[1] for s in taken))')

cat >"$work/Caddyfile" <<EOT
(own_routes) {
	vram ${claim}MiB
	residual ${overhead}MiB
	health /health {
		loaded \$.loaded
		resident_mib \$.gpu_resident_mib
	}
	load POST /api/admin/load
	unload POST /api/admin/unload
}

{
	admin 127.0.0.1:$admin
	local_certs
	skip_install_trust
	auto_https disable_redirects

	gpu_broker {
		gpu $gpu
		hold 0
		probe_interval 1s
		consumer alpha {
			upstream 127.0.0.1:$alpha
			import own_routes
		}
		consumer beta {
			upstream 127.0.0.1:$beta
			import own_routes
		}
	}
}

https://localhost:$web {
	tls internal
	handle_path /alpha/* {
		gpu_broker alpha
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle_path /beta/* {
		gpu_broker beta
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle /gpu/* {
		gpu_broker_status
	}
}
EOT

gib=$(awk -v s="$size" 'BEGIN { print s / 1024 }')
start alpha python3 test/gpu/server.py --name alpha --port "$alpha" --gib "$gib" --device "$device" "${server_options[@]}"
start beta python3 test/gpu/server.py --name beta --port "$beta" --gib "$gib" --device "$device" "${server_options[@]}"
start caddy "$work/$program" run --config "$work/Caddyfile" --adapter caddyfile

# --- the check

"$work/runner" -site "https://localhost:$web" -ca "$work/data/caddy/pki/authorities/local/root.crt" \
	-admin "http://127.0.0.1:$admin" -alpha "http://127.0.0.1:$alpha" -beta "http://127.0.0.1:$beta" \
	-size "${size}MiB" -claim "${claim}MiB" -caddy-sampler "$sampler" -swaps "$swaps" \
	-about "$about" -report "$work/report.md" "${runner_options[@]}" &
runner=$!
pids+=("$runner")
wait "$runner"
