package simulate

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Comparison is a trace under several policies.
type Comparison struct {
	Requests int         `json:"requests"`
	Seconds  float64     `json:"seconds"` // from the first arrival to the last
	GPUs     []gpu.Bytes `json:"gpus"`
	// The share of that time in which pure execution would keep the busiest GPU busy.
	Load    float64   `json:"load"`
	Servers []Server  `json:"servers"`
	Results []*Result `json:"policies"`
}

// Server is what was assumed of a model server.
type Server struct {
	Name   string    `json:"name"`
	VRAM   gpu.Bytes `json:"vram"`
	Load   float64   `json:"load_seconds"` // mean
	Unload float64   `json:"unload_seconds"`
}

// Compare runs a trace under each of the policies. The search for the limit of
// each takes no longer than limitTime; 0: it is left out.
func Compare(ctx context.Context, w *World, requests []Request, policies []Policy, o Options, limitTime time.Duration) (*Comparison, error) {
	c := &Comparison{Requests: len(requests), GPUs: w.GPUs}
	if err := w.Check(); err != nil {
		return nil, err
	}
	var length time.Duration
	for _, q := range requests {
		length = max(length, q.At)
		c.Requests += len(q.Then)
	}
	c.Seconds = length.Seconds()
	for _, p := range policies {
		o.Policy = p
		run, err := newRun(w, requests, o)
		if err != nil {
			return nil, err
		}
		if err := run.run(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		r := run.result()
		if c.Servers == nil {
			c.Servers = run.assumed()
		}
		if limitTime > 0 {
			if r.Limit, err = limitWithin(ctx, w, requests, o, limitTime); err != nil {
				return nil, fmt.Errorf("%s: %w", p, err)
			}
		}
		c.Results = append(c.Results, r)
	}
	if length > 0 {
		c.Load = slices.Max(workOf(w, requests)) / length.Seconds()
	}
	return c, nil
}

func limitWithin(ctx context.Context, w *World, requests []Request, o Options, limitTime time.Duration) (*Limit, error) {
	limited, cancel := context.WithTimeout(ctx, limitTime)
	defer cancel()
	l, err := FindLimit(limited, w, requests, o)
	if err == nil && ctx.Err() != nil { // not its own time is over, but ours
		err = context.Cause(ctx)
	}
	return &l, err
}

// assumed is what the run took the servers for.
func (r *run) assumed() []Server {
	var out []Server
	for _, s := range r.servers {
		if s.Slot.Cloud {
			continue
		}
		const draws = 1000
		var load, unload time.Duration
		for range draws {
			load += s.Load(s.loading)
			unload += s.Unload(s.stop)
		}
		out = append(out, Server{Name: s.Slot.Name, VRAM: s.Slot.Claim, Load: (load / draws).Seconds(), Unload: (unload / draws).Seconds()})
	}
	return out
}

// Write writes the comparison for people.
func (c *Comparison) Write(out io.Writer) error {
	var b strings.Builder
	sizes := make([]string, len(c.GPUs))
	for i, g := range c.GPUs {
		sizes[i] = g.String()
	}
	fmt.Fprintf(&b, "%d requests in %s on %s; alone they would keep the busiest GPU busy for %s of the time.\n",
		c.Requests, seconds(c.Seconds).Round(time.Second), strings.Join(sizes, " and "), percent(c.Load))
	b.WriteString("Assumed:")
	for i, s := range c.Servers {
		if i > 0 {
			b.WriteString(";")
		}
		fmt.Fprintf(&b, " %s %s, loads in %s s, unloads in %s s", s.Name, s.VRAM, number(s.Load), number(s.Unload))
	}
	b.WriteString(".\n\n")

	c.row(&b, "", func(r *Result) string { return string(r.Policy) })
	c.row(&b, "loads", func(r *Result) string { return fmt.Sprint(r.Loads) })
	c.row(&b, "evictions", func(r *Result) string { return fmt.Sprint(r.Evictions) })
	c.row(&b, "GPU busy", func(r *Result) string { return percent(r.Busy) })
	c.row(&b, "loading and unloading", func(r *Result) string { return percent(r.Switching) })
	if slices.ContainsFunc(c.Results, func(r *Result) bool { return r.Limit != nil }) {
		c.row(&b, "sustains, times the load", func(r *Result) string { return r.Limit.String() })
	}
	c.group(&b, "all", func(r *Result) *Group { return &r.All })
	for _, s := range c.Results[0].Consumers {
		c.group(&b, s.Name, func(r *Result) *Group { return find(r.Consumers, func(g *Group) bool { return g.Name == s.Name }) })
	}
	for _, p := range c.Results[0].Priorities {
		c.group(&b, fmt.Sprintf("priority %d", p.Priority), func(r *Result) *Group {
			return find(r.Priorities, func(g *Group) bool { return g.Priority == p.Priority })
		})
	}
	_, err := io.WriteString(out, b.String())
	return err
}

func find(groups []Group, is func(*Group) bool) *Group {
	for i := range groups {
		if is(&groups[i]) {
			return &groups[i]
		}
	}
	return &Group{Share: 1} // under this policy it never came to that
}

func (c *Comparison) row(b *strings.Builder, title string, cell func(r *Result) string) {
	fmt.Fprintf(b, "%-26s", title)
	for _, r := range c.Results {
		fmt.Fprintf(b, "%12s", cell(r))
	}
	b.WriteString("\n")
}

func (c *Comparison) group(b *strings.Builder, title string, of func(r *Result) *Group) {
	fmt.Fprintf(b, "\n%s: %d requests\n", title, of(c.Results[0]).Requests)
	c.row(b, "  served", func(r *Result) string { return percent(of(r).Share) })
	if title != "all" && of(c.Results[0]).Name != "" {
		c.row(b, "  loads", func(r *Result) string { return fmt.Sprint(of(r).Loads) })
	}
	for _, w := range []struct {
		title string
		of    func(w *Waits) float64
	}{
		{"  wait in seconds, mean", func(w *Waits) float64 { return w.Mean }},
		{"                   p50", func(w *Waits) float64 { return w.P50 }},
		{"                   p95", func(w *Waits) float64 { return w.P95 }},
		{"                   p99", func(w *Waits) float64 { return w.P99 }},
		{"                   max", func(w *Waits) float64 { return w.Max }},
	} {
		c.row(b, w.title, func(r *Result) string { return number(w.of(&of(r).Wait)) })
	}
}

// String is the limit for people.
func (l *Limit) String() string {
	switch {
	case l == nil:
		return "-"
	case l.AtLeast:
		return fmt.Sprintf(">= %.2f", l.Multiple)
	case l.Multiple == 0:
		return "< 0.02"
	default:
		return fmt.Sprintf("%.2f", l.Multiple)
	}
}

// number writes seconds so that three figures are seen.
func number(s float64) string {
	switch {
	case s >= 100:
		return fmt.Sprintf("%.0f", s)
	case s >= 10:
		return fmt.Sprintf("%.1f", s)
	default:
		return fmt.Sprintf("%.2f", s)
	}
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }
