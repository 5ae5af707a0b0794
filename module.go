// Package gpubroker is a Caddy module that lets many model servers share the
// GPUs of a machine behind one site. The handler gpu_broker stands in front of
// reverse_proxy: a request gets its place on the GPU, the model that it wants is
// loaded, others make way, and only then is it passed on.
package gpubroker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	_ "github.com/gpu-broker/caddy-gpu-broker/gpu/samplers" // every sampler
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	_ "github.com/gpu-broker/caddy-gpu-broker/lifecycle/docker" // a server that Docker starts
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
	_ "github.com/gpu-broker/caddy-gpu-broker/lifecycle/systemd" // a server that systemd starts
)

func init() {
	caddy.RegisterModule(App{})
	httpcaddyfile.RegisterGlobalOption("gpu_broker", parseGlobal)
}

// App shares the GPUs of a machine among model servers. Its handler
// `gpu_broker` gives requests their place on the GPU; what servers there are,
// how much memory each takes and how it is loaded and unloaded is told here.
type App struct {
	config.Broker

	pool       *pooled
	generation *broker.Generation
	starts     map[string]bool            // the consumers whose servers the broker starts and stops
	modelNames map[string]lifecycle.Names // how their servers compare models' names, by consumer
	ctx        caddy.Context
	started    bool
	transports []*reverseproxy.HTTPTransport // of the site, once it has started
	connected  map[*caddyhttp.Server]bool    // the servers that keepConnections has seen
}

// CaddyModule returns the Caddy module information.
func (App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "gpu_broker", New: func() caddy.Module { return new(App) }}
}

// Provision parses and checks. It starts nothing and changes no running broker:
// it also runs for `caddy validate` and for configurations that fail later.
func (a *App) Provision(ctx caddy.Context) error {
	a.ctx, a.connected = ctx, map[*caddyhttp.Server]bool{}
	faults := config.Resolve(&a.Broker, lookUpPreset)
	tell(ctx.Logger(), false, a.Warnings())
	g := &broker.Generation{Config: &a.Broker, Logger: ctx.Logger(), Lifecycles: map[string]lifecycle.Guest{}, Keys: map[string]string{}}
	if err := errors.Join(faults, a.loadGuests(ctx, g)); err != nil {
		return err
	}
	if err := g.Check(); err != nil {
		return err
	}
	events, err := ctx.App("events")
	if err != nil {
		return fmt.Errorf("getting the events app: %w", err)
	}
	g.Dir = filepath.Join(caddy.AppDataDir(), "gpu_broker", "servers")
	g.Observer = observer{ctx: ctx, events: events.(*caddyevents.App)}
	g.Store = &store{storage: ctx.Storage(), name: learntName}
	g.FlagStore = &store{storage: ctx.Storage(), name: flagsName}
	if g.CloudSeed, err = broker.CloudSeed(os.LookupEnv); err != nil {
		return err
	}
	if err := events.(*caddyevents.App).On("stopping", stopping{a}); err != nil {
		return fmt.Errorf("subscribing to Caddy's end: %w", err)
	}
	if err := registerMetrics(ctx.GetMetricsRegistry()); err != nil {
		return err
	}
	value, _, err := pool.LoadOrNew(poolKey, newPooled)
	if err != nil {
		return err
	}
	a.pool, a.generation = value.(*pooled), g
	return nil
}

