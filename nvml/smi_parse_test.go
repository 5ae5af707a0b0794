package nvml

import (
	"strings"
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

const (
	row4090 = "0, GPU-aaaa, NVIDIA GeForce RTX 4090, 00000000:01:00.0, 24564, 912, 23226, 426, 37, 51, 61.25, [N/A]"
	rowGB10 = "1, GPU-bbbb, NVIDIA GB10, 0000000F:01:00.0, [N/A], [N/A], [N/A], [N/A], 0, 36, 4.20, [N/A]"
)

func TestRowsOfNvidiaSMI(t *testing.T) {
	system := meminfo(t, 128*gpu.GiB, 90*gpu.GiB)
	unknown := func(d gpu.Device) gpu.Device {
		d.Utilisation, d.Temperature, d.Power = -1, -1, -1
		return d
	}
	for name, c := range map[string]struct {
		line   string
		want   gpu.Device
		reason string // part of it; empty: none
	}{
		"all told": {row4090, gpu.Device{
			UUID: "GPU-aaaa", Name: "NVIDIA GeForce RTX 4090", Total: 24564 * gpu.MiB, Free: 23226 * gpu.MiB, MemoryKnown: true,
			Utilisation: 37, Temperature: 51, Power: 61.25,
		}, ""},
		"unified without memory": {rowGB10, gpu.Device{
			Index: 1, UUID: "GPU-bbbb", Name: "NVIDIA GB10", Total: 128 * gpu.GiB, Free: 90 * gpu.GiB, MemoryKnown: true, Unified: true,
			Utilisation: 0, Temperature: 36, Power: 4.2,
		}, ""},
		"discrete without memory": {
			"2, GPU-c, NVIDIA RTX A6000, 00000000:02:00.0, [N/A], [N/A], [N/A], [N/A], [N/A], N/A, [Not Supported], [N/A]",
			unknown(gpu.Device{Index: 2, UUID: "GPU-c", Name: "NVIDIA RTX A6000"}), "[N/A]",
		},
		"unified whose reading went wrong": {
			"0, GPU-d, NVIDIA GB10, 00000000:02:00.0, [Unknown Error], [Unknown Error], [Unknown Error], [N/A], [N/A], [N/A], ERR!, [N/A]",
			unknown(gpu.Device{UUID: "GPU-d", Name: "NVIDIA GB10"}), "Unknown Error",
		},
		"no permission": {
			"0, GPU-e, NVIDIA A100, 00000000:02:00.0, [Insufficient Permissions], [Insufficient Permissions], [Insufficient Permissions], [N/A], [N/A], 40, 60.00, [N/A]",
			gpu.Device{UUID: "GPU-e", Name: "NVIDIA A100", Utilisation: -1, Temperature: 40, Power: 60}, "Insufficient Permissions",
		},
		"lost": {
			"0, GPU-f, NVIDIA A100, 00000000:02:00.0, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]",
			unknown(gpu.Device{UUID: "GPU-f", Name: "NVIDIA A100", Health: gpu.Lost}), "GPU is lost",
		},
		"free is the rest if reserved is told": {
			"0, GPU-g, NVIDIA A100, 00000000:02:00.0, 1000, 300, [N/A], 50, 1, 2, 3, Disabled",
			gpu.Device{UUID: "GPU-g", Name: "NVIDIA A100", Total: 1000 * gpu.MiB, Free: 650 * gpu.MiB, MemoryKnown: true, Utilisation: 1, Temperature: 2, Power: 3}, "",
		},
		"free is not the rest if reserved is not told": {
			"0, GPU-g, NVIDIA A100, 00000000:02:00.0, 1000, 300, [N/A], [N/A], 1, 2, 3, Disabled",
			gpu.Device{UUID: "GPU-g", Name: "NVIDIA A100", Total: 1000 * gpu.MiB, Utilisation: 1, Temperature: 2, Power: 3}, "[N/A]",
		},
		"the whole is the sum of its parts": {
			"0, GPU-g, NVIDIA A100, 00000000:02:00.0, [Insufficient Permissions], 300, 650, 50, 1, 2, 3, Disabled",
			gpu.Device{UUID: "GPU-g", Name: "NVIDIA A100", Total: 1000 * gpu.MiB, Free: 650 * gpu.MiB, MemoryKnown: true, Utilisation: 1, Temperature: 2, Power: 3}, "",
		},
		"needs a reset": {
			"0, GPU-k, NVIDIA A100, 00000000:02:00.0, [GPU requires reset], [GPU requires reset], [GPU requires reset], [N/A], [GPU requires reset], 40, 60.00, [N/A]",
			unknown(gpu.Device{UUID: "GPU-k", Name: "NVIDIA A100", Health: gpu.Lost}), "requires a reset",
		},
		"one column needs a reset": {
			"0, GPU-l, NVIDIA A100, 00000000:02:00.0, 1000, 300, 650, 50, [GPU requires reset], 2, [Unknown Error], Disabled",
			gpu.Device{UUID: "GPU-l", Name: "NVIDIA A100", Total: 1000 * gpu.MiB, Free: 650 * gpu.MiB, MemoryKnown: true, Utilisation: -1, Temperature: 2, Power: -1}, "",
		},
		"full is not unknown": {
			"0, GPU-h, NVIDIA A100, 00000000:02:00.0, 1000, 1000, 0, 0, 100, 2, 3, Disabled",
			gpu.Device{UUID: "GPU-h", Name: "NVIDIA A100", Total: 1000 * gpu.MiB, MemoryKnown: true, Utilisation: 100, Temperature: 2, Power: 3}, "",
		},
		"MIG": {
			"0, GPU-i, NVIDIA A100, 00000000:02:00.0, 40960, 5, 40955, 0, [N/A], 30, 50, Enabled",
			gpu.Device{UUID: "GPU-i", Name: "NVIDIA A100", Total: 40960 * gpu.MiB, Utilisation: -1, Temperature: 30, Power: 50}, "MIG",
		},
		"the driver's sentinel is no size": {
			"0, GPU-j, NVIDIA A100, 00000000:02:00.0, 17592186044416, 5, 17592186044416, 0, nan, -5, inf, Disabled",
			unknown(gpu.Device{UUID: "GPU-j", Name: "NVIDIA A100"}), "does not tell",
		},
	} {
		rows, noise := parseGPUs(c.line+"\n", gpuFields)
		if len(noise) != 0 || len(rows) != 1 {
			t.Errorf("%s: %v, %v", name, rows, noise)
			continue
		}
		if c.want.Health == "" {
			c.want.Health = gpu.Healthy
		}
		got := rows[0].device(system)
		if !strings.Contains(got.Reason, c.reason) || (got.Reason == "") != (c.reason == "") {
			t.Errorf("%s: reason %q, want one with %q", name, got.Reason, c.reason)
		}
		got.Reason = ""
		if !equal(got, c.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, c.want)
		}
	}
}

