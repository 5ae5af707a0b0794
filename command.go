package gpubroker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/simulate"
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "gpu-broker",
		Short: "Tools for sites that share GPUs among model servers",
		Long:  "Tools for sites whose configuration has the app gpu_broker. None of them talks to a running Caddy or starts anything.",
		CobraFunc: func(cmd *cobra.Command) {
			cmd.SilenceUsage = true
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				if len(args) == 0 {
					return cmd.Help()
				}
				var names []string
				for _, sub := range cmd.Commands() {
					names = append(names, sub.Name())
				}
				return config.Unknown("subcommand", args[0], names)
			}
			cmd.AddCommand(simulateCommand())
			cmd.AddCommand(doctorCommand())
			cmd.AddCommand(initCommand())
			cmd.AddCommand(presetsCommand())
		},
	})
}

// simulation is what the command simulate is told.
type simulation struct {
	configFile, trace         string
	mix, traces               string
	u                         float64
	rates, loads, unloads     []string
	gpus                      []string
	policy                    string
	hours, speed              float64
	seed                      uint64
	patience, retryAfter, cap time.Duration
	tries                     int
	retryChance               float64
	json                      bool
}

func simulateCommand() *cobra.Command {
	var s simulation
	cmd := &cobra.Command{
		Use:   "simulate --config <path> (--trace <path> | --rate <consumer>=<per hour>:<seconds> ... --hours <n>)",
		Short: "Plays a trace of requests through the broker's rules, in virtual time",
		Long: `
Plays requests through the scheduler with the consumers and settings of a
configuration, and tells loads, evictions, how busy the GPU is, how long requests
wait, and how much more load each policy would sustain. Nothing is started or
asked: model servers only take the time that theirs would.

The requests come from a CSV file with the columns time, consumer,
service_seconds, priority and patience, of which the last two may be missing, such as the file
that the setting request_log writes; or at random, from --rate.

Without --policy three are shown side by side: bounded is what the broker does
with these settings; collate serves loaded models as long as requests come for
them; fifo serves strictly in the order of submission.`,
		Example: `  caddy gpu-broker simulate --config Caddyfile --trace requests.csv
  caddy gpu-broker simulate --config Caddyfile --rate ollama=200:4 --rate comfyui=20:25 --hours 24 --gpu 24GiB
  caddy gpu-broker simulate --mix hot --u 0.9`,
		Args:         cobra.NoArgs,
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := s.run(cmd.Context())
			if err != nil {
				return err
			}
			if s.json {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				return enc.Encode(c)
			}
			return c.Write(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&s.configFile, "config", "c", "", "Configuration with the app gpu_broker: a Caddyfile, or JSON if its name ends so (default Caddyfile)")
	f.StringVarP(&s.trace, "trace", "t", "", "CSV file of requests: time,consumer,service_seconds[,priority[,patience]]")
	f.StringArrayVar(&s.rates, "rate", nil, "Requests at random: CONSUMER=PER_HOUR:SERVICE_SECONDS; once for each consumer")
	f.Float64Var(&s.hours, "hours", 24, "With --rate: how long they come")
	f.StringVar(&s.policy, "policy", "", "Only this one: bounded, collate or fifo")
	f.Uint64Var(&s.seed, "seed", 1, "Of everything random: equal seeds give equal results")
	f.StringSliceVar(&s.gpus, "gpu", nil, "Total memory of a GPU, as in 24GiB; once for each (default what the configuration declares)")
	f.StringArrayVar(&s.loads, "load", nil, "How long a load takes: CONSUMER=20s (default nine tenths of its switch_cost)")
	f.StringArrayVar(&s.unloads, "unload", nil, "How long an unload takes: CONSUMER=2s (default a tenth of its switch_cost)")
	f.Float64Var(&s.speed, "speed", 1, "Requests come so many times as fast as the trace says")
	f.DurationVar(&s.patience, "patience", 0, "After this long clients leave if their request has not begun; a trace's own wins (default never)")
	f.IntVar(&s.tries, "tries", 1, "How often a client that left, or was refused, sends a request in all")
	f.DurationVar(&s.retryAfter, "retry-after", 5*time.Second, "How long after that it sends it again")
	f.Float64Var(&s.retryChance, "retry-chance", .7, "The chance that it does")
	f.DurationVar(&s.cap, "limit-time", 20*time.Second, "How long to look, for each policy, for the load that it still sustains; 0: not at all")
	f.BoolVar(&s.json, "json", false, "Print JSON")
	f.StringVar(&s.mix, "mix", "", "Instead of a configuration and a trace: a mix on which the rules were chosen: "+strings.Join(simulate.Mixes, ", "))
	f.Float64Var(&s.u, "u", .5, "With --mix: its load")
	f.StringVar(&s.traces, "traces", "", "With --mix: folder of the Azure LLM inference traces of 2023; hot needs none")
	return cmd
}

func (s *simulation) run(ctx context.Context) (*simulate.Comparison, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	policies := simulate.Policies
	if s.policy != "" {
		policies = []simulate.Policy{simulate.Policy(s.policy)}
	}
	w, requests, err := s.input(ctx)
	if err != nil {
		return nil, err
	}
	for i := range requests {
		if requests[i].Patience == 0 {
			requests[i].Patience = s.patience
		}
		requests[i].At = time.Duration(float64(requests[i].At) / s.speed)
	}
	return simulate.Compare(ctx, w, requests, policies, simulate.Options{
		Seed: s.seed, Tries: s.tries, RetryAfter: s.retryAfter, RetryChance: s.retryChance,
	}, s.cap)
}

func (s *simulation) check() error {
	var sources []string
	for _, source := range []struct {
		flag  string
		given bool
	}{{"--trace", s.trace != ""}, {"--rate", len(s.rates) > 0}, {"--mix", s.mix != ""}} {
		if source.given {
			sources = append(sources, source.flag)
		}
	}
	var names []string
	for _, p := range simulate.Policies {
		names = append(names, string(p))
	}
	switch {
	case len(sources) == 0:
		return errors.New("there are no requests to simulate: give --trace FILE, or --rate CONSUMER=PER_HOUR:SERVICE_SECONDS")
	case len(sources) > 1:
		return fmt.Errorf("%s are given: requests come from one of them", strings.Join(sources, " and "))
	case s.mix != "" && s.configFile != "":
		return errors.New("--mix has consumers of its own: leave --config out")
	case s.policy != "" && !slices.Contains(names, s.policy):
		return fmt.Errorf("--policy: %w", config.Unknown("policy", s.policy, names))
	case !(s.speed > 0) || math.IsInf(s.speed, 1):
		return fmt.Errorf("--speed is %v: it must be above 0", s.speed)
	case !(s.hours > 0) || math.IsInf(s.hours, 1):
		return fmt.Errorf("--hours is %v: it must be above 0", s.hours)
	case s.tries < 1 || s.tries > 100:
		return fmt.Errorf("--tries is %d: from 1 to 100 are possible", s.tries)
	case s.patience < 0 || s.retryAfter < 0 || s.cap < 0:
		return errors.New("--patience, --retry-after and --limit-time must not be negative")
	case !(s.retryChance >= 0 && s.retryChance <= 1):
		return fmt.Errorf("--retry-chance is %v: it must be from 0 to 1", s.retryChance)
	}
	return nil
}

// input is the world, and the requests for it.
func (s *simulation) input(ctx context.Context) (*simulate.World, []simulate.Request, error) {
	if s.mix != "" {
		return simulate.Mix(s.mix, s.u, s.seed, s.traces)
	}
	app, err := readApp(s.configFile)
	if err != nil {
		return nil, nil, err
	}
	assumed, err := s.assumptions()
	if err != nil {
		return nil, nil, err
	}
	if assumed.Traits, err = app.traits(ctx); err != nil {
		return nil, nil, err
	}
	w, err := simulate.FromConfig(&app.Broker, assumed)
	if err != nil {
		return nil, nil, err
	}
	find := simulate.Names(&app.Broker)
	var requests []simulate.Request
	if s.trace != "" {
		requests, err = readTrace(s.trace, find)
	} else {
		var rates []simulate.Rate
		if rates, err = parseRates(s.rates, find); err == nil {
			requests, err = simulate.Poisson(rates, s.hours, s.seed)
		}
	}
	return w, requests, err
}

func readTrace(path string, find simulate.Lookup) ([]simulate.Request, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the trace: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	requests, skipped, err := simulate.ReadTrace(f, path, find)
	for _, s := range skipped[:min(len(skipped), 10)] {
		_, _ = fmt.Fprintf(os.Stderr, "%s: requests left out: %d: %v\n", path, s.Requests, s.Why) // a warning that can't be written is none
	}
	if more := len(skipped) - 10; more > 0 {
		_, _ = fmt.Fprintf(os.Stderr, "%s: requests of %d more unknown consumers are left out\n", path, more)
	}
	return requests, err
}

// readApp is the app gpu_broker of a configuration file, resolved. Nothing is started.
func readApp(path string) (*App, error) {
	if path == "" {
		path = "Caddyfile"
	}
	doc, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration: %w", err)
	}
	if !strings.HasSuffix(strings.ToLower(path), ".json") {
		adapted, warnings, err := adaptQuietly(doc, path)
		if err != nil {
			return nil, fmt.Errorf("adapting %s: %w", path, err)
		}
		for _, w := range warnings {
			if !strings.Contains(w.Message, "not formatted") {
				_, _ = fmt.Fprintln(os.Stderr, w.String()) // a warning that can't be written is none
			}
		}
		doc = adapted
	}
	var whole struct {
		Apps map[string]json.RawMessage `json:"apps"`
	}
	if err := json.Unmarshal(doc, &whole); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	raw, ok := whole.Apps["gpu_broker"]
	if !ok {
		return nil, fmt.Errorf("%s has no app gpu_broker: it is made by the global option gpu_broker { ... }", path)
	}
	app := new(App)
	if err := caddy.StrictUnmarshalJSON(raw, &app.Broker); err != nil {
		return nil, fmt.Errorf("%s: gpu_broker: %w", path, err)
	}
	if err := config.Resolve(&app.Broker, lookUpPreset); err != nil {
		return nil, faultlines.Prefix(path, err)
	}
	for _, w := range app.Warnings() {
		_, _ = fmt.Fprintln(os.Stderr, "warning:", w.Err) // as above
	}
	return app, nil
}

