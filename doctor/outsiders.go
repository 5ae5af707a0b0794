package doctor

import (
	"fmt"
	"net"
	"slices"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// worthTelling is how much an outsider must hold: desktops hold a little in many programs.
const worthTelling = 64 * gpu.MiB

// judgeOutsiders says which programs hold memory and are none of ours.
func judgeOutsiders(f *facts) (out []Finding) {
	for _, d := range f.gpu.sample.Devices {
		for _, p := range f.outsiders(d) {
			who := fmt.Sprintf("%q (PID %d)", p.Name, p.PID)
			if p.PID <= 0 {
				who = fmt.Sprintf("%q", p.Name)
			}
			if p.Name == "" {
				who = fmt.Sprintf("a program of PID %d", p.PID)
			}
			mend := "end it, or name it as a consumer; if it is a consumer's server under another name, write processes " + orWord(p.Name, "NAME") + " there"
			out = append(out, Finding{Severity: Warning, Check: "outsiders", What: fmt.Sprintf("%s holds %s of GPU %d and is no consumer's: the broker can't unload it", who, p.Used, d.Index), Mend: mend})
		}
	}
	return out
}

func orWord(word, otherwise string) string {
	if word == "" {
		return otherwise
	}
	return word
}

// outsidersOn is how much they hold of a GPU, and who they are.
func (f *facts) outsidersOn(d gpu.Device) (sum gpu.Bytes, names []string) {
	for _, p := range f.outsiders(d) {
		sum += p.Used
		names = append(names, orWord(p.Name, fmt.Sprintf("PID %d", p.PID)))
	}
	return sum, names
}

func (f *facts) outsiders(d gpu.Device) (out []gpu.Process) {
	if !d.ProcessesKnown {
		return nil
	}
	for _, p := range d.Processes {
		if p.Used >= worthTelling && !f.isOurs(p) {
			out = append(out, p)
		}
	}
	return out
}

// isOurs reports whether a process is a consumer's server, or comes from one, or from Caddy.
func (f *facts) isOurs(p gpu.Process) bool {
	servers := map[int]bool{}
	groups := map[string]bool{}
	for _, c := range f.site.consumers() {
		if slices.Contains(c.Processes, p.Name) {
			return true
		}
		if owns := f.probes[c.Name].owns; owns != nil && p.PID > 0 && owns(p.PID) {
			return true
		}
		host, port, err := net.SplitHostPort(c.Upstream)
		if err != nil {
			continue
		}
		for _, l := range f.listeners.serving(host, port) {
			for _, pid := range l.pids {
				servers[pid] = true
				if g := group(pid); g != "" {
					groups[g] = true
				}
			}
		}
	}
	if p.PID <= 0 {
		return false
	}
	if g := group(p.PID); g != "" && groups[g] {
		return true
	}
	for _, ancestor := range line(p.PID) {
		if servers[ancestor.pid] || isCaddy(ancestor) {
			return true
		}
	}
	return false
}
