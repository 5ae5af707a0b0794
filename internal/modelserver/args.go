package modelserver

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// keyword is one option by its word on the command line.
type keyword struct {
	word string
	help string
	set  func(o *Options, value string) error
	live bool // can be set while the server runs
}

var keywords = []keyword{
	{"name", "its name", func(o *Options, v string) error { o.Name = v; return nil }, false},
	{"manner", "one of {manners}", func(o *Options, v string) error { o.Manner = Manner(v); return nil }, false},
	{"addr", "where it listens, host:port (default a free port of 127.0.0.1)", func(o *Options, v string) error { o.Addr = v; return nil }, false},
	{"sim-dir", "the folder of the simulated GPUs", func(o *Options, v string) error { o.SimDir = v; return nil }, false},
	{"gpu", "the index of the simulated GPU", number(func(o *Options) *int { return &o.GPU }), false},
	{"total", "the GPU's size; a load beyond it fails", size(func(o *Options) *gpu.Bytes { return &o.Total }), true},
	{"vram", "what the loaded model takes", size(func(o *Options) *gpu.Bytes { return &o.VRAM }), true},
	{"models", "the models of a server that has several: name:SIZE+name:SIZE", setModels, false},
	{"residue", "held from the first load to the end", size(func(o *Options) *gpu.Bytes { return &o.Residue }), true},
	{"on-cpu", "take no VRAM", truth(func(o *Options) *bool { return &o.OnCPU }), true},
	{"spill", "take what is free if the model doesn't fit", truth(func(o *Options) *bool { return &o.Spill }), true},
	{"load", "how long a load takes", duration(func(o *Options) *time.Duration { return &o.LoadTime }), true},
	{"load-steps", "in how many steps a load takes its memory", number(func(o *Options) *int { return &o.LoadSteps }), true},
	{"unload", "how long an unload takes", duration(func(o *Options) *time.Duration { return &o.UnloadTime }), true},
	{"release", "how long after the unload the memory is released", duration(func(o *Options) *time.Duration { return &o.ReleaseDelay }), true},
	{"run", "how long a piece of work takes", duration(func(o *Options) *time.Duration { return &o.RunTime }), true},
	{"preloaded", "load before listening", truth(func(o *Options) *bool { return &o.Preloaded }), true},
	{"lazy", "load inside the first request", truth(func(o *Options) *bool { return &o.Lazy }), true},
	{"concurrency", "requests worked on at once; 0 means any number", number(func(o *Options) *int { return &o.Concurrency }), false},
	{"keep-alive", "the idle time of a server that unloads by itself; negative means for ever", duration(func(o *Options) *time.Duration { return &o.KeepAlive }), true},
	{"grace", "how long an unload waits for running work, where the server bounds that", duration(func(o *Options) *time.Duration { return &o.Grace }), true},
	{"allow-unload", "open the unload route of a kokoro", truth(func(o *Options) *bool { return &o.AllowUnload }), true},
	{"keep-jobs", "how long an sdcpp tells of a job that has ended", duration(func(o *Options) *time.Duration { return &o.KeepJobs }), true},
	{"quiet", "leave requests out of the event log", truth(func(o *Options) *bool { return &o.Quiet }), true},
	{"faults", "faults from the start, as JSON", setFaults, false},
}

// settable are the words that /control can set.
var settable = func() (words []string) {
	for _, k := range keywords {
		if k.live {
			words = append(words, k.word)
		}
	}
	return words
}()

func number(field func(*Options) *int) func(*Options, string) error {
	return func(o *Options, v string) (err error) {
		*field(o), err = strconv.Atoi(v)
		return err
	}
}

func size(field func(*Options) *gpu.Bytes) func(*Options, string) error {
	return func(o *Options, v string) (err error) {
		*field(o), err = gpu.ParseBytes(v)
		return err
	}
}

func duration(field func(*Options) *time.Duration) func(*Options, string) error {
	return func(o *Options, v string) (err error) {
		*field(o), err = time.ParseDuration(v)
		return err
	}
}

func truth(field func(*Options) *bool) func(*Options, string) error {
	return func(o *Options, v string) (err error) {
		*field(o), err = strconv.ParseBool(v)
		return err
	}
}