// equal compares devices without processes.
func equal(a, b gpu.Device) bool {
	a.Processes, b.Processes = nil, nil
	return a.Index == b.Index && a.UUID == b.UUID && a.Name == b.Name && a.Health == b.Health && a.Reason == b.Reason &&
		a.Total == b.Total && a.Free == b.Free && a.MemoryKnown == b.MemoryKnown && a.Unified == b.Unified &&
		a.Utilisation == b.Utilisation && a.Temperature == b.Temperature && a.Power == b.Power
}

func TestK6_LinesThatAreNoRowsTakeNothingFromTheRows(t *testing.T) {
	second := strings.NewReplacer("0, GPU-aaaa", "1, GPU-bbbb", ":01:", ":02:").Replace(row4090)
	for text, want := range map[string]struct{ rows, noise int }{
		"No devices were found\n":               {0, 1},
		"0, GPU-a\n":                            {0, 1},
		row4090 + ", more\n":                    {0, 1},
		strings.Replace(row4090, "0,", "x,", 1): {0, 1},
		row4090 + "\nSegmentation fault\n":      {1, 1},
		"WARNING: infoROM is corrupted at gpu 0000:01:00.0\n\n" + row4090 + "\n  \nwarning: other\n" + second: {2, 2},
		"\n \n": {0, 0},
		strings.Repeat("noise "+row4090+"\n", 1000) + row4090: {1, 1000},
	} {
		rows, noise := parseGPUs(text, gpuFields)
		if len(rows) != want.rows || len(noise) != min(want.noise, maxNoise) {
			t.Errorf("%.80q gave %v and %q", text, rows, noise)
		}
	}
}

