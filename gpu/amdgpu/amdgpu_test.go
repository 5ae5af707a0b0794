//go:build unix

package amdgpu

import (
	"context"
	"encoding/json"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestACardIsReadWhole(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.write("usr/share/libdrm/amdgpu.ids", "# List of AMDGPU IDs\n\n1.0.0\n744C,\tC7,\tAnother\n744C,\tC8,\tAMD Radeon RX 7900 XTX\n")
	assert.Equal(t, []gpu.Device{{
		UUID: "GPU-7c1b2d3e4f506172", Name: "AMD Radeon RX 7900 XTX", Health: gpu.Healthy,
		Total: 25753026560, Free: 25753026560 - gpu.GiB, MemoryKnown: true,
		ProcessesKnown: true, Utilisation: 37, Temperature: 52, Power: 61.25,
	}}, look(t, m.sampler()))
}

func TestALookAtMemoryLeavesTheRestAlone(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.process(70, "serve\x00", drm(navi, 1, "drm-memory-vram:\t1024 KiB"))
	sample, err := m.sampler().Sample(context.Background(), gpu.Memory)
	require.NoError(t, err)
	d := sample.Devices[0]
	assert.True(t, d.MemoryKnown)
	assert.False(t, d.ProcessesKnown)
	assert.Empty(t, d.Processes)
	assert.Equal(t, []any{-1, -1, -1.0}, []any{d.Utilisation, d.Temperature, d.Power})
}

func TestCardsStandInTheOrderOfTheBusAndOthersAreNotTheirs(t *testing.T) {
	m := newTree(t)
	m.processor()
	m.navi()
	m.card(2, vega, "amdgpu", map[string]string{"mem_info_vram_total": "8573157376\n", "mem_info_vram_used": "0\n", "product_name": "Instinct\n"})
	m.card(3, "0000:01:00.0", "nouveau", nil)
	for number, address := range map[int]string{4: "10000:01:00.0", 5: "2000:01:00.0"} {
		m.card(number, address, "amdgpu", map[string]string{"mem_info_vram_total": "8573157376\n", "mem_info_vram_used": "0\n"})
	}
	m.dir("sys/class/drm/card9") // a virtual one has no device
	var uuids []string
	for i, d := range look(t, m.sampler()) {
		assert.Equal(t, i, d.Index)
		uuids = append(uuids, d.UUID+" "+d.Name)
	}
	assert.Equal(t, []string{
		"GPU-7c1b2d3e4f506172 AMD GPU 1002:744C", "PCI-" + vega + " Instinct", "PCI-" + inCPU + " AMD GPU 1002:744C",
		"PCI-2000:01:00.0 AMD GPU 1002:744C", "PCI-10000:01:00.0 AMD GPU 1002:744C",
	}, uuids)
}

func TestTheIdentityIsTheNumberThatROCmUses(t *testing.T) {
	for name, c := range map[string]struct {
		file, kfd, want string
	}{
		"16 digits":            {"00ab2d3e4f506172\n", "", "GPU-00ab2d3e4f506172"},
		"fewer digits":         {"ab\n", "", "GPU-00000000000000ab"},
		"by the computing":     {"", "171", "GPU-00000000000000ab"},
		"the file goes first":  {"cd\n", "171", "GPU-00000000000000cd"},
		"zeros are none":       {"0000000000000000\n", "0", "PCI-" + navi},
		"nobody tells":         {"", "", "PCI-" + navi},
		"a text is no number":  {"N/A\n", "", "PCI-" + navi},
		"and too long is none": {"00112233445566778\n", "", "PCI-" + navi},
	} {
		m := newTree(t)
		m.navi()
		m.remove(device(navi) + "/unique_id")
		if c.file != "" {
			m.write(device(navi)+"/unique_id", c.file)
		}
		if c.kfd != "" {
			m.write("sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0\n")
			m.write("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "33912\n")
			m.write("sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count 192\nlocation_id 768\ndomain 0\nunique_id "+c.kfd+"\n")
		}
		assert.Equal(t, c.want, look(t, m.sampler())[0].UUID, name)
	}
}

func TestTwoCardsNeverShareAnIdentity(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.card(2, vega, "amdgpu", map[string]string{"mem_info_vram_total": "8573157376\n", "mem_info_vram_used": "0\n", "unique_id": "7c1b2d3e4f506172\n"})
	devices := look(t, m.sampler())
	assert.Equal(t, []string{"GPU-7c1b2d3e4f506172", "PCI-" + vega}, []string{devices[0].UUID, devices[1].UUID})
}

func TestAProcessorsGPUCountsTheMemoryThatItMayTake(t *testing.T) {
	const own, ownFree, shared, sharedUsed = 512 * gpu.MiB, 256 * gpu.MiB, gpu.Bytes(33554432000), gpu.GiB
	for name, c := range map[string]struct {
		unified string
		change  func(tree)
		want    gpu.Device
	}{
		"by its sensor": {want: gpu.Device{Unified: true, Total: own + shared, Free: ownFree + shared - sharedUsed}},
		"by its size": {
			change: func(m tree) { m.remove(device(inCPU) + "/hwmon") },
			want:   gpu.Device{Unified: true, Total: own + shared, Free: ownFree + shared - sharedUsed},
		},
		"the system has less": {
			change: func(m tree) { m.write("proc/meminfo", "MemTotal: 65536000 kB\nMemAvailable: 2048 kB\n") },
			want:   gpu.Device{Unified: true, Total: own + shared, Free: ownFree + 2*gpu.MiB},
		},
		"its own part is the larger": {
			change: func(m tree) { m.write(device(inCPU)+"/mem_info_vram_total", "103079215104\n") },
			want:   gpu.Device{Total: 96 * gpu.GiB, Free: 96*gpu.GiB - 256*gpu.MiB},
		},
		"a card, though small": {
			change: func(m tree) {
				m.remove(device(inCPU) + "/hwmon")
				m.write(device(inCPU)+"/mem_info_vram_total", "2147483648\n")
			},
			want: gpu.Device{Total: 2 * gpu.GiB, Free: 2*gpu.GiB - 256*gpu.MiB},
		},
		"switched off": {unified: "off", want: gpu.Device{Total: own, Free: ownFree}},
		"switched on": {
			unified: "on",
			change: func(m tree) {
				m.remove(device(inCPU) + "/hwmon")
				m.write(device(inCPU)+"/mem_info_vram_total", "2147483648\n")
			},
			want: gpu.Device{Unified: true, Total: 2*gpu.GiB + shared, Free: 2*gpu.GiB - 256*gpu.MiB + shared - sharedUsed},
		},
	} {
		m := newTree(t)
		m.processor()
		if c.change != nil {
			c.change(m)
		}
		s, err := (&AMDGPU{Root: m.root, Unified: c.unified}).Open(context.Background(), zap.NewNop())
		require.NoError(t, err)
		d := look(t, s)[0]
		assert.Equal(t, c.want, gpu.Device{Unified: d.Unified, Total: d.Total, Free: d.Free}, name)
		assert.True(t, d.MemoryKnown, name)
	}
}

func TestWithoutTheSystemsAccountAProcessorsMemoryIsUnknown(t *testing.T) {
	m := newTree(t)
	m.processor()
	m.navi()
	m.write("proc/meminfo", "MemTotal: 65536000 kB\n")
	d := look(t, m.sampler())[1]
	assert.False(t, d.MemoryKnown)
	assert.Contains(t, d.Reason, "MemAvailable")
}

func TestASleepingCardIsNotWoken(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.write(device(navi)+"/power/runtime_status", "suspended\n")
	m.write(device(navi)+"/config", "\xff\xff\xff\xff") // as it would read, were it not woken
	d := look(t, m.sampler())[0]
	assert.Equal(t, gpu.Healthy, d.Health)
	assert.True(t, d.MemoryKnown)
	assert.Equal(t, []any{-1, -1, -1.0}, []any{d.Utilisation, d.Temperature, d.Power})
}

func TestWhatTheDriverDoesNotTellStaysUnknown(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.remove(device(navi) + "/hwmon")
	m.write(device(navi)+"/gpu_busy_percent", "busy\n")
	d := look(t, m.sampler())[0]
	assert.Equal(t, []any{-1, -1, -1.0}, []any{d.Utilisation, d.Temperature, d.Power})
	assert.Empty(t, d.Reason)
}

func TestACardThatIsPulledIsLostAndComesBack(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.card(2, vega, "amdgpu", map[string]string{"mem_info_vram_total": "8573157376\n", "mem_info_vram_used": "0\n"})
	s := m.sampler()
	before := look(t, s)

	m.unplug(1, navi)
	devices := look(t, s)
	require.Len(t, devices, 2)
	assert.Equal(t, gpu.Lost, devices[0].Health)
	assert.Contains(t, devices[0].Reason, "cable")
	assert.Equal(t, []any{0, before[0].UUID, before[0].Total, false, false},
		[]any{devices[0].Index, devices[0].UUID, devices[0].Total, devices[0].MemoryKnown, devices[0].ProcessesKnown})
	assert.Equal(t, before[1], devices[1], "the other keeps its place")

	m.unplug(2, vega)
	for _, d := range look(t, s) {
		assert.Equal(t, gpu.Lost, d.Health)
	}

	m.navi()
	assert.Equal(t, before[0], look(t, s)[0])
}

func TestACardWhoseDriverLetsGoIsLostAndTheReasonSaysSo(t *testing.T) {
	m := newTree(t)
	m.navi()
	s := m.sampler()
	look(t, s)
	m.remove("sys/class/drm/card1")
	assert.Contains(t, look(t, s)[0].Reason, "load that kernel module")
}

func TestACardThatIsPluggedInElsewhereIsNotLost(t *testing.T) {
	m := newTree(t)
	m.navi()
	s := m.sampler()
	look(t, s)
	m.unplug(1, navi)
	m.card(1, vega, "amdgpu", map[string]string{"mem_info_vram_total": "25753026560\n", "mem_info_vram_used": "0\n", "unique_id": "7c1b2d3e4f506172\n"})
	devices := look(t, s)
	require.Len(t, devices, 1)
	assert.Equal(t, gpu.Healthy, devices[0].Health)
	assert.Len(t, s.(*sampler).known, 1, "its old place is forgotten")
	m.unplug(1, vega)
	assert.Len(t, look(t, s), 1, "one card is lost once")
}

func TestACardThatNoLongerAnswersOnTheBusIsLost(t *testing.T) {
	m := newTree(t)
	m.navi()
	s := m.sampler()
	look(t, s)
	m.write(device(navi)+"/config", "\xff\xff\xff\xff")
	d := look(t, s)[0]
	assert.Equal(t, gpu.Lost, d.Health)
	assert.Equal(t, gpu.Bytes(25753026560), d.Total)
	assert.False(t, d.MemoryKnown)
	assert.Contains(t, d.Reason, "power and seat")
}

func TestOneIdentityStaysEvenIfItsNumberIsNoLongerTold(t *testing.T) {
	m := newTree(t)
	m.navi()
	s := m.sampler()
	look(t, s)
	m.remove(device(navi) + "/unique_id")
	devices := look(t, s)
	require.Len(t, devices, 1)
	assert.Equal(t, "GPU-7c1b2d3e4f506172", devices[0].UUID)
}

func TestMemoryThatCannotBeReadIsUnknownAndNoReasonToLoseTheCard(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.card(2, vega, "amdgpu", map[string]string{"mem_info_vram_total": "8573157376\n", "mem_info_vram_used": "full\n"})
	d := look(t, m.sampler())[1]
	assert.Equal(t, gpu.Healthy, d.Health)
	assert.False(t, d.MemoryKnown)
	assert.Equal(t, gpu.Bytes(8573157376), d.Total)
	assert.Contains(t, d.Reason, `"full"`)
}

func TestErrorsSayWhatToDo(t *testing.T) {
	for name, c := range map[string]struct {
		change func(tree)
		want   []string
	}{
		"no sysfs":     {func(m tree) { m.remove("sys/class/drm") }, []string{"/sys/class/drm is not there", "load the kernel module", "root"}},
		"no card":      {func(tree) {}, []string{"no GPU of the driver amdgpu", "virtual machine"}},
		"another's":    {func(m tree) { m.card(0, navi, "i915", nil) }, []string{"no GPU of the driver amdgpu"}},
		"no size":      {func(m tree) { m.navi(); m.remove(device(navi) + "/mem_info_vram_total") }, []string{"mem_info_vram_total", "newer kernel"}},
		"no use":       {func(m tree) { m.navi(); m.remove(device(navi) + "/mem_info_vram_used") }, []string{"mem_info_vram_used", "newer kernel"}},
		"not a number": {func(m tree) { m.navi(); m.write(device(navi)+"/mem_info_vram_used", "-5\n") }, []string{`"-5"`}},
		"a folder":     {func(m tree) { m.remove("sys/class/drm"); m.write("sys/class/drm", "") }, []string{"kernel's log"}},
	} {
		m := newTree(t)
		c.change(m)
		_, err := m.sampler().Sample(context.Background(), gpu.Memory)
		for _, part := range append(c.want, "gpu amdgpu: ") {
			assert.ErrorContains(t, err, part, name)
		}
	}
	assert.ErrorContains(t, advise(os.ErrPermission), "let Caddy's user read it")
}

// A named pipe is a file whose reader waits, as for a driver that hangs.
func TestALookThatHangsIsLeftAloneAndNoneJoinsIt(t *testing.T) {
	m := newTree(t)
	m.navi()
	s := m.sampler()
	m.remove(device(navi) + "/mem_info_vram_used")
	pipe := m.path(device(navi) + "/mem_info_vram_used")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))

	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := s.Sample(ctx, gpu.Memory)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "not answered in time")

	ctx, cancel = context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err = s.Sample(ctx, gpu.Memory)
	assert.ErrorContains(t, err, "an earlier look")

	writer, err := os.OpenFile(pipe, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = writer.WriteString("0\n")
	require.NoError(t, err)
	require.NoError(t, os.Remove(pipe))
	m.write(device(navi)+"/mem_info_vram_used", "0\n")
	require.NoError(t, writer.Close())
	assert.True(t, look(t, s)[0].MemoryKnown)
}

