package doctor

import (
	"fmt"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// claim is what one consumer, or one of its models, takes.
type claim struct {
	c      *config.Consumer
	name   string
	source string
	size   gpu.Bytes
	pin    bool
	stays  bool // it makes way for nobody
}

func (f *facts) claims() (out []claim) {
	shared := map[string]gpu.Bytes{} // by those that share a process, by the other's name
	for _, c := range f.site.consumers() {
		if c.Shares != "" {
			shared[c.Shares] += c.VRAM
		}
	}
	for _, c := range f.site.consumers() {
		if c.Cloud || c.Shares != "" {
			continue
		}
		stays := c.Pin || c.NoEvict || c.VRAMManaged
		if c.VRAM > 0 && !c.HasModels() {
			out = append(out, claim{c, c.Name, f.lines.of(c.Source, "vram"), c.VRAM + shared[c.Name], c.Pin, stays})
		}
		for _, m := range c.Models {
			size, where := m.VRAM, f.lines.of(m.Source, "vram")
			if size == 0 {
				size, where = c.VRAM, f.lines.of(c.Source, "vram")
			}
			out = append(out, claim{c, m.Name, where, size, c.Pin || m.Pin, stays || m.Pin})
		}
	}
	return out
}

// judgeClaims holds what consumers claim against their GPUs.
func judgeClaims(f *facts) (out []Finding) {
	b := f.site.Broker
	if b == nil || b.Scheduler != config.Evicting || f.gpu.err != nil || len(f.gpu.sample.Devices) == 0 {
		return nil
	}
	byGPU := map[int][]claim{}
	for _, cl := range f.claims() {
		byGPU[cl.c.GPU] = append(byGPU[cl.c.GPU], cl)
	}
	for _, index := range sortedKeys(byGPU) {
		d, ok := device(f.gpu.sample.Devices, index)
		if !ok {
			for _, cl := range byGPU[index] {
				out = append(out, Finding{Severity: Error, Check: "claims", Consumer: cl.c.Name, Where: f.lines.of(cl.c.Source, "gpu"),
					What: fmt.Sprintf("it is on GPU %d, and there is none: the machine has %s", index, count(len(f.gpu.sample.Devices), "GPU")), Mend: "write the index of one that there is, as nvidia-smi shows it"})
			}
			continue
		}
		out = append(out, f.judgeCard(d, byGPU[index])...)
	}
	return out
}

func device(list []gpu.Device, index int) (gpu.Device, bool) {
	for _, d := range list {
		if d.Index == index {
			return d, true
		}
	}
	return gpu.Device{}, false
}

func (f *facts) judgeCard(d gpu.Device, list []claim) (out []Finding) {
	if d.Total == 0 {
		return nil
	}
	b := f.site.Broker
	cushion := b.CushionFor(d.Unified)
	room := d.Total - b.Reserve
	takes := fmt.Sprintf("GPU %d has %s", d.Index, d.Total)
	if b.Reserve > 0 {
		takes += fmt.Sprintf(", of which %s are reserved", b.Reserve)
	}
	foreign, names := f.outsidersOn(d)
	var pins, stays gpu.Bytes
	var pinned, staying []string
	for _, cl := range list {
		if cl.pin {
			pins, pinned = pins+cl.size, append(pinned, cl.name)
		}
		if cl.stays {
			stays, staying = stays+cl.size, append(staying, cl.name)
		}
	}
	add := func(severity Severity, cl claim, what, mend string) {
		out = append(out, Finding{Severity: severity, Check: "claims", Consumer: cl.c.Name, Where: cl.source, What: what, Mend: mend})
	}
	for _, cl := range list {
		others := pins
		if cl.pin {
			others -= cl.size
		}
		whose := ""
		if cl.name != cl.c.Name {
			whose = "model " + cl.name + ": "
		}
		needs := fmt.Sprintf("%sit claims %s, with the cushion %s", whose, cl.size, cl.size+cushion)
		switch {
		case cl.size+cushion > room:
			add(Error, cl, needs+", and never fits: "+takes, "give a smaller model or quantisation, or less context, and write what it then needs; or place it on another GPU")
		case cl.size+cushion+others > room && !cl.pin:
			add(Error, cl, needs+fmt.Sprintf(", and never fits beside what is pinned (%s: %s): %s", strings.Join(pinned, ", "), pins, takes), "pin less")
		case cl.size+cushion+foreign > room:
			add(Warning, cl, needs+fmt.Sprintf(", and does not fit while others hold %s (%s): %s", foreign, strings.Join(names, ", "), takes), "end these programs, or name them as consumers")
		}
	}
	summed := Finding{Check: "claims", Where: f.lines.matching(f.site.File, 1, f.site.File, "gpu_broker")}
	switch {
	case pins > room:
		summed.Severity = Error
		out = append(out, summed.saying(fmt.Sprintf("what is pinned claims %s together (%s), and %s: not all of it can be loaded, and none makes way", pins, strings.Join(pinned, ", "), takes), "pin less"))
	case stays > room:
		summed.Severity = Warning
		out = append(out, summed.saying(fmt.Sprintf("what is never unloaded for others (pin, no_evict, vram_managed) claims %s together (%s), and %s: they wait for each other's idle time",
			stays, strings.Join(staying, ", "), takes), "take no_evict away from some of them"))
	}
	return out
}