// loadGuests provisions the sampler and the lifecycles, and remembers what each was made from. It passes over those
// that config.Resolve has found faulty.
func (a *App) loadGuests(ctx caddy.Context, g *broker.Generation) error {
	var faults []error
	var err error
	if g.SamplerKey = hash(a.GPURaw); len(a.GPURaw) > 0 {
		if g.Sampler, err = a.loadSampler(ctx); err != nil {
			faults = append(faults, err)
		} else {
			tell(ctx.Logger(), false, a.samplerDoubts(g.Sampler))
		}
	}
	a.starts, a.modelNames = map[string]bool{}, map[string]lifecycle.Names{}
	for _, c := range a.Consumers {
		if c == nil || c.Shares != "" || len(c.LifecycleRaw) == 0 {
			continue
		}
		for _, lack := range presets.Lacking(c) {
			ctx.Logger().Warn(lack, zap.String("consumer", c.Name))
		}
		raw := c.LifecycleRaw // is taken away
		guest, err := loadLifecycle(ctx, c)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		g.Lifecycles[c.Name] = guest
		if n, ok := guest.(lifecycle.Namer); ok {
			a.modelNames[c.Name] = n.ModelNames()
			tell(ctx.Logger(), false, sameModels(c, n.ModelNames()))
		}
		if _, http := guest.(*httplife.Lifecycle); !http {
			a.starts[c.Name] = true
		}
		var values string // of placeholders: the text may be the same, and what it stands for another
		if f, ok := guest.(lifecycle.Fingerprinter); ok {
			values = f.Fingerprint()
		}
		g.Keys[c.Name] = hash(raw, []byte(values), []byte(c.Upstream))
	}
	for _, c := range a.Consumers {
		if c != nil && a.starts[c.Shares] {
			a.starts[c.Name] = true
		}
	}
	return errors.Join(faults...)
}

// loadSampler provisions the sampler. It takes GPURaw away.
func (a *App) loadSampler(ctx caddy.Context) (gpu.Guest, error) {
	title, id := faultlines.Title("gpu_broker", a.Sources["gpu"]), moduleID(config.SamplerNamespace, "driver", a.GPURaw)
	mod, err := ctx.LoadModule(a, "GPURaw")
	if err != nil {
		return nil, faultlines.Prefix(title, faultlines.OfModule("gpu "+caddy.ModuleID(id).Name(), id, err))
	}
	sampler, ok := mod.(gpu.Guest)
	if !ok {
		return nil, fmt.Errorf("%s: gpu: module %T is no sampler", title, mod)
	}
	return sampler, nil
}

// loadLifecycle provisions the lifecycle of a consumer. It takes LifecycleRaw away.
func loadLifecycle(ctx caddy.Context, c *config.Consumer) (lifecycle.Guest, error) {
	id := moduleID(config.LifecycleNamespace, "protocol", c.LifecycleRaw)
	mod, err := ctx.LoadModule(c, "LifecycleRaw")
	if err != nil {
		return nil, faultlines.Prefix(title(c), faultlines.OfModule("lifecycle "+caddy.ModuleID(id).Name(), id, err))
	}
	guest, ok := mod.(lifecycle.Guest)
	if !ok {
		return nil, fmt.Errorf("%s: module %T is no lifecycle", title(c), mod)
	}
	return guest, nil
}

// moduleID is the ID of the module that raw names at key.
func moduleID(namespace, key string, raw json.RawMessage) string {
	var fields map[string]any
	_ = json.Unmarshal(raw, &fields) // what can't be read names none
	name, _ := fields[key].(string)
	return namespace + "." + name
}

// title names a consumer in faults.
func title(c *config.Consumer) string {
	return faultlines.Title(fmt.Sprintf("consumer %q", c.Name), c.Source)
}

func lookUpPreset(name string) (json.RawMessage, []string, error) { return presets.Load(name) }

