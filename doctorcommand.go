package gpubroker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/auto"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// doctorTimeout is how long each look of the command doctor may take.
const doctorTimeout = 5 * time.Second

func doctorCommand() *cobra.Command {
	var path string
	var asJSON bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "doctor [--config <path>] [--json] [--timeout 5s]",
		Short: "Says what will not work on this machine with this configuration, and how to fix it",
		Long: `
Looks at the GPUs, the model servers, the ports, folders and sockets that a
configuration needs, and says what is wrong, where, and how to fix it. Run it
as the user that Caddy runs as: what another user may do says little.

Servers are asked for their health, their residency and whether they work, and
for nothing that loads, unloads, wakes or generates. Nothing is started and
nothing is written.

The exit status is 1 if there is an error, and 0 if there are only warnings and notes.`,
		Example: `  sudo -u caddy caddy gpu-broker doctor --config /etc/caddy/Caddyfile
  caddy gpu-broker doctor --json`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return fmt.Errorf("--timeout is %s: it must be above 0", timeout)
			}
			report, err := examine(cmd.Context(), path, timeout)
			if err != nil {
				return err
			}
			if asJSON {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				enc.SetEscapeHTML(false)
				err = enc.Encode(report)
			} else {
				err = report.Write(cmd.OutOrStdout())
			}
			switch {
			case err != nil:
				return err
			case report.Errors > 0:
				return errors.New("not all is well: see the errors above")
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVarP(&path, "config", "c", "", "Configuration with the app gpu_broker: a Caddyfile, or JSON if its name ends so (default Caddyfile)")
	f.BoolVar(&asJSON, "json", false, "Print JSON")
	f.DurationVar(&timeout, "timeout", doctorTimeout, "How long each look may take; they go on side by side")
	return cmd
}

// examine opens what a configuration names, as far as that goes, and has it looked at.
func examine(ctx context.Context, path string, timeout time.Duration) (*doctor.Report, error) {
	if path == "" {
		path = "Caddyfile"
	}
	doc, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading the configuration: %w: name it with --config, or have one written for this machine by caddy gpu-broker init", err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	s := &doctor.Site{File: path, Timeout: timeout, Auto: new(auto.Auto), Drivers: map[string]lifecycle.Driver{}, Lifecycles: map[string]json.RawMessage{}}
	s.Data, s.Placeholders = dataFolders(), placeholderNames()
	cctx, cancel := caddy.NewContext(caddy.Context{Context: ctx})
	defer cancel()
	s.Sampler = s.Auto
	app := readSite(s, doc)
	if app != nil {
		openSampler(cctx, s, app)
		openDrivers(cctx, s, app)
		checkRoutes(s, app)
	} else {
		s.Sampler = nil // which one is to be used isn't known
	}
	report := doctor.Examine(ctx, s)
	for _, d := range s.Drivers {
		_ = d.Close() // it has started nothing
	}
	return report, nil
}

// dataFolders are those that Caddy and the broker write to.
func dataFolders() []string {
	data := caddy.AppDataDir()
	folders := []string{data}
	for _, own := range []string{"gpu_broker", "gpu_broker/servers", "locks", "certificates"} {
		path := filepath.Join(data, own)
		if _, err := os.Stat(path); err == nil {
			folders = append(folders, path)
		}
	}
	return folders
}

// readSite reads a configuration as far as that goes; nil: its app can't be read at all.
func readSite(s *doctor.Site, doc []byte) *App {
	fault := func(err error) *App {
		s.Faults = append(s.Faults, err)
		return nil
	}
	s.Config = doc
	if !strings.HasSuffix(strings.ToLower(s.File), ".json") {
		adapted, _, err := adaptQuietly(doc, s.File)
		if err != nil {
			s.Config = nil
			return fault(err)
		}
		s.Config = adapted
	}
	var whole struct {
		Apps map[string]json.RawMessage `json:"apps"`
	}
	if err := json.Unmarshal(s.Config, &whole); err != nil {
		s.Config = nil
		return fault(fmt.Errorf("%s: %w", s.File, err))
	}
	raw, ok := whole.Apps["gpu_broker"]
	if !ok {
		return fault(fmt.Errorf("%s has no app gpu_broker: it is made by the global option gpu_broker { ... }", s.File))
	}
	app := new(App)
	if err := caddy.StrictUnmarshalJSON(raw, &app.Broker); err != nil {
		return fault(fmt.Errorf("%s: gpu_broker: %w", s.File, err))
	}
	if err := config.Resolve(&app.Broker, lookUpPreset); err != nil {
		s.Faults = append(s.Faults, err)
	}
	s.Warnings = app.Warnings()
	s.Broker = &app.Broker
	return app
}

func openSampler(ctx caddy.Context, s *doctor.Site, app *App) {
	s.Sampler = nil
	raw := app.GPURaw
	if len(raw) == 0 { // its fault is told
		return
	}
	guest, err := app.loadSampler(ctx)
	app.GPURaw = raw
	if err != nil {
		s.Faults = append(s.Faults, err)
		return
	}
	s.Sampler = guest
	s.Warnings = append(s.Warnings, app.samplerDoubts(guest)...)
}

// openDrivers opens a driver for each consumer, which starts nothing.
func openDrivers(ctx caddy.Context, s *doctor.Site, app *App) {
	for _, c := range app.Consumers {
		if c == nil || c.Cloud || c.Shares != "" || !c.IsEnabled() {
			continue
		}
		s.Lifecycles[c.Name] = c.LifecycleRaw
		if len(c.LifecycleRaw) == 0 { // its fault is told
			continue
		}
		d, err := openDriver(ctx, c, s, app)
		if err != nil {
			s.Faults = append(s.Faults, faultlines.Prefix(title(c), err))
			continue
		}
		s.Drivers[c.Name] = d
	}
}

func openDriver(ctx caddy.Context, c *config.Consumer, s *doctor.Site, app *App) (lifecycle.Driver, error) {
	raw := c.LifecycleRaw // is taken away
	guest, err := loadLifecycle(ctx, c)
	c.LifecycleRaw = raw
	if err != nil {
		return nil, err
	}
	if n, ok := guest.(lifecycle.Namer); ok {
		s.Warnings = append(s.Warnings, sameModels(c, n.ModelNames())...)
	}
	return guest.Open(lifecycle.Deps{Consumer: c.Name, Upstream: c.Upstream, Logger: zap.NewNop(),
		Limits: lifecycle.NewLimits(min(s.Timeout, time.Duration(app.ProbeTimeout)), 0)})
}

// checkRoutes says what is wrong with the directives gpu_broker.
func checkRoutes(s *doctor.Site, app *App) {
	sound := len(s.Faults) == 0 // else faults of consumers would be told twice
	for _, raw := range doctor.BrokerHandlers(s.Config) {
		h := &Handler{app: app}
		err := json.Unmarshal(raw, &h.Route)
		if err == nil {
			err = h.check()
		}
		if err == nil && sound {
			err = h.provisionTargets()
		}
		if err != nil {
			s.Faults = append(s.Faults, h.titled(err))
		}
		s.Warnings = append(s.Warnings, h.routeDoubts()...)
	}
}
