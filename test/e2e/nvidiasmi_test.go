package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// smiScript pretends to be nvidia-smi. What it prints is shell code in the file mode, which
// may call row: a row of GPU $1, whose memory is what the pretending servers hold of it. An
// argument --id=N prints only what answers for that GPU: the function of.
const smiScript = `#!/bin/sh
dir=%q
used() { cat "$dir"/gpu/[0-9]* 2>/dev/null | awk -v gpu="$1" '$1 == gpu { sum += $2 } END { printf "%%d", sum / 1048576 }'; }
row() { u=$(used "$1"); echo "$1, GPU-$1, NVIDIA GeForce RTX 4090, 00000000:0$1:00.0, ${TOTAL-16384}, ${USED-$u}, ${FREE-$((16384 - u))}, 0, 37, 51, 61.25, ${MIG-[N/A]}"; }
case "$1" in --query-compute-apps=*) . "$dir/apps"; exit ;; esac
id=
for a; do case "$a" in --id=*) id=${a#--id=} ;; esac; done
. "$dir/mode"
`

// smi is a site whose GPUs are read by a pretending nvidia-smi.
type smi struct {
	*site
	dir string
}

// startSMI starts one; mode is what nvidia-smi does at first.
func startSMI(t *testing.T, mode string, l layout, settings ...string) smi {
	t.Helper()
	dir := t.TempDir()
	f := smi{dir: dir}
	path := filepath.Join(dir, "nvidia-smi")
	require.NoError(t, os.WriteFile(path, fmt.Appendf(nil, smiScript, dir), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "apps"), []byte("true\n"), 0o644))
	f.does(t, mode)
	l.Sampler = "gpu nvidia_smi {\npath " + path + "\ninterval 50ms\n" + strings.Join(settings, "\n") + "\n}"
	require.NoError(t, os.Symlink("/nowhere", filepath.Join(dir, "gpu"))) // until the site has its folder
	l.NoGPU = true
	f.site = start(t, l)
	require.NoError(t, os.Remove(filepath.Join(dir, "gpu")))
	require.NoError(t, os.Symlink(f.sim, filepath.Join(dir, "gpu")))
	f.until("it has looked", func() bool { return f.post("/a/unknown", "x").status != 0 })
	return f
}

// does changes what nvidia-smi does, at once and whole.
func (f smi) does(t *testing.T, mode string) {
	t.Helper()
	next := filepath.Join(f.dir, "mode.new")
	require.NoError(t, os.WriteFile(next, []byte(mode+"\n"), 0o644))
	require.NoError(t, os.Rename(next, filepath.Join(f.dir, "mode")))
}

// The eight outputs. What can be served is served, and nothing is refused for ever.
func TestK6_WhateverNvidiaSMIPrintsWhatCanBeServedIsServed(t *testing.T) {
	t.Parallel()
	const (
		good     = "row 0\nrow 1"
		warning  = "echo 'WARNING: infoROM is corrupted at gpu 0000:00:00.0'\n"
		columns  = "TOTAL='[Insufficient Permissions]' USED='[Insufficient Permissions]' FREE='[Insufficient Permissions]'\n" + good
		reset    = "TOTAL='[GPU requires reset]' USED='[GPU requires reset]' FREE='[GPU requires reset]'\n" + good
		mig      = "MIG=Enabled\n" + good + "\necho '0, MIG-1, NVIDIA A100 MIG 1g.5gb, 00000000:00:00.0, 4864, 1, 4863, 0, [N/A], [N/A], [N/A], [N/A]'\necho '  MIG 1g.5gb     Device  0: (UUID: MIG-1)'"
		mismatch = "echo 'Failed to initialize NVML: Driver/library version mismatch'\necho 'NVML library version: 570.86'\nexit 18"
		dead     = "case \"$id\" in ''|0|*GPU-0*) row 0 ;; esac\ncase \"$id\" in ''|1|*GPU-1*) echo 'Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error'; exit 255 ;; 0|GPU-0) exit 0 ;; esac\necho 'No devices were found'; exit 6"
	)
	const served, refused = "served", "refused"
	for name, c := range map[string]struct {
		mode, settings string
		atStart, later string // what becomes of requests for GPU 0
		other          string // … and for GPU 1, if not the same
		degraded       bool   // when it is served
		reason         string // a part of what status says of one of the GPUs
		refusal        string // a part of the refusal at the start
	}{
		"warnings among the rows": {mode: "row 0\n" + warning + "echo\nrow 1", atStart: served, later: served, reason: "infoROM"},
		"exit 14":                 {mode: good + "\nexit 14", atStart: served, later: served, reason: "status 14"},
		"slow":                    {mode: "sleep 1.5\n" + good, settings: "timeout 2900ms", atStart: served, later: served},
		"columns not permitted":   {mode: columns, atStart: refused, later: served, degraded: true, reason: "Insufficient", refusal: "gpu auto { fallback 24GiB }"},
		"needs a reset":           {mode: reset, atStart: refused, later: refused, reason: "reset", refusal: "reset"},
		"MIG rows":                {mode: mig, atStart: served, later: served, degraded: true, reason: "MIG"},
		"driver mismatch":         {mode: mismatch, atStart: refused, later: served, degraded: true, reason: "mismatch", refusal: "mismatch"},
		"one card of two is dead": {mode: dead, atStart: served, later: served, other: refused, reason: "Unable", refusal: "Unable"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.other == "" {
				c.other = c.atStart
			}
			slow := "true\n"
			if c.settings != "" {
				slow = "sleep 1.5\n"
			}
			onOther := plainModel("c", 9, "gpu 1")
			onOther.GPU = 1
			f := startSMI(t, c.mode, layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9), onOther}}, c.settings)
			require.NoError(t, os.WriteFile(filepath.Join(f.dir, "apps"), []byte(slow), 0o644))
			check := func(consumer, want string) {
				t.Helper()
				if want == served {
					f.serve(consumer)
					return
				}
				a := f.post("/"+consumer+"/synthesize", "x")
				require.Equal(t, 503, a.status, "%s", a.body)
				r := f.refusal(a)
				require.Equal(t, "gpu_lost", r.Code)
				require.NotEmpty(t, a.header.Get("Retry-After"))
				require.Contains(t, r.Message, c.refusal)
			}
			explained := func() bool {
				st := f.status()
				return c.reason == "" || strings.Contains(fmt.Sprint(st.Degraded, st.GPUs), c.reason)
			}
			check("a", c.atStart)
			check("c", c.other)
			if len(f.status().GPUs) == 0 {
				require.Contains(t, f.status().Degraded, c.reason, "status says why there is none")
			}
			for _, g := range f.status().GPUs {
				require.False(t, g.Health == "healthy" && g.Total == 0, "%+v", g)
			}
			if c.atStart == served {
				check("b", c.atStart)
				f.until("status says why", explained)
				require.Equal(t, c.degraded, f.status().Degraded != "")
			}

			f.does(t, good)
			f.until("it is good again", func() bool {
				st := f.status()
				return len(st.GPUs) == 2 && st.Degraded == "" && st.GPUs[0].Health == "healthy" && st.GPUs[1].Health == "healthy" && st.GPUs[0].Reason == ""
			})
			f.serve("a")
			f.serve("c")

			f.does(t, c.mode)
			f.until("status says why", explained)
			check("a", c.later)
			if c.later == served {
				check("b", served)
				require.Equal(t, c.degraded, f.status().Degraded != "")
			}
			if c.later == refused || c.other != c.atStart {
				check("c", refused)
			}
			require.Zero(t, f.metric(`errors_total{code="never_fits",consumer="a"}`)+f.metric(`errors_total{code="vram_exhausted",consumer="b"}`))
		})
	}
}

func TestK6_TheTimeoutOfTheConfigurationHoldsForEachRun(t *testing.T) {
	t.Parallel()
	// Two runs of 1.5s within a timeout of 2.9s, which leaves a busy machine its time; then one of six seconds, which it forbids.
	f := startSMI(t, "sleep 1.5; row 0", layout{Consumers: []consumer{plainModel("a", 9), plainModel("b", 9)}}, "timeout 2900ms")
	require.NoError(t, os.WriteFile(filepath.Join(f.dir, "apps"), []byte("sleep 1.5\n"), 0o644))
	f.serve("a")
	f.serve("b")
	require.Empty(t, f.status().Degraded)
	f.does(t, "sleep 6; row 0")
	f.until("telemetry is lost", func() bool { return strings.Contains(f.status().Degraded, "in time") })
	f.serve("a")
	f.does(t, "row 0")
	f.until("it is back", func() bool { return f.status().Degraded == "" })
	require.NotEmpty(t, f.decisions("telemetry_back"))
}
