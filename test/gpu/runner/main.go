// Command runner drives the check on a machine with a GPU: it makes two model
// servers that do not fit into the GPU together take turns behind Caddy,
// measures each swap, and prints a report. run.sh beside its folder starts the
// servers and Caddy.
//
// It ends with status 1 if a check fails, 2 if it could not be carried out.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/auto"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/nvml"
)

// options are the command line.
type options struct {
	site, ca, admin  string
	alpha, beta      string
	size, claim      gpu.Bytes
	caddySampler     string
	simDir           string
	simTotal         gpu.Bytes
	simDelay         time.Duration
	about            string
	report           string
	swaps            int
	poll, limit      time.Duration
	startup, oneSwap time.Duration
}

func main() {
	o := options{}
	flag.StringVar(&o.site, "site", "https://localhost:8443", "`address` of the site that Caddy serves")
	flag.StringVar(&o.ca, "ca", "", "`file` with the certificate of Caddy's local CA")
	flag.StringVar(&o.admin, "admin", "http://127.0.0.1:2019", "`address` of Caddy's admin endpoint")
	flag.StringVar(&o.alpha, "alpha", "", "`address` of the first model server")
	flag.StringVar(&o.beta, "beta", "", "`address` of the second model server")
	flag.Func("size", "`size` that each server's load takes", parse(&o.size))
	flag.Func("claim", "`size` that the configuration claims for each", parse(&o.claim))
	flag.StringVar(&o.caddySampler, "caddy-sampler", "nvml", "`name` of the sampler that Caddy is to have")
	flag.StringVar(&o.simDir, "sim-dir", "", "`folder` of a simulated GPU; empty: the GPU is read by NVML")
	flag.Func("sim-total", "`size` of the simulated GPU", parse(&o.simTotal))
	flag.DurationVar(&o.simDelay, "sim-delay", 0, "how long the simulated GPU shows freed memory as used")
	flag.StringVar(&o.about, "about", "", "a `line` for the report: driver and build")
	flag.StringVar(&o.report, "report", "", "`file` for the report, beside standard output")
	flag.IntVar(&o.swaps, "swaps", 10, "how many swaps")
	flag.DurationVar(&o.poll, "poll", 2*time.Millisecond, "time between two looks at the free memory during a swap")
	flag.DurationVar(&o.limit, "limit", 5*time.Minute, "bound on everything")
	flag.DurationVar(&o.startup, "startup", 90*time.Second, "bound on the start of servers and Caddy")
	flag.DurationVar(&o.oneSwap, "swap", 60*time.Second, "bound on one swap")
	flag.Parse()

	os.Exit(status(o))
}

// status carries out the check and gives the program's exit status.
func status(o options) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, o.limit)
	defer cancel()
	passed, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "runner:", err)
		return 2
	}
	if !passed {
		return 1
	}
	return 0
}

func parse(into *gpu.Bytes) func(string) error {
	return func(text string) (err error) {
		*into, err = gpu.ParseBytes(text)
		return err
	}
}

// run carries out the check and prints the report, also of a check that broke
// off: what was measured until then is worth having.
func run(ctx context.Context, o options) (passed bool, err error) {
	if o.alpha == "" || o.beta == "" || o.size <= 0 || o.claim < o.size || o.swaps < 1 || o.poll <= 0 {
		return false, errors.New("want -alpha, -beta, -size, -claim of at least the size, -swaps and -poll above 0; see -help")
	}
	r := &report{options: o}
	if r.auto, err = autoChoice(ctx, o); err != nil {
		return false, err
	}
	sampler, err := openSampler(ctx, o)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, sampler.Close()) }()

	m := &measurer{options: o, sampler: sampler, report: r}
	if m.site, err = connect(ctx, o); err != nil {
		return false, err
	}
	err = m.all(ctx)
	if err != nil {
		r.broke = err
	}
	passed = r.judge()
	return passed, errors.Join(err, r.write(o.report))
}

// openSampler opens the sampler by which this program itself looks.
func openSampler(ctx context.Context, o options) (gpu.Sampler, error) {
	if o.simDir == "" {
		return new(nvml.NVML).Open(ctx, zap.NewNop())
	}
	return (&simulated.Simulated{Totals: []gpu.Bytes{o.simTotal}, Dir: o.simDir, ReleaseDelay: delay(o.simDelay)}).Open(ctx, zap.NewNop())
}

// autoChoice says what `gpu auto` takes on this machine, and why.
func autoChoice(ctx context.Context, o options) (string, error) {
	sampler, err := new(auto.Auto).Open(ctx, zap.NewNop())
	if err != nil {
		if o.simDir != "" && ctx.Err() == nil {
			return err.Error(), nil // a rehearsal: there is nothing to choose from
		}
		return "", err
	}
	defer func() { _ = sampler.Close() }()
	return sampler.Name() + ": " + sampler.Why(), nil
}

// write prints the report, and keeps it in a file if one is named.
func (r *report) write(path string) error {
	if path == "" {
		return r.markdown(os.Stdout)
	}
	file, err := os.Create(path)
	if err != nil {
		return errors.Join(err, r.markdown(os.Stdout))
	}
	return errors.Join(r.markdown(io.MultiWriter(os.Stdout, file)), file.Close())
}