func TestK6_PartsOfACardThatMIGCutUpAreNoCards(t *testing.T) {
	parent := "0, GPU-i, NVIDIA A100, 00000000:02:00.0, 40960, 5, 40955, 0, [N/A], 30, 50, Enabled"
	part := "0, MIG-i1, NVIDIA A100 MIG 1g.5gb, 00000000:02:00.0, 4864, 1, 4863, 0, [N/A], [N/A], [N/A], [N/A]"
	rows, _ := parseGPUs(parent+"\n"+part+"\n"+part+"\n"+row4090[:0], gpuFields)
	if len(rows) != 1 || rows[0].uuid != "GPU-i" {
		t.Errorf("%+v", rows)
	}
	if rows, _ := parseGPUs(part, gpuFields); len(rows) != 1 {
		t.Errorf("a part alone, as in a container: %+v", rows)
	}
	rows, noise := parseGPUs(parent+"\n  MIG 1g.5gb     Device  0: (UUID: MIG-i1)\n", gpuFields)
	if len(rows) != 1 || len(noise) != 1 {
		t.Errorf("%+v, %q", rows, noise)
	}
}

func TestK6_WarningsTakeNothingFromTheListOfProcesses(t *testing.T) {
	const warning = "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"
	got, err := parseProcesses(warning + "GPU-a, 5, x, 7\nsome other line\n")
	if err != nil || len(got["GPU-a"]) != 1 {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := parseProcesses(warning); err != nil || len(got) != 0 {
		t.Errorf("a warning alone: nobody holds anything: %v, %v", got, err)
	}
}

func TestProcessNamesMayHoldCommas(t *testing.T) {
	got, err := parseProcesses(strings.Join([]string{
		"GPU-aaaa, 100, /usr/bin/python3, 5120",
		"GPU-aaaa, 101, serve, --models a, b, 99, 300",
		"GPU-bbbb, 102, [Not Found], [N/A]",
		"GPU-bbbb, 103, , 7",
		"",
	}, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]gpu.Process{
		"GPU-aaaa": {{PID: 100, Name: "/usr/bin/python3", Used: 5120 * gpu.MiB}, {PID: 101, Name: "serve, --models a, b, 99", Used: 300 * gpu.MiB}},
		"GPU-bbbb": {{PID: 102, Used: -1}, {PID: 103, Used: 7 * gpu.MiB}},
	}
	for uuid, processes := range want {
		if len(got[uuid]) != len(processes) {
			t.Fatalf("%s: %+v", uuid, got[uuid])
		}
		for i, p := range processes {
			if got[uuid][i] != p {
				t.Errorf("%s: %+v, want %+v", uuid, got[uuid][i], p)
			}
		}
	}
	for _, text := range []string{"No running processes found", "GPU-a, x, python, 5", "GPU-a, 5, 7", "GPU-a, -1, a, 7"} {
		if got, err := parseProcesses(text); err == nil {
			t.Errorf("%q gave %v", text, got)
		}
	}
}

func TestBusIDOfALostGPUIsFoundInTheErrorText(t *testing.T) {
	for text, want := range map[string]string{
		"Unable to determine the device handle for GPU 0000:0A:00.0: GPU is lost.  Reboot the system to recover this GPU": "00000000:0A:00.0",
		"Unable to determine the device handle for GPU0000:81:00.0: Unknown Error":                                        "00000000:81:00.0",
		"Unable to determine the device handle for GPU 00000001:0a:00.0: Unknown Error":                                   "00000001:0a:00.0",
		"Unable to determine the device handle for GPU1: 0000:0A:00.0: Unknown Error":                                     "00000000:0A:00.0",
		"GPU 0000:0A:00.0 has fallen off the bus":                                                                         "00000000:0A:00.0",
		"WARNING: infoROM is corrupted at gpu 0000:0A:00.0":                                                               "",
		"GPU 0000:0A:00.0: fine": "", "GPU is lost": "", "": "",
	} {
		if got := lostBusID(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func FuzzParsersOfNvidiaSMI(f *testing.F) {
	for _, seed := range []string{row4090, rowGB10, "GPU-a, 1, a, b, 5", "", ",,,,", "GPU-a, 99999999999999999999, x, 5", "0,,,,,,,,,,,"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rows, noise := parseGPUs(text, gpuFields)
		for _, row := range rows {
			if d := row.device(""); d.Total < 0 || d.Free < 0 || d.MemoryKnown && d.Total == 0 || row.index < 0 {
				t.Fatalf("%q: %+v", text, d)
			}
		}
		if len(noise) > maxNoise {
			t.Fatalf("%q: %d lines of noise", text, len(noise))
		}
		if byUUID, err := parseProcesses(text); err == nil {
			for _, processes := range byUUID {
				for _, p := range processes {
					if p.Used < -1 || p.PID < 0 {
						t.Fatalf("%q: %+v", text, p)
					}
				}
			}
		}
	})
}
