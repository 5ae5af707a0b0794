//go:build unix

// Command demo runs the four-consumer example with pretending model servers on
// a simulated GPU, behind a real Caddy over HTTPS on localhost, until it is
// interrupted. It needs no root, and prints curl lines to try.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	// Two signals fit: the first one stops the demo, the second one kills it.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if err := run(os.Args[1:], signals); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(args []string, signals <-chan os.Signal) error {
	o := options{out: os.Stdout}
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.StringVar(&o.caddy, "caddy", "bin/caddy", "a Caddy with the module")
	flags.StringVar(&o.modelserver, "modelserver", "bin/modelserver", "the pretending model servers")
	flags.StringVar(&o.config, "config", "examples/four-consumers/Caddyfile", "the example")
	flags.StringVar(&o.dir, "dir", "", "where it keeps its data (default: a folder in the user's cache)")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if o.dir == "" {
		o.dir = defaultDir()
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	kill := make(chan struct{})
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		for _, onSignal := range []func(){stop, func() { close(kill) }} {
			select {
			case <-signals:
				onSignal()
			case <-ended:
				return
			}
		}
	}()
	o.kill = kill
	return demo(ctx, o)
}

// defaultDir is a folder of the user's own, outside the source tree.
func defaultDir() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = filepath.Join(os.TempDir(), fmt.Sprintf("user-%d", os.Getuid()))
	}
	return filepath.Join(cache, "caddy-gpu-broker", "demo")
}