func hash(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		_, _ = fmt.Fprintf(h, "%d:", len(p))
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Start hands this configuration in. It rules as soon as Caddy stops the one
// before it, after all apps have started.
func (a *App) Start() error {
	a.started = true
	if site := a.site(); site != nil {
		a.transports = httpTransports(site)
		joinOnePacket(a.transports)
	}
	a.warnOfRoutes()
	a.reap()
	createSeries(a.names()) // before anything is counted
	if err := a.pool.broker.Push(a.generation); err != nil {
		return err
	}
	select {
	case <-a.generation.Ruled():
		a.limit(a.pool.watcher)
	default: // what fails later must have had no effect
		go a.limit(a.pool.watcher)
	}
	active.Store(a.pool) // not before: what is set on the admin endpoint must find what was stored
	return nil
}

// limit sets the limits of this configuration once it rules.
func (a *App) limit(w *watcher) {
	select {
	case <-a.generation.Ruled():
		w.set(limits{upload: time.Duration(*a.UploadIdle), answer: time.Duration(*a.StallTimeout), tunnel: time.Duration(*a.TunnelIdle)})
	case <-a.generation.Undone():
	case <-w.stop:
	}
}

// reaped is done once in a process.
var reaped sync.Once

// reap ends the servers that an earlier Caddy has started and could not stop, as it was killed. What they
// hold of the GPUs would be a stranger's for ever.
func (a *App) reap() {
	if len(a.starts) == 0 {
		return
	}
	reaped.Do(func() {
		n, err := process.Reap(a.generation.Dir, a.generation.Logger)
		if err != nil {
			a.generation.Logger.Error("servers of an earlier Caddy may run on", zap.Error(err))
		}
		if n > 0 {
			a.generation.Logger.Warn("servers that an earlier Caddy had started were ended", zap.Int("count", n))
		}
	})
}

// errNotStarted says that a configuration did not come to rule in time.
var errNotStarted = errors.New("the broker has not taken up this configuration yet")

// startWait is how long a request that came before its configuration rules waits for it.
const startWait = 10 * time.Second

// waitRuled waits until this configuration rules, if it brings a consumer that
// no earlier one has: Caddy starts its apps in any order, so requests come before.
func (a *App) waitRuled(ctx context.Context, b *broker.Broker, consumer string) error {
	ruled := a.generation.Ruled()
	select {
	case <-ruled:
		return nil
	default:
	}
	if b.Knows(consumer) {
		return nil
	}
	t := time.NewTimer(startWait)
	defer t.Stop()
	select {
	case <-ruled:
		return nil
	case <-a.generation.Undone():
		return errNotStarted
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return errNotStarted
	}
}

// Stop takes this configuration away; the next rules.
func (a *App) Stop() error {
	a.pool.broker.Pop(a.generation)
	return nil
}

// Cleanup lets go of the broker. It is called for half-made configurations too.
func (a *App) Cleanup() error {
	closeIdle(a.transports)
	if a.pool == nil {
		return nil
	}
	if !a.started && onlyValidated(a.ctx) {
		a.warnOfRoutes()
	}
	p := a.pool
	p.broker.Pop(a.generation)
	a.pool = nil
	last, err := pool.Delete(poolKey)
	if last {
		p.stopWithProcess(time.Duration(*a.StopGrace), a.generation.Logger, caddy.Exiting)
	}
	return err
}

// onlyValidated reports whether a configuration goes because Caddy has
// validated it, and not because it failed. It is the only moment at which a configuration that is validated has all its apps.
func onlyValidated(ctx caddy.Context) bool {
	err := context.Cause(ctx)
	return err != nil && strings.HasPrefix(err.Error(), "validation complete")
}

// consumer is the configuration of a consumer, by name.
func (a *App) consumer(name string) *config.Consumer {
	for _, c := range a.Consumers {
		if c != nil && c.Name == name {
			return c
		}
	}
	return nil
}

// parseGlobal reads the global option gpu_broker. Several of them add up.
func parseGlobal(d *caddyfile.Dispenser, existing any) (any, error) {
	var before *config.Broker
	if app, ok := existing.(httpcaddyfile.App); ok {
		before = new(config.Broker)
		if err := json.Unmarshal(app.Value, before); err != nil {
			return nil, d.WrapErr(err)
		}
	}
	b, err := gpucaddyfile.ParseGlobal(d, before)
	if err != nil {
		return nil, err
	}
	warnAdapting(b)
	return httpcaddyfile.App{Name: "gpu_broker", Value: caddyconfig.JSON(b, nil)}, nil
}

// Interface guards
var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
