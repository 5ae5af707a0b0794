package doctor

import (
	"context"
	"net"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// facts are what was found out; nobody changes them once they are gathered.
type facts struct {
	site      *Site
	lines     lines
	routes    *routes // of the site, from its JSON
	gpu       gpuFacts
	host      host
	listeners listeners
	probes    map[string]probe    // by consumer
	answers   map[string]Identity // by address
	unnamed   []Identity          // at addresses that the configuration does not name
	sockets   map[string]error    // whether those that lifecycles need can be opened
	unended   []string            // what did not end in time
}

// gpuFacts are what a look at the GPUs came to.
type gpuFacts struct {
	looked  bool
	driver  string // as configured
	name    string // of the sampler that serves
	why     string
	sample  gpu.Sample
	err     error
	better  string // the sampler that auto would take, if it was tried and works
	autoErr error  // else why it does not
}

type probe struct {
	report  lifecycle.Report
	traits  lifecycle.Traits
	owns    func(pid int) bool // nil: the driver can't tell
	busyErr error
}

// late is what a look gets beyond its time-out, to say that it was cut off.
const late = time.Second

// gather finds out everything, all at once.
func gather(ctx context.Context, s *Site) *facts {
	f := &facts{
		site: s, lines: lines{}, probes: map[string]probe{}, answers: map[string]Identity{}, sockets: map[string]error{},
	}
	f.routes = readRoutes(s.Config)
	f.host = lookAtHost(append(slices.Clone(s.Data), f.routes.storage...))
	f.listeners = readListeners()

	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	g := &gathering{ctx: ctx, done: make(chan job)}
	g.start("the look at the GPUs", func(ctx context.Context) func(*facts) {
		found := lookAtGPUs(ctx, s)
		return func(f *facts) { f.gpu = found }
	})
	named := map[string]bool{}
	for _, c := range s.consumers() {
		if c.Upstream != "" {
			named[c.Upstream] = true
		}
		d := s.Drivers[c.Name]
		if d == nil {
			continue
		}
		g.start("the probe of "+c.Name, func(ctx context.Context) func(*facts) {
			found := ask(ctx, d)
			return func(f *facts) { f.probes[c.Name] = found }
		})
	}
	for address := range named {
		g.start("the look at "+address, func(ctx context.Context) func(*facts) {
			found := Identify(ctx, address)
			return func(f *facts) { f.answers[address] = found }
		})
	}
	for _, address := range f.otherAddresses() {
		g.start("the look at "+address, func(ctx context.Context) func(*facts) {
			found := Identify(ctx, address)
			return func(f *facts) { f.unnamed = append(f.unnamed, found) }
		})
	}
	for _, socket := range s.sockets() {
		g.start("opening "+socket, func(ctx context.Context) func(*facts) {
			err := dial(ctx, socket)
			return func(f *facts) { f.sockets[socket] = err }
		})
	}
	g.collect(f)
	slices.SortFunc(f.unnamed, func(a, b Identity) int { return strings.Compare(a.Address, b.Address) })
	return f
}

// gathering runs looks. Each sends its job once, unless nobody waits any more.
type gathering struct {
	ctx  context.Context
	done chan job
	open map[string]bool
}

type job struct {
	name  string
	apply func(*facts)
}

func (g *gathering) start(name string, look func(context.Context) func(*facts)) {
	if g.open == nil {
		g.open = map[string]bool{}
	}
	g.open[name] = true
	abandoned, cancel := context.WithTimeout(context.WithoutCancel(g.ctx), untilEnd(g.ctx)+late)
	go func() {
		defer cancel()
		j := job{name, look(g.ctx)}
		select {
		case g.done <- j:
		case <-abandoned.Done():
		}
	}()
}

// collect takes in what the looks bring, until all have ended or their time and a little more is over.
func (g *gathering) collect(f *facts) {
	end := time.NewTimer(untilEnd(g.ctx) + late)
	defer end.Stop()
	for len(g.open) > 0 {
		select {
		case j := <-g.done:
			delete(g.open, j.name)
			j.apply(f)
		case <-end.C:
			f.unended = sortedKeys(g.open)
			return
		}
	}
}

func untilEnd(ctx context.Context) time.Duration {
	end, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return max(0, time.Until(end))
}

func judgeUnended(f *facts) (out []Finding) {
	for _, what := range f.unended {
		out = append(out, Finding{Severity: Warning, Check: "doctor", What: what + " did not end within " + f.site.Timeout.String(),
			Mend: "something there hangs; look at it, or give --timeout more"})
	}
	return out
}

// ask probes a server. Whether it works is asked only of one that may hold
// something: of others the question may wake them.
func ask(ctx context.Context, d lifecycle.Driver) probe {
	p := probe{traits: d.Traits(), report: d.Probe(ctx)}
	if s, ok := d.(lifecycle.Supervisor); ok {
		p.owns = s.Owns
	}
	if p.traits.Busy && p.report.Outcome == lifecycle.Answered && p.report.Loaded != lifecycle.No && !p.traits.UnloadModel {
		_, p.busyErr = d.Busy(ctx, lifecycle.Target{})
	}
	return p
}

func lookAtGPUs(ctx context.Context, s *Site) gpuFacts {
	found := gpuFacts{looked: true, driver: driverOf(s.Broker)}
	if s.Sampler != nil {
		found.name, found.why, found.sample, found.err = sampleOnce(ctx, s.Sampler)
	}
	if s.Auto != nil && found.driver != config.DefaultDriver && found.driver != "nvml" {
		found.better, _, _, found.autoErr = sampleOnce(ctx, s.Auto)
	}
	return found
}

// sampleOnce opens a sampler for one look.
func sampleOnce(ctx context.Context, guest gpu.Guest) (name, why string, sample gpu.Sample, err error) {
	sampler, err := guest.Open(ctx, zap.NewNop())
	if err != nil {
		return "", "", sample, err
	}
	defer func() { _ = sampler.Close() }() // it was only read
	sample, err = sampler.Sample(ctx, gpu.Full)
	return sampler.Name(), sampler.Why(), sample, err
}

// consumers are those that are served.
func (s *Site) consumers() (out []*config.Consumer) {
	if s.Broker == nil {
		return nil
	}
	for _, c := range s.Broker.Consumers {
		if c != nil && c.IsEnabled() {
			out = append(out, c)
		}
	}
	return out
}

// otherAddresses are those where an engine would listen by default, and that
// neither the configuration names nor Caddy itself is to have.
func (f *facts) otherAddresses() (out []string) {
	taken := map[string]bool{}
	for _, c := range f.site.consumers() {
		if host, port, err := net.SplitHostPort(c.Upstream); err == nil && (config.IsOwnHost(host) || f.listeners.isOwn(host)) {
			taken[port] = true
		}
	}
	for _, l := range f.routes.listens {
		taken[l.port] = true
	}
	for _, port := range DefaultPorts() {
		if !taken[port] {
			out = append(out, net.JoinHostPort("127.0.0.1", port))
		}
	}
	return out
}

// dial opens a socket, given as unix:///path or tcp://host:port, and closes it.
func dial(ctx context.Context, socket string) error {
	network, address, _ := strings.Cut(socket, "://")
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return err
	}
	return conn.Close()
}
