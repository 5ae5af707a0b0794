package nvml

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// unifiedNames are parts of the names of GPUs that share the CPU's memory, or
// that reach it coherently. Only of these is the system's memory taken in
// place of a reading that the driver does not support: a sick card of its own
// memory must never be taken for the size of the system's.
var unifiedNames = []string{"GB10", "GB200", "GB300", "GH200", "JETSON", "TEGRA", "ORIN", "THOR", "XAVIER"}

// isUnified reports whether a GPU of that name may share the CPU's memory.
// Names are compared word by word, so that "GB100" is no GB10.
func isUnified(name string) bool {
	words := strings.FieldsFunc(strings.ToUpper(name), func(r rune) bool {
		return (r < 'A' || r > 'Z') && (r < '0' || r > '9')
	})
	for _, word := range words {
		for _, unified := range unifiedNames {
			if word == unified {
				return true
			}
		}
	}
	return false
}

// fillUnified gives a device the system's memory: what it has in all, and what
// programs can still get, page cache that can be dropped included.
func fillUnified(device *gpu.Device, meminfo string) {
	total, available, err := readMeminfo(meminfo)
	if err != nil {
		device.Reason = "the driver does not tell its memory, and the system's cannot be read: " + err.Error()
		return
	}
	device.Total, device.Free, device.MemoryKnown, device.Unified = total, available, true, true
}

// memoryInfo is the system's account of its memory.
const memoryInfo = "/proc/meminfo"

func readMeminfo(path string) (total, available gpu.Bytes, err error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = file.Close() }()
	total, available = -1, -1
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		key, rest, _ := strings.Cut(lines.Text(), ":")
		if key != "MemTotal" && key != "MemAvailable" {
			continue
		}
		number, unit, _ := strings.Cut(strings.TrimSpace(rest), " ")
		kib, err := strconv.ParseInt(number, 10, 48)
		if err != nil || unit != "kB" {
			return 0, 0, fmt.Errorf("%s: %q is not understood", path, lines.Text())
		}
		if key == "MemTotal" {
			total = gpu.Bytes(kib) * gpu.KiB
		} else {
			available = gpu.Bytes(kib) * gpu.KiB
		}
	}
	if err := lines.Err(); err != nil {
		return 0, 0, err
	}
	if total < 0 || available < 0 {
		return 0, 0, fmt.Errorf("%s has no MemTotal or no MemAvailable", path)
	}
	return total, available, nil
}
