//go:build unix

package amdgpu

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestProcessesAreThoseThatHoldTheCardsMemory(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.card(2, vega, "amdgpu", map[string]string{"mem_info_vram_total": "8573157376\n", "mem_info_vram_used": "0\n"})
	m.process(900, "/usr/bin/ollama\x00serve\x00",
		drm(navi, 5, "drm-total-vram:\t9 MiB", "drm-resident-vram:\t2048 KiB", "drm-memory-vram:\t7 KiB", "drm-memory-gtt: \t64 KiB"),
		drm(navi, 5, "drm-resident-vram:\t2048 KiB"),             // a second descriptor of the same client
		drm(navi, 6, "drm-memory-vram:\t1 MiB"),                  // another client
		drm(vega, 5, "drm-memory-vram:\t4096"),                   // another card; bytes
		drm(vega, 8, "drm-memory-vram:\t4 parsec"),               // no unit of the kernel's
		"drm-driver:\ti915\ndrm-client-id:\t9\ndrm-pdev:\t"+navi) // not amdgpu's
	m.process(901, "runner\x00", drm(navi, 5, "drm-resident-vram:\t2048 KiB")) // has it from its parent
	m.process(902, "", drm(navi, 7, "drm-total-vram:\t3 MiB"))
	m.process(903, "idle\x00", drm(navi, 10, "drm-memory-vram:\t0"))
	m.process(904, "none\x00")
	// What a descriptor that is none of a card says does not count.
	m.link("proc/904/fd/9", "/tmp/lie")
	m.write("proc/904/fdinfo/9", drm(navi, 77, "drm-memory-vram:\t8 MiB"))
	// Where the link cannot be followed, the text alone tells.
	m.write("proc/905/fdinfo/4", drm(navi, 11, "drm-memory-vram:\t5 MiB"))
	m.dir("proc/906") // ends at this moment

	devices := look(t, m.sampler())
	assert.Equal(t, []gpu.Process{
		{PID: 900, Name: "/usr/bin/ollama", Used: 3 * gpu.MiB},
		{PID: 902, Name: "comm-902", Used: 3 * gpu.MiB},
		{PID: 905, Used: 5 * gpu.MiB},
	}, devices[0].Processes)
	assert.Equal(t, []gpu.Process{{PID: 900, Name: "/usr/bin/ollama", Used: 4096}}, devices[1].Processes)
	assert.True(t, devices[0].ProcessesKnown && devices[1].ProcessesKnown)
}

func TestTheAccountOfTheComputingCountsWhereItIsLarger(t *testing.T) {
	m := newTree(t)
	m.navi()
	m.write("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "33912\n")
	// A part of the card: its number is in the topmost bits.
	m.write("sys/class/kfd/kfd/topology/nodes/1/properties", fmt.Sprintf("location_id %d\ndomain 0\n", 1<<28|0x300))
	m.process(50, "old\x00", drm(navi, 1, "drm-memory-vram:\t1 MiB"))
	m.process(51, "new\x00", drm(navi, 2, "drm-memory-vram:\t9 MiB"))
	m.process(52, "alone\x00")
	for pid, used := range map[int]string{50: "4194304\n", 51: "4194304\n", 52: "1048576\n", 53: "0\n"} {
		m.write(fmt.Sprintf("sys/class/kfd/kfd/proc/%d/vram_33912", pid), used)
	}
	assert.Equal(t, []gpu.Process{
		{PID: 50, Name: "old", Used: 4 * gpu.MiB}, {PID: 51, Name: "new", Used: 9 * gpu.MiB}, {PID: 52, Name: "alone", Used: gpu.MiB},
	}, look(t, m.sampler())[0].Processes)
}

func TestOfAProcessorsGPUTheSystemsMemoryCounts(t *testing.T) {
	m := newTree(t)
	m.processor()
	m.process(60, "serve\x00", drm(inCPU, 1, "drm-memory-vram:\t1 MiB", "drm-memory-gtt:\t6 MiB"))
	assert.Equal(t, []gpu.Process{{PID: 60, Name: "serve", Used: 7 * gpu.MiB}}, look(t, m.sampler())[0].Processes)
}

func TestAPartOfTheProcessesIsNotTakenForAll(t *testing.T) {
	for name, change := range map[string]func(tree){
		"those of others are hidden": func(m tree) { m.remove("proc/1") },
		"a container's own":          func(m tree) { m.remove("proc/1/ns/pid"); m.link("proc/1/ns/pid", "pid:[4026533001]") },
		"one is guarded":             func(m tree) { m.write("proc/70/fdinfo", "a file in place of the folder cannot be listed") },
	} {
		m := newTree(t)
		m.navi()
		m.process(60, "serve\x00", drm(navi, 1, "drm-memory-vram:\t1 MiB"))
		change(m)
		d := look(t, m.sampler())[0]
		assert.False(t, d.ProcessesKnown, name)
		assert.Empty(t, d.Processes, name)
		assert.True(t, d.MemoryKnown, name)
		assert.Empty(t, d.Reason, name)
	}
}

func FuzzDescriptors(f *testing.F) {
	for _, seed := range []string{drm(navi, 5, "drm-resident-vram:\t2048 KiB"), "", "drm-driver:", drm(navi, 1, "drm-memory-vram:\t9223372036854775807 MiB"), drm("x", 1, "drm-memory-vram: -1")} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, held, ok := parseClient(text)
		if !ok {
			return
		}
		if c.id == "" || !addressPattern.MatchString(c.address) {
			t.Fatalf("%+v", c)
		}
		for kind, size := range held {
			if size < 0 {
				t.Fatalf("%s %d", kind, size)
			}
		}
	})
}
