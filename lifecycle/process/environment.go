package process

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const (
	visibleDevices = "CUDA_VISIBLE_DEVICES"
	deviceOrder    = "CUDA_DEVICE_ORDER"
)

// marker is the variable in the environment of a server and of all that it
// starts by which these are known even if they leave its process group.
const marker = "GPU_BROKER_CHILD"

// notInherited are variables that the service manager means for Caddy alone.
var notInherited = []string{"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}

// environment is what the server gets, beside what Caddy has inherited. Later ones win.
func (p *plan) environment(inherited []string, t lifecycle.Target, values map[string]string, mark string) []string {
	env := slices.DeleteFunc(slices.Clone(inherited), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return slices.Contains(notInherited, name) || p.envClear && !p.passes(name)
	})
	if u := p.user; u != nil {
		env = append(env, "HOME="+u.home, "USER="+u.name, "LOGNAME="+u.name)
	}
	if len(t.GPUs) > 0 {
		// Else CUDA would count the GPUs in another order than the driver's tools.
		env = append(env, deviceOrder+"=PCI_BUS_ID", visibleDevices+"="+values[gpusItem])
	}
	for name, value := range p.env {
		env = append(env, name+"="+value.render(values))
	}
	return append(env, marker+"="+mark)
}

// alwaysInherited are variables that hardly any program runs without, and that hold no secrets.
var alwaysInherited = []string{"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR"}

// passes reports whether a variable of Caddy's reaches the server though its environment is cleared.
func (p *plan) passes(name string) bool {
	return slices.Contains(alwaysInherited, name) || slices.ContainsFunc(p.envPass, func(pattern string) bool {
		stem, open := strings.CutSuffix(pattern, "*")
		return name == pattern || open && strings.HasPrefix(name, stem)
	})
}

// valuesOf are the values of the items, without the port.
func valuesOf(t lifecycle.Target) map[string]string {
	var uuids, indices []string
	part := math.Inf(1)
	for _, g := range t.GPUs {
		indices = append(indices, strconv.Itoa(g.Index))
		if g.UUID != "" {
			uuids = append(uuids, g.UUID)
		}
		if g.Total > 0 && g.Claim > 0 { // of several the least
			part = min(part, float64(g.Claim)/float64(g.Total))
		}
	}
	if len(uuids) < len(indices) {
		uuids = indices
	}
	if math.IsInf(part, 1) {
		part = 0.9
	}
	part = math.Floor(min(max(part, 0.01), 0.99)*1e4+1e-6) / 1e4 // down: no more than is booked
	count := strconv.Itoa(len(t.GPUs))
	return map[string]string{
		gpusItem:        strings.Join(uuids, ","),
		indicesItem:     strings.Join(indices, ","),
		countItem:       count,
		parallelItem:    count,
		utilisationItem: strconv.FormatFloat(part, 'f', -1, 64),
	}
}
