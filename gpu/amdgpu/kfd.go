package amdgpu

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// node is a GPU as the kernel's part for computing knows it. A card that is
// split into parts has several.
type node struct {
	id      string // in the names of other files
	address string
	unique  string
}

// nodes lists what can be read; a kernel without that part has none.
func (f files) nodes() (list []node) {
	folder := f.path("sys", "class", "kfd", "kfd", "topology", "nodes")
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	for _, entry := range entries {
		id, err := read(filepath.Join(folder, entry.Name(), "gpu_id"))
		if err != nil || id == "0" {
			continue // a CPU, or a GPU that is not ours to use
		}
		facts, err := words(filepath.Join(folder, entry.Name(), "properties"), " ")
		if err != nil {
			continue
		}
		location, err := strconv.ParseUint(facts["location_id"], 10, 32) // of a part, its number stands in the topmost bits
		domain, domainErr := strconv.ParseUint(facts["domain"], 10, 32)
		if err != nil || domainErr != nil {
			continue
		}
		n := node{id: id, address: fmt.Sprintf("%04x:%02x:%02x.%d", domain, location>>8&0xff, location>>3&0x1f, location&7)}
		if number, err := strconv.ParseUint(facts["unique_id"], 10, 64); err == nil {
			n.unique = unique(strconv.FormatUint(number, 16))
		}
		list = append(list, n)
	}
	return list
}

// computing adds what the programs that compute hold.
func (f files) computing(nodes []node, add func(address string, pid int, used gpu.Bytes)) {
	folder := f.path("sys", "class", "kfd", "kfd", "proc")
	entries, err := os.ReadDir(folder)
	if err != nil {
		return
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid <= 0 {
			continue
		}
		for _, n := range nodes {
			if used, err := number(filepath.Join(folder, entry.Name(), "vram_"+n.id)); err == nil {
				add(n.address, pid, gpu.Bytes(used))
			}
		}
	}
}