// traits is what the lifecycles of the consumers can do. Their drivers are opened for that, which starts nothing, and closed.
func (a *App) traits(ctx context.Context) (map[string]lifecycle.Traits, error) {
	cctx, cancel := caddy.NewContext(caddy.Context{Context: ctx})
	defer cancel()
	out := map[string]lifecycle.Traits{}
	var faults []error
	for _, c := range a.Consumers {
		if c.Cloud || c.Shares != "" {
			continue
		}
		guest, err := loadLifecycle(cctx, c)
		if err == nil {
			var d lifecycle.Driver
			if d, err = guest.Open(lifecycle.Deps{Consumer: c.Name, Upstream: c.Upstream, Logger: zap.NewNop()}); err == nil {
				out[c.Name] = d.Traits()
				err = d.Close()
			}
		}
		if err != nil {
			faults = append(faults, faultlines.Prefix(title(c), err))
		}
	}
	return out, errors.Join(faults...)
}

// assumptions are what the flags tell of the world.
func (s *simulation) assumptions() (a simulate.Assumptions, err error) {
	for _, text := range s.gpus {
		n, err := gpu.ParseBytes(text)
		if err == nil && n == 0 {
			err = errors.New("a GPU without memory is none")
		}
		if err != nil {
			return a, fmt.Errorf("--gpu: %w", err)
		}
		a.GPUs = append(a.GPUs, n)
	}
	if a.Load, err = parseTimes("--load", s.loads); err != nil {
		return a, err
	}
	a.Unload, err = parseTimes("--unload", s.unloads)
	return a, err
}

