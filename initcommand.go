package gpubroker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/spf13/cobra"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/auto"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func initCommand() *cobra.Command {
	var output, address string
	var force bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "init [--output <path>] [--address <address>] [--force]",
		Short: "Writes a Caddyfile for the model servers that run on this machine",
		Long: `
Looks at the GPU and at the ports on which model servers listen by default, and
writes a Caddyfile for what it finds: a consumer for each server with its
preset and a claim, and routes to them. It asks nothing, and says in comments
what was found and what was guessed. A file that is there is not overwritten.`,
		Example: `  caddy gpu-broker init
  caddy gpu-broker init --output /etc/caddy/Caddyfile --address ai.example.com --force
  caddy gpu-broker init --output -`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := doctor.CheckAddress(address); err != nil {
				return err
			}
			if timeout <= 0 {
				return fmt.Errorf("--timeout is %s: it must be above 0", timeout)
			}
			if _, err := os.Lstat(output); err == nil && !force && output != "-" {
				return errors.New(refusal(output))
			}
			d := discover(cmd.Context(), timeout)
			text := d.Caddyfile(address, func(block string) error {
				return checkCaddyfile(cmd.Context(), "{\ngpu_broker {\n"+block+"\n}\n}\n")
			})
			if err := checkCaddyfile(cmd.Context(), text); err != nil {
				return fmt.Errorf("what would be written can't be used, which is a fault of this command: %w", err)
			}
			if output == "-" {
				_, err := fmt.Fprint(cmd.OutOrStdout(), text)
				return err
			}
			if err := writeNew(output, text, force); err != nil {
				return err
			}
			_, err := fmt.Fprint(cmd.OutOrStdout(), found(d, output))
			return err
		},
	}
	f := cmd.Flags()
	f.StringVarP(&output, "output", "o", "Caddyfile", "Where to write; - is the standard output")
	f.StringVarP(&address, "address", "a", "", "The site's address, as in ai.example.com or :8080 (default a free port of this machine alone)")
	f.BoolVarP(&force, "force", "f", false, "Overwrite the file if it is there")
	f.DurationVar(&timeout, "timeout", doctorTimeout, "How long each look may take; they go on side by side")
	return cmd
}

func refusal(path string) string {
	return path + " is there already: name another with --output, or overwrite it with --force"
}

// writeNew writes a file, which must not be there unless it may be overwritten.
func writeNew(path, text string, force bool) error {
	how := os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if force {
		how = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	}
	out, err := os.OpenFile(path, how, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return errors.New(refusal(path))
	}
	if err != nil {
		return fmt.Errorf("writing the configuration: %w", err)
	}
	_, err = out.WriteString(text)
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("writing the configuration: %w", err)
	}
	return nil
}

// found tells people what was found and what to do next.
func found(d *doctor.Discovery, path string) string {
	var b strings.Builder
	if d.Sampler == "" {
		fmt.Fprintf(&b, "No GPU can be read here, the file says why: one is declared in it, correct its size.\n")
	}
	for _, dev := range d.Devices {
		fmt.Fprintf(&b, "GPU %d: %s, %s, read by %s\n", dev.Index, dev.Name, dev.Total, d.Sampler)
	}
	for _, s := range d.Servers {
		fmt.Fprintf(&b, "%s at %s\n", s.Name, s.Address)
	}
	if len(d.Servers) == 0 {
		fmt.Fprintf(&b, "No model server was found at its default port: the file holds an example, commented out.\n")
	}
	fmt.Fprintf(&b, "Written to %s. Read it, then: caddy gpu-broker doctor --config %s\n", path, path)
	return b.String()
}

// discover looks at this machine.
func discover(ctx context.Context, timeout time.Duration) *doctor.Discovery {
	cctx, cancel := caddy.NewContext(caddy.Context{Context: ctx})
	defer cancel()
	return doctor.Discover(ctx, timeout, new(auto.Auto), func(preset, upstream string) (lifecycle.Driver, error) {
		// Lists of models may be wanted of a preset; what is probed is the same.
		b := &config.Broker{Scheduler: config.Passthrough, Consumers: []*config.Consumer{{Name: preset, Preset: preset, Upstream: upstream, VRAM: gpu.GiB}}}
		if err := config.Resolve(b, lookUpPreset); err != nil {
			return nil, err
		}
		return openDriver(cctx, b.Consumers[0], &doctor.Site{Timeout: timeout}, &App{Broker: *b})
	})
}

// checkCaddyfile reports whether a Caddyfile can be used, as far as the broker is concerned.
func checkCaddyfile(ctx context.Context, text string) error {
	cctx, cancel := caddy.NewContext(caddy.Context{Context: ctx})
	defer cancel()
	s := &doctor.Site{File: "Caddyfile", Timeout: doctorTimeout, Drivers: map[string]lifecycle.Driver{}, Lifecycles: map[string]json.RawMessage{}}
	app := readSite(s, []byte(text))
	if app != nil {
		openSampler(cctx, s, app)
		openDrivers(cctx, s, app)
		checkRoutes(s, app)
	}
	for _, d := range s.Drivers {
		_ = d.Close() // it has started nothing
	}
	if app != nil {
		for _, c := range app.Consumers {
			for _, lack := range doctor.Lacking(c) {
				s.Faults = append(s.Faults, errors.New(lack))
			}
		}
	}
	return errors.Join(s.Faults...)
}
