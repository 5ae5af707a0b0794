package doctor

import (
	"fmt"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// ranks are the samplers, the better first.
var ranks = map[string]int{"nvml": 1, "nvidia_smi": 2, "amdgpu": 2, "static": 3}

// judgeGPUs says how the GPUs are read, and why not better.
func judgeGPUs(f *facts) (out []Finding) {
	g := &f.gpu
	where := f.lines.matching(f.site.File, 1, "", "gpu")
	add := func(severity Severity, what, mend string) {
		out = append(out, Finding{Severity: severity, Check: "gpu", Where: where, What: what, Mend: mend})
	}
	switch {
	case !g.looked || f.site.Sampler == nil:
		return nil // it was cut off, or its configuration is faulty: that is said already
	case g.err != nil:
		add(Error, "no GPU can be read: "+oneLine(g.err), f.mendSampler())
	case g.name == "static":
		add(Warning, "degraded: the GPUs are declared and not read: memory that other programs take goes unnoticed", f.mendBetter("gpu static is for hardware that nothing can read"))
	case g.name == "fallback":
		add(Warning, "degraded: no GPU can be read, so the sizes of gpu auto { fallback … } count: memory that other programs take goes unnoticed", f.mendSampler()+"; "+g.why)
	case g.name == "nvidia_smi":
		add(Warning, "GPUs are read by running nvidia-smi ("+g.why+"): each look starts a program, and freed memory is seen late", f.mendBetter(f.mendSampler()))
	case g.better != "" && ranks[g.name] == 0: // simulated, on a machine with a card
		add(Warning, "the GPUs are those of the sampler "+g.name+", though "+g.better+" reads real ones here", "write gpu auto")
	default:
		add(Note, "GPUs are read by "+g.name+": "+g.why, "")
	}
	if g.err != nil {
		return out
	}
	for _, d := range g.sample.Devices {
		out = append(out, f.judgeDevice(d, where)...)
	}
	return out
}

// mendBetter is how to get a better sampler, if auto has found one; else otherwise.
func (f *facts) mendBetter(otherwise string) string {
	g := &f.gpu
	switch {
	case g.better != "" && ranks[g.better] < ranks[g.name]:
		return "write gpu auto: " + g.better + " works here"
	case g.autoErr != nil:
		return otherwise + "; what gpu auto says: " + oneLine(g.autoErr)
	}
	return otherwise
}

// mendSampler is how to get the GPUs to be read at all, or by NVML.
func (f *facts) mendSampler() string {
	h := &f.host
	switch {
	case h.nvidia && !h.nvidiaDriver && !h.wsl:
		return "there is a card of NVIDIA's, but its driver is not loaded: install it, or `modprobe nvidia`; after an upgrade of the driver, reboot"
	case h.container && !h.nvidiaDriver && !h.wsl:
		return "in a container the card must be passed in: docker run --gpus all with NVIDIA_DRIVER_CAPABILITIES=utility, from an image with glibc (not Alpine)"
	case !h.cgo && (h.nvidiaDriver || h.wsl):
		return "this Caddy was built without cgo, so it can't use NVML: build it with CGO_ENABLED=1"
	case h.nvidiaDriver || h.wsl:
		return "NVML is libnvidia-ml.so.1, a part of the driver: `ldconfig -p | grep nvidia-ml`; if it is elsewhere, write gpu nvml { library PATH }"
	case h.amd:
		return "there is a card of AMD's: load the kernel's driver amdgpu, and look for mem_info_vram_total in /sys/class/drm/card*/device"
	}
	return "there is no card of NVIDIA's or AMD's on the PCI bus; for other hardware declare what there is, as in gpu static 24GiB, or gpu auto { fallback 24GiB }"
}

func (f *facts) judgeDevice(d gpu.Device, where string) (out []Finding) {
	add := func(severity Severity, mend, format string, args ...any) {
		out = append(out, Finding{Severity: severity, Check: "gpu", Where: where, What: fmt.Sprintf("GPU %d: ", d.Index) + fmt.Sprintf(format, args...), Mend: mend})
	}
	if d.Health == gpu.Lost {
		add(Error, "reset or reboot; `dmesg | grep -i xid` says what happened", "it is lost: %s", d.Reason)
		return out
	}
	if f.gpu.name == "static" || f.gpu.name == "fallback" {
		return out
	}
	if d.Total == 0 && !d.MemoryKnown {
		add(Error, "let Caddy's user read it, or declare its size: gpu auto { fallback 24GiB }", "how much memory it has is not known, so its consumers get 503 gpu_lost: %s", d.Reason)
		return out
	}
	if !d.MemoryKnown {
		add(Warning, "the broker goes by configured sizes then; if it is a part of a card (MIG), declare it: gpu static SIZE", "degraded: how much of its memory is free is not known: %s", d.Reason)
	} else {
		add(Note, "", "%s, %s, %s free", d.Name, d.Total, d.Free)
		if d.Reason != "" {
			add(Warning, "", "%s", d.Reason)
		}
	}
	hidden := !d.ProcessesKnown
	for _, p := range d.Processes {
		hidden = hidden || p.Used < 0
	}
	switch {
	case hidden && f.host.wsl:
		add(Note, "", "who holds how much of its memory can't be told on WSL2: it is inferred from what loads and unloads free and take")
	case hidden:
		add(Warning, "with nvidia_smi: see what `nvidia-smi --query-compute-apps=pid,used_memory --format=csv` says; a driver 535 before 535.104 tells nonsense and is not asked",
			"who holds how much of its memory can't be told: it is inferred from what loads and unloads free and take")
	}
	return out
}

// judgeProcesses reports whether process numbers that the driver tells mean something here.
func judgeProcesses(f *facts) []Finding {
	if f.host.hostPIDs || f.gpu.err != nil || ranks[f.gpu.name] == 0 || f.gpu.name == "static" {
		return nil
	}
	return []Finding{{Severity: Warning, Check: "gpu",
		What: "Caddy runs in a container with process numbers of its own: the driver's are the machine's, so no memory can be told to be a server's",
		Mend: "give the container the machine's: pid: host in the compose file, or docker run --pid=host"}}
}

// judgeDevices says which device files this user may not use. NVML needs
// those of NVIDIA's; the others are for servers that Caddy starts.
func judgeDevices(f *facts) (out []Finding) {
	starts := f.starts("process")
	for _, d := range f.host.devices {
		if d.err == nil {
			continue
		}
		if strings.HasPrefix(d.path, "/dev/nvidia") && f.gpu.err != nil {
			out = append(out, Finding{Severity: Error, Check: "permissions", What: fmt.Sprintf("%s may not open %s: %v", f.host.user, d.path, d.err),
				Mend: f.mendGroup(d.group)})
			continue
		}
		if starts {
			out = append(out, Finding{Severity: Warning, Check: "permissions",
				What: fmt.Sprintf("servers that Caddy starts as %s may not open %s: %v", f.host.user, d.path, d.err), Mend: f.mendGroup(d.group)})
		}
	}
	return out
}

func (f *facts) mendGroup(group string) string {
	if group == "" || group == "root" {
		return "let this user open it: a udev rule, or for NVIDIA's NVreg_DeviceFileMode=0666"
	}
	return "put Caddy's user into the group " + group + ": SupplementaryGroups=" + group + " in its unit, or group_add in the compose file"
}

func oneLine(err error) string { return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ") }
