package doctor

import (
	"errors"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
)

// host is what was found out about the machine, and about who looks.
type host struct {
	user         string
	root         bool
	container    bool // this runs in a container
	hostPIDs     bool // process numbers are the machine's
	wsl          bool
	mayBindLow   bool // any port below firstFree
	firstFree    int  // the first port that anybody may open
	nvidia       bool // there is a card of NVIDIA's
	amd          bool // there is one of AMD's
	devices      []deviceFile
	folders      []folder
	cgo          bool
	nvidiaDriver bool // the kernel's part is loaded
}

// deviceFile is one that programs on the GPU need.
type deviceFile struct {
	path, group string
	err         error // on opening it for reading and writing
}

// folder is a folder that Caddy writes to.
type folder struct {
	path  string
	blame string // the folder that can't be written to, path or one above it
	err   error
}

func lookAtHost(data []string) host {
	h := host{root: os.Geteuid() == 0, cgo: builtWithCgo, firstFree: 1024}
	h.user = "user " + strconv.Itoa(os.Geteuid())
	if u, err := user.Current(); err == nil {
		h.user = "user " + u.Username
	}
	h.container = inContainer()
	h.hostPIDs = !h.container || readProgram(2).name == "kthreadd"
	version, _ := os.ReadFile("/proc/version") // only Linux has one
	h.wsl = strings.Contains(strings.ToLower(string(version)), "microsoft")
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start"); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
			h.firstFree = n
		}
	}
	h.mayBindLow = h.root || hasCapability(bindService)
	h.nvidia, h.amd = cards("/sys/bus/pci/devices")
	_, err := os.Stat("/proc/driver/nvidia/version")
	h.nvidiaDriver = err == nil
	for _, pattern := range []string{"/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/renderD*"} {
		paths, _ := filepath.Glob(pattern) // the pattern is sound
		for _, path := range paths {
			h.devices = append(h.devices, tryDevice(path))
		}
	}
	for _, path := range data {
		h.folders = append(h.folders, tryFolder(path))
	}
	return h
}

func inContainer() bool {
	for _, mark := range []string{"/.dockerenv", "/run/.containerenv"} {
		if _, err := os.Stat(mark); err == nil {
			return true
		}
	}
	environment, _ := os.ReadFile("/proc/1/environ") // only root may
	return strings.Contains(string(environment), "container=")
}

// bindService is the number of the capability to open ports below 1024.
const bindService = 10

func hasCapability(number uint) bool {
	doc, _ := os.ReadFile("/proc/self/status") // only Linux has one
	for text := range strings.Lines(string(doc)) {
		if value, ok := strings.CutPrefix(text, "CapEff:"); ok {
			bits, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			return err == nil && bits>>number&1 == 1
		}
	}
	return false
}

// cards looks for graphics cards on the PCI bus.
func cards(folder string) (nvidia, amd bool) {
	vendors, _ := filepath.Glob(filepath.Join(folder, "*", "vendor")) // the pattern is sound
	for _, path := range vendors {
		vendor, _ := os.ReadFile(path)
		class, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "class"))
		if !strings.HasPrefix(string(class), "0x03") && !strings.HasPrefix(string(class), "0x12") {
			continue
		}
		switch strings.TrimSpace(string(vendor)) {
		case "0x10de":
			nvidia = true
		case "0x1002":
			amd = true
		}
	}
	return nvidia, amd
}

// tryFolder reports whether a folder can be written to, or be made. It makes none.
func tryFolder(path string) folder {
	f := folder{path: path, blame: path}
	for {
		info, err := os.Stat(f.blame)
		switch {
		case err == nil && !info.IsDir():
			f.err = errors.New("it is no folder")
			return f
		case err == nil:
			f.err = writable(f.blame)
			return f
		case !errors.Is(err, fs.ErrNotExist) || filepath.Dir(f.blame) == f.blame:
			f.err = err
			return f
		}
		f.blame = filepath.Dir(f.blame)
	}
}
