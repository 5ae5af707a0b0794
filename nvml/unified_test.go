package nvml

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func kib(b gpu.Bytes) string { return strconv.FormatInt(int64(b/gpu.KiB), 10) }

func TestOnlyKnownNamesAreUnified(t *testing.T) {
	for name, want := range map[string]bool{
		"NVIDIA GB10": true, "NVIDIA GH200 480GB": true, "NVIDIA GB200": true, "NVIDIA GB300": true, "Orin (nvgpu)": true,
		"NVIDIA Jetson AGX Thor": true, "NVIDIA Tegra X1": true, "Xavier": true, "NVIDIA-GB10": true,
		"NVIDIA GeForce RTX 4090": false, "NVIDIA A100-SXM4-80GB": false, "NVIDIA GB100": false, "NVIDIA GB102": false,
		"NVIDIA B200": false, "NVIDIA RTX Thorium": false, "": false,
	} {
		if got := isUnified(name); got != want {
			t.Errorf("isUnified(%q) = %v", name, got)
		}
	}
}

func TestMeminfoThatIsNotUnderstoodIsAnErrorAndNeverZero(t *testing.T) {
	for _, text := range []string{"", "MemTotal: 5 kB\n", "MemAvailable: 5 kB\n", "MemTotal: x kB\nMemAvailable: 5 kB\n", "MemTotal: 5 MB\nMemAvailable: 5 kB\n"} {
		path := filepath.Join(t.TempDir(), "meminfo")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		device := gpu.Device{}
		fillUnified(&device, path)
		if device.MemoryKnown || device.Reason == "" {
			t.Errorf("%q: %+v", text, device)
		}
	}
	device := gpu.Device{}
	fillUnified(&device, filepath.Join(t.TempDir(), "none"))
	if device.MemoryKnown || device.Reason == "" {
		t.Errorf("no file: %+v", device)
	}
	fillUnified(&device, meminfo(t, 128*gpu.GiB, 100*gpu.GiB))
	if !device.MemoryKnown || !device.Unified || device.Total != 128*gpu.GiB || device.Free != 100*gpu.GiB {
		t.Errorf("good file: %+v", device)
	}
}

func TestDriversWithBrokenProcessListsAreKnown(t *testing.T) {
	for version, want := range map[string]bool{
		"535.43.02": true, "535.86.10": true, "535.98": true, "535.103": true, "535.104.05": false, "535.183.01": false,
		"530.41.03": false, "550.54.14": false, "999.00-stub": false, "": false,
	} {
		if got := processListBroken(version); got != want {
			t.Errorf("processListBroken(%q) = %v", version, got)
		}
	}
}