func mannerList() string {
	var words []string
	for _, m := range Manners() {
		words = append(words, string(m))
	}
	return strings.Join(words, ", ")
}

func setModels(o *Options, v string) error {
	o.Models = map[string]gpu.Bytes{}
	for _, part := range strings.Split(v, "+") {
		// A model's own name may hold a colon: "qwen:7b:5GiB".
		i := strings.LastIndexByte(part, ':')
		if i <= 0 {
			return fmt.Errorf("%q: want NAME:SIZE", part)
		}
		b, err := gpu.ParseBytes(part[i+1:])
		if err != nil {
			return err
		}
		o.Models[part[:i]] = b
	}
	return nil
}

func setFaults(o *Options, v string) error {
	return strict(strings.NewReader(v), &o.Faults)
}

func setOption(o *Options, word, value string) error {
	i := slices.IndexFunc(keywords, func(k keyword) bool { return k.word == word })
	if i < 0 {
		var words []string
		for _, k := range keywords {
			words = append(words, k.word)
		}
		return fmt.Errorf("unknown option %q: there are %s", word, strings.Join(words, ", "))
	}
	if err := keywords[i].set(o, value); err != nil {
		return fmt.Errorf("option %s=%q: %w", word, value, err)
	}
	return nil
}

// ParseSpec reads a server from words such as
//
//	name=mvoice,addr=127.0.0.1:8766,vram=2.8GiB,load=1s,lazy=true
//
// on top of base. The words are those of the command line's flags.
func ParseSpec(base Options, spec string) (Options, error) {
	for _, part := range strings.Split(spec, ",") {
		word, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			return base, fmt.Errorf("server %q: %q: want WORD=VALUE", spec, part)
		}
		if err := setOption(&base, word, value); err != nil {
			return base, fmt.Errorf("server %q: %w", spec, err)
		}
	}
	return base, nil
}

// RunFromArgs runs servers until SIGTERM or SIGINT and returns the process's
// exit status: 0 after a signal, 2 for bad arguments, 1 if a server can't
// start, 137 if it died by a fault and was alone.
//
// Each argument that is no flag is one server (ParseSpec) on top of the flags;
// without any, the flags describe one server. When all of them listen it
// prints a line "NAME MANNER URL" for each.
func RunFromArgs(args []string) int {
	return run(args, os.Stdout, os.Stderr)
}

func run(args []string, stdout, stderr io.Writer) int {
	// Before anything else, so that a signal during the start is not lost.
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(stop)
	complain := func(err error) { _, _ = fmt.Fprintln(stderr, "modelserver:", err) }

	var base Options
	flags := flag.NewFlagSet("modelserver", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		_, _ = fmt.Fprintln(stderr, "usage: modelserver [flags] [WORD=VALUE,WORD=VALUE… …]\n\n"+
			"Pretends to be one or several model servers. Each argument is one server,\nin the words of the flags, on top of the flags.")
		flags.PrintDefaults()
	}
	for _, k := range keywords {
		// The manners register themselves after keywords is made.
		help := strings.ReplaceAll(k.help, "{manners}", mannerList())
		flags.Func(k.word, help, func(value string) error { return k.set(&base, value) })
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	all := []Options{base}
	if flags.NArg() > 0 {
		all = nil
		for _, spec := range flags.Args() {
			o, err := ParseSpec(base, spec)
			if err != nil {
				complain(err)
				return 2
			}
			all = append(all, o)
		}
	}
	died := make(chan struct{}, len(all))
	var servers []*Server
	defer func() {
		for _, s := range servers {
			_ = s.Close() // it never fails
		}
	}()
	for _, o := range all {
		if o.Name == "" {
			o.Name = "modelserver"
		}
		if len(all) == 1 {
			// A server alone dies as a process: a supervisor must see it.
			o.OnDeath = func() {
				select {
				case died <- struct{}{}:
				default:
				}
			}
		}
		s, err := Start(o)
		if err != nil {
			complain(err)
			return 1
		}
		servers = append(servers, s)
	}
	for _, s := range servers {
		if _, err := fmt.Fprintln(stdout, s.Name(), s.options().Manner, s.URL()); err != nil {
			complain(err)
			return 1
		}
	}
	select {
	case <-stop:
		return 0
	case <-died:
		return 137
	}
}
