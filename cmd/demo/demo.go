//go:build unix

package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// The demo's patience.
const (
	startTimeout = 60 * time.Second
	pollEvery    = 100 * time.Millisecond
	followEvery  = 300 * time.Millisecond
)

// options are what the command line says.
type options struct {
	caddy, modelserver string // programs
	config             string // the example
	dir                string
	out                io.Writer
	kill               <-chan struct{} // closed: don't wait for children to end
}

// server is one pretending model server.
type server struct {
	name string
	env  string // the example's variable for its address
	port int    // the one that it has by right
	spec string // see modelserver.ParseSpec
}

const gpuSize = "16GiB"

// servers take the times of real ones, made bearable.
var servers = []server{
	{"mvoice", "MVOICE", 8766, "vram=2.8GiB,load=1s,unload=300ms,run=500ms"},
	{"whisper", "WHISPER", 8178, "vram=3GiB,load=1s,unload=300ms,run=500ms"},
	{"ollama", "OLLAMA", 11434, "manner=ollama,models=" + chatModel + ":6GiB,load=2s,unload=300ms,run=2s"},
	{"comfyui", "COMFYUI", 8188, "manner=comfyui,vram=13GiB,load=2s,unload=500ms,run=4s"},
}

const chatModel = "llama3.2"

// demo runs everything until ctx ends or a child dies.
func demo(ctx context.Context, o options) (err error) {
	note, unlock, err := lockDir(o.dir)
	if err != nil {
		return err
	}
	defer unlock()
	if err := note(fmt.Sprintf("process %d", os.Getpid())); err != nil {
		return fmt.Errorf("writing the demo's lock file: %w", err)
	}

	var children []*process
	defer func() {
		if len(children) > 0 {
			_, _ = fmt.Fprintln(o.out, "\nStopping …")
		}
		err = errors.Join(err, stopAll(children, o.kill))
	}()
	site, env, specs, err := place()
	if err != nil {
		return err
	}
	sim := filepath.Join(o.dir, "gpu")
	args := append([]string{"-sim-dir", sim, "-total", gpuSize}, specs...)
	models, err := start(o.dir, "modelserver", nil, o.modelserver, args...)
	if err != nil {
		return err
	}
	children = append(children, models)

	data := filepath.Join(o.dir, "data")
	env = append(env, "GPU=simulated "+gpuSize, "GPU_BROKER_SIM_DIR="+sim, "XDG_DATA_HOME="+data, "XDG_CONFIG_HOME="+filepath.Join(o.dir, "config"))
	caddy, err := start(o.dir, "caddy", env, o.caddy, "run", "--config", o.config, "--adapter", "caddyfile")
	if err != nil {
		return err
	}
	children = append(children, caddy)

	v := &visitor{site: site, root: filepath.Join(data, "caddy", "pki", "authorities", "local", "root.crt")}
	defer v.close()
	if err := v.awaitSite(ctx, children); err != nil || ctx.Err() != nil {
		return err
	}
	g, err := newGuide(o.dir, v)
	if err != nil {
		return err
	}
	if err := g.print(o.out); err != nil {
		return err
	}
	return v.follow(ctx, children, o.out)
}

// place chooses the ports and gives the site's URL, Caddy's environment and the servers' specs.
func place() (site string, env, specs []string, err error) {
	p := ports{taken: map[int]bool{}}
	for _, s := range servers {
		port, err := p.choose("127.0.0.1", s.port)
		if err != nil {
			return "", nil, nil, fmt.Errorf("a port for %s: %w", s.name, err)
		}
		addr := fmt.Sprintf("127.0.0.1:%d", port)
		env = append(env, s.env+"="+addr)
		specs = append(specs, fmt.Sprintf("name=%s,addr=%s,%s", s.name, addr, s.spec))
	}
	https, err := p.choose("", 8443)
	if err != nil {
		return "", nil, nil, fmt.Errorf("a port for the site: %w", err)
	}
	admin, err := p.choose("localhost", 2019)
	if err != nil {
		return "", nil, nil, fmt.Errorf("a port for Caddy's admin endpoint: %w", err)
	}
	site = fmt.Sprintf("https://localhost:%d", https)
	return site, append(env, "SITE="+site, fmt.Sprintf("ADMIN=localhost:%d", admin)), specs, nil
}

