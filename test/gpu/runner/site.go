package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// answerLimit bounds what is read of an answer; a thousand decisions are the longest.
const answerLimit = 8 << 20

// site is Caddy with the two servers behind it.
type site struct {
	options options
	client  *http.Client // trusts Caddy's local CA
}

// stats is what a server says of itself. Times are seconds since 1970.
type stats struct {
	PID         int     `json:"pid"`
	About       string  `json:"about"`
	Loads       int     `json:"loads"`
	Unloads     int     `json:"unloads"`
	Works       int     `json:"works"`
	OOMs        int     `json:"ooms"`
	ColdWorks   int     `json:"cold_works"`
	LoadBegan   float64 `json:"load_began"`
	LoadEnded   float64 `json:"load_ended"`
	UnloadBegan float64 `json:"unload_began"`
	UnloadEnded float64 `json:"unload_ended"`
}

func (s stats) loadCall() time.Duration   { return span(s.LoadBegan, s.LoadEnded) }
func (s stats) unloadCall() time.Duration { return span(s.UnloadBegan, s.UnloadEnded) }

func span(from, to float64) time.Duration { return time.Duration((to - from) * float64(time.Second)) }

func moment(seconds float64) time.Time {
	whole, part := math.Modf(seconds)
	return time.Unix(int64(whole), int64(part*1e9))
}

// health is what a server's health route says.
type health struct {
	Loaded   bool  `json:"loaded"`
	Resident int64 `json:"gpu_resident_mib"`
}

// connect waits until both servers and Caddy answer, and Caddy's broker has
// probed them and seen the GPU.
func connect(ctx context.Context, o options) (*site, error) {
	ctx, cancel := context.WithTimeout(ctx, o.startup)
	defer cancel()
	s := &site{options: o, client: &http.Client{}}
	for _, url := range []string{o.alpha, o.beta} {
		if err := until(ctx, func() error { return s.get(ctx, url+"/health", new(health)) }); err != nil {
			return nil, fmt.Errorf("the model server at %s does not answer: %w", url, err)
		}
	}
	if o.ca != "" {
		pool := x509.NewCertPool()
		err := until(ctx, func() error {
			pem, err := os.ReadFile(o.ca)
			if err == nil && !pool.AppendCertsFromPEM(pem) {
				err = fmt.Errorf("%s holds no certificate", o.ca)
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("the certificate of Caddy's local CA: %w", err)
		}
		s.client.Transport = &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}
	}
	err := until(ctx, func() error {
		status, err := s.status(ctx)
		if err != nil {
			return err
		}
		if len(status.GPUs) == 0 {
			return fmt.Errorf("it sees no GPU: %s", status.Degraded)
		}
		for name, c := range status.Consumers {
			if c.Health != "healthy" {
				return fmt.Errorf("%s is %s: %s", name, c.Health, c.Reason)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("caddy's broker is not ready: %w", err)
	}
	return s, nil
}

// until tries again and again; its error is the last one when ctx ends.
func until(ctx context.Context, try func() error) error {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	var last error
	for {
		err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return last
		case <-ticker.C:
		}
	}
}

// served is what a request through Caddy got.
type served struct {
	took, queue, load time.Duration
	checksum          float64
}

// work sends a request through Caddy to a consumer.
func (s *site) work(ctx context.Context, name string) (served, error) {
	var doc struct{ Checksum float64 }
	began := time.Now()
	header, err := s.do(ctx, http.MethodPost, s.options.site+"/"+name+"/work", &doc)
	out := served{took: time.Since(began), checksum: doc.Checksum}
	if err != nil {
		return out, err
	}
	for part := range strings.SplitSeq(header.Get("Server-Timing"), ",") {
		metric, value, _ := strings.Cut(strings.TrimSpace(part), ";dur=")
		ms, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		switch took := time.Duration(ms * float64(time.Millisecond)); metric {
		case "gpu-queue":
			out.queue = took
		case "gpu-load":
			out.load = took
		}
	}
	return out, nil
}

func (s *site) status(ctx context.Context) (status broker.Status, err error) {
	return status, s.get(ctx, s.options.site+"/gpu/status", &status)
}

// decisions are those since a moment, oldest first.
func (s *site) decisions(ctx context.Context, since time.Time) ([]scheduler.Decision, error) {
	var doc struct{ Decisions []scheduler.Decision }
	if err := s.get(ctx, s.options.site+"/gpu/decisions", &doc); err != nil {
		return nil, err
	}
	for i, d := range doc.Decisions {
		if !d.At.Before(since) {
			return doc.Decisions[i:], nil
		}
	}
	return nil, nil
}

// server asks a model server itself, past Caddy.
func (s *site) server(ctx context.Context, name string) (stats, health, error) {
	var told stats
	var how health
	err := errors.Join(s.get(ctx, s.url(name)+"/stats", &told), s.get(ctx, s.url(name)+"/health", &how))
	return told, how, err
}

func (s *site) url(name string) string {
	if name == alpha {
		return s.options.alpha
	}
	return s.options.beta
}

// loadPastTheBroker loads a server without asking the broker. It returns
// whether the GPU's memory ran out.
func (s *site) loadPastTheBroker(ctx context.Context, name string) (outOfMemory bool, err error) {
	_, err = s.do(ctx, http.MethodPost, s.url(name)+"/api/admin/load", nil)
	var wrong *wrongStatus
	if errors.As(err, &wrong) && wrong.status == http.StatusInsufficientStorage {
		return true, nil
	}
	return false, err
}

// unloadByHand unloads through Caddy's admin endpoint.
func (s *site) unloadByHand(ctx context.Context, name string) error {
	_, err := s.do(ctx, http.MethodPost, s.options.admin+"/gpu_broker/consumers/"+name+"/unload?wait=30s", nil)
	return err
}

func (s *site) get(ctx context.Context, url string, into any) error {
	_, err := s.do(ctx, http.MethodGet, url, into)
	return err
}

// wrongStatus is an answer other than 200.
type wrongStatus struct {
	status    int
	url, text string
}

func (w *wrongStatus) Error() string {
	return fmt.Sprintf("%s answered %d, want 200: %s", w.url, w.status, w.text)
}

func (s *site) do(ctx context.Context, method, url string, into any) (http.Header, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, &wrongStatus{resp.StatusCode, url, strings.TrimSpace(string(body[:min(len(body), 500)]))}
	}
	if into == nil {
		return resp.Header, nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	return resp.Header, nil
}
