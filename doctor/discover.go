package doctor

import (
	"cmp"
	"context"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// Discovery is what a machine has: its GPUs, and the model servers that run at their default ports.
type Discovery struct {
	Sampler string // that works; empty: none does
	Why     string // this one, or none
	Devices []gpu.Device
	Servers []Server
	taken   map[string]bool // ports that somebody listens at
}

// Server is a model server that was found.
type Server struct {
	Identity
	Name   string // as a consumer
	GPU    int
	Report lifecycle.Report
	// Measured is what its processes hold of the GPU; 0: that is not known.
	Measured gpu.Bytes
}

// Opener opens a driver that can probe a server of a preset; it starts nothing.
type Opener func(preset, upstream string) (lifecycle.Driver, error)

// Discover looks at a machine, within the time-out twice over. It changes nothing.
func Discover(ctx context.Context, timeout time.Duration, sampler gpu.Guest, open Opener) *Discovery {
	f := gather(ctx, &Site{Sampler: sampler, Timeout: timeout})
	d := &Discovery{Sampler: f.gpu.name, Why: f.gpu.why, Devices: f.gpu.sample.Devices, taken: map[string]bool{}}
	switch {
	case f.gpu.err != nil:
		d.Sampler, d.Why, d.Devices = "", oneLine(f.gpu.err), nil
	case !f.gpu.looked:
		d.Why = "the look at the GPUs did not end within " + timeout.String()
	}
	for _, l := range f.listeners.list {
		_, port, err := net.SplitHostPort(l.address.String())
		if err == nil {
			d.taken[port] = true
		}
	}
	names := map[string]int{}
	slices.SortFunc(f.unnamed, func(a, b Identity) int {
		return cmp.Or(cmp.Compare(rankOf(a.Engine), rankOf(b.Engine)), cmp.Compare(a.Address, b.Address))
	})
	for _, id := range f.unnamed {
		if id.Engine == "" {
			continue
		}
		s := Server{Identity: id, Name: id.Engine, Report: lifecycle.Report{Resident: -1}}
		if names[id.Engine]++; names[id.Engine] > 1 {
			_, port, _ := net.SplitHostPort(id.Address) // it is one of ours
			s.Name += "-" + port
		}
		s.measure(f, d.Devices)
		d.Servers = append(d.Servers, s)
	}
	d.probe(ctx, timeout, open)
	return d
}

// rankOf orders kinds of servers as the doctor knows them.
func rankOf(engine string) int {
	return slices.IndexFunc(engines, func(e Engine) bool { return e.Preset == engine })
}

// measure sums what the server's processes hold, and notes where.
func (s *Server) measure(f *facts, devices []gpu.Device) {
	host, port, err := net.SplitHostPort(s.Address)
	if err != nil {
		return
	}
	var servers []int
	for _, l := range f.listeners.serving(host, port) {
		servers = append(servers, l.pids...)
	}
	most := gpu.Bytes(0)
	for _, d := range devices {
		sum := gpu.Bytes(0)
		for _, p := range d.Processes {
			if p.Used > 0 && comesFrom(p.PID, servers) {
				sum += p.Used
			}
		}
		if sum > most {
			most, s.GPU = sum, d.Index
		}
	}
	s.Measured = most
}

// comesFrom reports whether a process is one of the servers, comes from one, or is in the same service or container.
func comesFrom(pid int, servers []int) bool {
	if pid <= 0 {
		return false
	}
	for _, p := range line(pid) {
		if slices.Contains(servers, p.pid) {
			return true
		}
	}
	own := group(pid)
	return own != "" && slices.ContainsFunc(servers, func(s int) bool { return group(s) == own })
}

// probe asks the servers what they hold.
func (d *Discovery) probe(ctx context.Context, timeout time.Duration, open Opener) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	g := &gathering{ctx: ctx, done: make(chan job)}
	for i := range d.Servers {
		s := &d.Servers[i]
		driver, err := open(s.Engine, s.Address)
		if err != nil {
			continue // what it holds is not known
		}
		defer func() { _ = driver.Close() }() // it has started nothing
		g.start("the probe of "+s.Name, func(ctx context.Context) func(*facts) {
			report := driver.Probe(ctx)
			return func(*facts) { s.Report = report }
		})
	}
	g.collect(&facts{})
}

// FreePort is the first port from first on at which nobody listens.
func (d *Discovery) FreePort(first int) string {
	for port := first; port < 1<<16; port++ {
		if text := strconv.Itoa(port); !d.taken[text] {
			return text
		}
	}
	return strconv.Itoa(first)
}