// visitor reads the site's status pages.
type visitor struct {
	site   string
	root   string // the certificate of Caddy's local authority
	client *http.Client
}

func (v *visitor) close() {
	if v.client != nil {
		v.client.CloseIdleConnections()
	}
}

// get reads a JSON document of the site.
func (v *visitor) get(ctx context.Context, path string, into any) error {
	if v.client == nil {
		pem, err := os.ReadFile(v.root)
		if err != nil {
			return err
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return fmt.Errorf("%s holds no certificate", v.root)
		}
		v.client = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, v.site+path, nil)
	if err != nil {
		return err
	}
	response, err := v.client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s%s answers %s", v.site, path, response.Status)
	}
	return json.NewDecoder(io.LimitReader(response.Body, 8<<20)).Decode(into)
}

// awaitSite returns once every server is healthy and the GPU is seen, and
// without an error when ctx ends before.
func (v *visitor) awaitSite(ctx context.Context, children []*process) error {
	deadline := time.Now().Add(startTimeout)
	return poll(ctx, children, pollEvery, func() (bool, error) {
		ready, why := v.ready(ctx)
		if !ready && time.Now().After(deadline) {
			return false, fmt.Errorf("the site is not up after %s: %w; Caddy's log is %s", startTimeout, why, children[len(children)-1].log)
		}
		return ready, nil
	})
}

func (v *visitor) ready(ctx context.Context) (bool, error) {
	var status struct {
		GPUCount  int `json:"gpu_count"`
		Consumers map[string]struct {
			Health string `json:"health"`
			Reason string `json:"reason"`
		} `json:"consumers"`
	}
	if err := v.get(ctx, "/v1/status", &status); err != nil {
		return false, err
	}
	if status.GPUCount == 0 {
		return false, errors.New("no GPU is seen")
	}
	for _, s := range servers {
		if c := status.Consumers[s.name]; c.Health != "healthy" {
			return false, fmt.Errorf("%s is %s %s", s.name, c.Health, c.Reason)
		}
	}
	return true, nil
}

// decision is one line of the broker's record.
type decision struct {
	At       time.Time `json:"at"`
	Kind     string    `json:"kind"`
	Consumer string    `json:"consumer"`
	Target   string    `json:"target"`
	Reason   string    `json:"reason"`
}

// follow prints each new decision until ctx ends or a child dies.
func (v *visitor) follow(ctx context.Context, children []*process, out io.Writer) error {
	var shown time.Time
	return poll(ctx, children, followEvery, func() (bool, error) {
		var record struct {
			Decisions []decision `json:"decisions"`
		}
		if v.get(ctx, "/v1/decisions", &record) != nil {
			return false, nil // a child's death is told by poll; all else passes
		}
		last := shown
		for _, d := range record.Decisions {
			if !d.At.After(shown) {
				continue
			}
			last = d.At
			line := fmt.Sprintf("%s  %-10s %-8s %s", d.At.Local().Format("15:04:05.0"), d.Kind, d.Consumer, d.Reason)
			if _, err := fmt.Fprintln(out, line); err != nil {
				return false, err
			}
		}
		shown = last
		return false, nil
	})
}

// poll asks again and again until the answer is yes, ctx ends, or a child dies.
func poll(ctx context.Context, children []*process, every time.Duration, ask func() (bool, error)) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		if done, err := ask(); done || err != nil {
			return err
		}
		for _, child := range children {
			select {
			case <-child.done:
				if ctx.Err() == nil {
					return child.died()
				}
			default:
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}
