package gpubroker

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// told are the warnings that were logged while a Caddyfile was adapted. The
// load that follows in the same process does not repeat them.
var told struct {
	mu    sync.Mutex
	texts map[string]bool
}

// maxTold bounds them: a process may adapt many a Caddyfile and load none.
const maxTold = 1000

// tell logs warnings: each once, if the configuration was adapted in this process before it is loaded.
func tell(logger *zap.Logger, adapting bool, warnings []config.Warning) {
	told.mu.Lock()
	defer told.mu.Unlock()
	if told.texts == nil || len(told.texts) > maxTold {
		told.texts = map[string]bool{}
	}
	for _, w := range warnings {
		for text := range strings.Lines(w.Err.Error()) {
			switch text = strings.TrimSpace(text); {
			case text == "":
			case !told.texts[text]:
				logger.Warn(text)
				told.texts[text] = adapting
			case !adapting:
				delete(told.texts, text)
			}
		}
	}
}

// quiet is above zero while a Caddyfile is adapted for a command that reports its warnings itself.
var quiet atomic.Int32

// adaptQuietly adapts a Caddyfile without logging its warnings.
func adaptQuietly(doc []byte, path string) ([]byte, []caddyconfig.Warning, error) {
	quiet.Add(1)
	defer quiet.Add(-1)
	return caddyconfig.GetAdapter("caddyfile").Adapt(doc, map[string]any{"filename": path})
}

// warnAdapting logs what is doubtful in the global option, as far as it can be told before the rest of the Caddyfile
// is read. Faults are left to the load.
func warnAdapting(b *config.Broker) {
	if quiet.Load() > 0 {
		return
	}
	raw, err := json.Marshal(b)
	if err != nil {
		return
	}
	app := new(App) // a copy: Resolve changes it
	if json.Unmarshal(raw, &app.Broker) != nil {
		return
	}
	_ = config.Resolve(&app.Broker, lookUpPreset)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	warnings := app.Warnings()
	if len(app.GPURaw) > 0 {
		if guest, err := app.loadSampler(ctx); err == nil {
			warnings = append(warnings, app.samplerDoubts(guest)...)
		}
	}
	tell(caddy.Log().Named("gpu_broker"), true, warnings)
}

// sameModels are the models of a consumer that are one to its server: each would be booked by itself.
func sameModels(c *config.Consumer, compare lifecycle.Names) (out []config.Warning) {
	first := map[string]string{}
	for _, m := range c.Models {
		key := compare.Key(m.Name)
		if other, twice := first[key]; twice {
			out = append(out, config.NewWarning(faultlines.Title("consumer "+strconv.Quote(c.Name), m.Source),
				fmt.Errorf("models %q and %q are one to its server, and each would be booked: leave one out, and give the other its name as alias if clients use it", other, m.Name)))
			continue
		}
		first[key] = m.Name
	}
	return out
}

// samplerDoubts are what is doubtful in the configuration of a sampler.
func (a *App) samplerDoubts(guest gpu.Guest) (out []config.Warning) {
	if d, ok := guest.(gpu.Doubter); ok {
		for _, doubt := range d.Doubts() {
			out = append(out, config.NewWarning(faultlines.Title("gpu_broker", a.Sources["gpu"]), doubt))
		}
	}
	return out
}

// routeDoubts are what is doubtful in a directive gpu_broker.
func (h *Handler) routeDoubts() (out []config.Warning) {
	for _, doubt := range h.Doubts() {
		out = append(out, config.NewWarning(faultlines.Title("gpu_broker", h.Source), doubt))
	}
	return out
}

// site returns the HTTP app of this configuration, whose apps are all provisioned; nil: there is none.
func (a *App) site() *caddyhttp.App {
	app, err := a.ctx.AppIfConfigured("http")
	if err != nil {
		return nil
	}
	site, _ := app.(*caddyhttp.App)
	return site
}

// warnOfRoutes logs the routes of the site on which requests pass the broker unseen. All apps are provisioned.
func (a *App) warnOfRoutes() {
	app := a.site()
	if app == nil {
		return
	}
	for _, f := range doctor.Bypasses(siteJSON(app), &a.Broker, placeholderNames()) {
		a.generation.Logger.Warn(f.What, zap.String("route", f.Where), zap.String("fix", f.Mend))
	}
}

// placeholderNames are those that the handler sets.
func placeholderNames() []string { return slices.Sorted(maps.Keys(placeholderValues("", ""))) }