func TestASamplerSaysWhatItIs(t *testing.T) {
	s := newTree(t).sampler()
	assert.Equal(t, "amdgpu", s.Name())
	assert.NotEmpty(t, s.Why())
	assert.Equal(t, 50*time.Millisecond, s.MinInterval())
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := s.Sample(ctx, gpu.Memory)
	assert.ErrorIs(t, err, context.Canceled)
}

func TestConfiguration(t *testing.T) {
	unmarshal := func(text string) (caddyfile.Unmarshaler, error) {
		d := caddyfile.NewTestDispenser(text)
		d.Next()
		d.Next()
		return caddyfile.UnmarshalModule(d, "gpu_broker.samplers.amdgpu")
	}
	module, err := unmarshal("gpu amdgpu {\n root /host\n unified off\n}")
	require.NoError(t, err)
	text, err := json.Marshal(module)
	require.NoError(t, err)
	assert.JSONEq(t, `{"root":"/host","unified":"off"}`, string(text))
	for _, text := range []string{"gpu amdgpu 24GiB", "gpu amdgpu {\n path x\n}", "gpu amdgpu {\n root\n}", "gpu amdgpu {\n root /a\n root /b\n}"} {
		_, err := unmarshal(text)
		assert.Error(t, err, text)
	}
	for _, a := range []AMDGPU{{Root: "host"}, {Unified: "maybe"}} {
		assert.Error(t, a.Validate())
		_, err := a.Open(context.Background(), zap.NewNop())
		assert.Error(t, err)
	}
}
