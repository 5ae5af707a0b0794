//go:build unix

package amdgpu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	navi  = "0000:03:00.0"
	vega  = "0000:0a:00.0"
	inCPU = "0000:c5:00.0"
)

// tree is a machine's sys and proc, as far as the sampler looks at them.
type tree struct {
	t    *testing.T
	root string
}

// newTree is a machine with the kernel's folders and no GPU.
func newTree(t *testing.T) tree {
	t.Helper()
	m := tree{t, t.TempDir()}
	m.dir("sys/class/drm")
	m.write("proc/meminfo", "MemTotal:       65536000 kB\nMemFree:          123 kB\nMemAvailable:   41943040 kB\n")
	m.link("proc/1/ns/pid", wholeMachine)
	m.dir("proc/1/fdinfo")
	return m
}

func (m tree) path(name string) string { return filepath.Join(m.root, name) }

func (m tree) dir(name string) {
	m.t.Helper()
	require.NoError(m.t, os.MkdirAll(m.path(name), 0o755))
}

func (m tree) write(name, text string) {
	m.t.Helper()
	m.dir(filepath.Dir(name))
	require.NoError(m.t, os.WriteFile(m.path(name), []byte(text), 0o644))
}

func (m tree) link(name, to string) {
	m.t.Helper()
	m.dir(filepath.Dir(name))
	require.NoError(m.t, os.Symlink(to, m.path(name)))
}

func (m tree) remove(name string) {
	m.t.Helper()
	_, err := os.Lstat(m.path(name))
	require.NoError(m.t, err, "the test removes what is not there")
	require.NoError(m.t, os.RemoveAll(m.path(name)))
}

// device is the folder of the card at an address, as the kernel lays it out.
func device(address string) string { return "sys/devices/pci0000:00/" + address }

// card plugs in a GPU: a folder of its own, and links to it.
func (m tree) card(number int, address, driver string, files map[string]string) {
	m.t.Helper()
	m.write(device(address)+"/uevent", fmt.Sprintf("DRIVER=%s\nPCI_CLASS=38000\nPCI_ID=1002:744C\nPCI_SUBSYS_ID=1DA2:471E\nPCI_SLOT_NAME=%s\nMODALIAS=pci:v00001002\n", driver, address))
	m.write(device(address)+"/config", "\x02\x10\x4c\x74")
	for name, text := range files {
		m.write(device(address)+"/"+name, text)
	}
	drm := fmt.Sprintf("%s/drm/card%d", device(address), number)
	m.link(drm+"/device", "../..")
	m.link(fmt.Sprintf("sys/class/drm/card%d", number), "../../devices/pci0000:00/"+address+"/drm/card"+fmt.Sprint(number))
	m.link("sys/bus/pci/devices/"+address, "../../../devices/pci0000:00/"+address)
	// Connectors and render nodes stand beside the cards.
	m.dir(fmt.Sprintf("sys/class/drm/card%d-DP-1", number))
	m.link(fmt.Sprintf("sys/class/drm/renderD%d", 128+number), "../../devices/pci0000:00/"+address+"/drm/card"+fmt.Sprint(number))
}

// unplug takes a card from the bus, as the kernel does.
func (m tree) unplug(number int, address string) {
	m.t.Helper()
	m.remove(fmt.Sprintf("sys/class/drm/card%d", number))
	m.remove(fmt.Sprintf("sys/class/drm/renderD%d", 128+number))
	m.remove("sys/bus/pci/devices/" + address)
	m.remove(device(address))
}

func (m tree) navi() {
	m.t.Helper()
	m.card(1, navi, "amdgpu", map[string]string{
		"unique_id": "7c1b2d3e4f506172\n", "product_name": "\n", "revision": "0xc8\n",
		"mem_info_vram_total": "25753026560\n", "mem_info_vram_used": "1073741824\n",
		"mem_info_gtt_total": "33554432000\n", "mem_info_gtt_used": "20971520\n",
		"gpu_busy_percent": "37\n", "power/runtime_status": "active\n",
		"hwmon/hwmon3/temp1_input": "51600\n", "hwmon/hwmon3/temp1_label": "edge\n", "hwmon/hwmon3/temp2_input": "70000\n",
		"hwmon/hwmon3/power1_average": "61250000\n",
	})
}

// processor plugs in the GPU of a processor, with half a GiB of its own.
func (m tree) processor() {
	m.t.Helper()
	m.card(0, inCPU, "amdgpu", map[string]string{
		"mem_info_vram_total": "536870912\n", "mem_info_vram_used": "268435456\n",
		"mem_info_gtt_total": "33554432000\n", "mem_info_gtt_used": "1073741824\n",
		"hwmon/hwmon0/in1_label": "vddnb\n", "hwmon/hwmon0/power1_input": "9500000\n",
	})
}

// process starts a program with descriptors of cards.
func (m tree) process(pid int, cmdline string, infos ...string) {
	m.t.Helper()
	folder := fmt.Sprintf("proc/%d", pid)
	m.write(folder+"/cmdline", cmdline)
	m.write(folder+"/comm", "comm-"+fmt.Sprint(pid)+"\n")
	m.link(folder+"/fd/0", "/dev/null")
	m.write(folder+"/fdinfo/0", "pos:\t0\nflags:\t0100002\n")
	for i, info := range infos {
		m.link(fmt.Sprintf("%s/fd/%d", folder, i+3), "/dev/dri/renderD129")
		m.write(fmt.Sprintf("%s/fdinfo/%d", folder, i+3), info)
	}
}

// drm is what the kernel tells of a descriptor.
func drm(address string, client int, memory ...string) string {
	return fmt.Sprintf("pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t377\ndrm-driver:\tamdgpu\ndrm-client-id:\t%d\ndrm-pdev:\t%s\npasid:\t32771\n%s\n",
		client, address, strings.Join(memory, "\n"))
}

func (m tree) sampler() gpu.Sampler {
	m.t.Helper()
	s, err := (&AMDGPU{Root: m.root}).Open(context.Background(), zap.NewNop())
	require.NoError(m.t, err)
	m.t.Cleanup(func() { require.NoError(m.t, s.Close()) })
	return s
}

func look(t *testing.T, s gpu.Sampler) []gpu.Device {
	t.Helper()
	sample, err := s.Sample(context.Background(), gpu.Full)
	require.NoError(t, err)
	require.False(t, sample.At.IsZero())
	return sample.Devices
}