// parseTimes reads CONSUMER=DURATION, several times.
func parseTimes(flag string, texts []string) (map[string]time.Duration, error) {
	out := map[string]time.Duration{}
	for _, text := range texts {
		name, value, ok := strings.Cut(text, "=")
		d, err := caddy.ParseDuration(value)
		if !ok || err != nil || d < 0 {
			return nil, fmt.Errorf("%s %q is not of the form CONSUMER=TIME, as in %s ollama=20s", flag, text, flag)
		}
		out[name] = d
	}
	return out, nil
}

// parseRates reads CONSUMER=PER_HOUR:SERVICE_SECONDS, several times. A name may hold a colon, but no equals sign.
func parseRates(texts []string, find simulate.Lookup) ([]simulate.Rate, error) {
	var out []simulate.Rate
	for _, text := range texts {
		name, rest, _ := strings.Cut(text, "=")
		perHour, service, ok := strings.Cut(rest, ":")
		n, err := strconv.ParseFloat(perHour, 64)
		s, err2 := strconv.ParseFloat(service, 64)
		if !ok || err != nil || err2 != nil || !(n >= 0 && n <= 1e9) || !(s >= 0 && s <= 1e7) {
			return nil, fmt.Errorf("--rate %q is not of the form CONSUMER=PER_HOUR:SERVICE_SECONDS, as in --rate ollama=200:4", text)
		}
		consumer, priority, err := find(name)
		if err != nil {
			return nil, fmt.Errorf("--rate: %w", err)
		}
		out = append(out, simulate.Rate{Consumer: consumer, PerHour: n, Service: time.Duration(s * float64(time.Second)), Priority: priority})
	}
	return out, nil
}
