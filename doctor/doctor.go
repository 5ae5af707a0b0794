// Package doctor looks at a machine and at a configuration of the broker, and
// says what will not work there and how to fix it. It gathers facts, each
// within a time-out and all at once, and then judges them. It changes nothing:
// no model is loaded, no server is started, no file is written.
package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// Severity says how bad a finding is.
type Severity string

// The severities, the worst first.
const (
	Error   Severity = "error"   // it does not work
	Warning Severity = "warning" // it works, and may surprise
	Note    Severity = "note"    // good to know
)

var severities = []Severity{Error, Warning, Note}

// Finding is one thing that was found.
type Finding struct {
	Severity Severity `json:"severity"`
	// Check names the kind of check: `config`, `gpu`, `server`, `claims` …
	Check string `json:"check"`
	// Consumer is the name of the consumer that it is about; empty: none.
	Consumer string `json:"consumer,omitempty"`
	// Where is `file:line`, or else the path in Caddy's JSON; empty: no place of the configuration.
	Where string `json:"where,omitempty"`
	// What was found, in a sentence.
	What string `json:"what"`
	// Mend says what to do; a note has none.
	Mend string `json:"mend,omitempty"`

	// How to find its line in a Caddyfile: the directive, as a regular expression, and a word after it; after which place.
	words []string
	after string
}

// Report is all that was found, the worst first.
type Report struct {
	Errors   int       `json:"errors"`
	Warnings int       `json:"warnings"`
	Findings []Finding `json:"findings"`
}

// Site is what is looked at, opened as far as that went.
type Site struct {
	// File is the configuration's path, and Config the whole of it as JSON; nil: it could not be read.
	File   string
	Config []byte
	// Faults are what is wrong with the configuration by itself.
	Faults []error
	// Warnings are what is doubtful in it, though it can be used.
	Warnings []config.Warning
	// Placeholders are the names of those that the handler gpu_broker sets.
	Placeholders []string
	// Broker is the app's part, resolved as far as that went; nil: there is none.
	Broker *config.Broker
	// Lifecycles are the consumers' raw lifecycles, and Drivers what they came to. A consumer whose lifecycle is faulty has no driver.
	Lifecycles map[string]json.RawMessage
	Drivers    map[string]lifecycle.Driver
	// Sampler is the configured one; nil: it is faulty. Auto is the one that looks for the best.
	Sampler, Auto gpu.Guest
	// Data are the folders that Caddy writes to.
	Data []string
	// Timeout bounds each look.
	Timeout time.Duration
}

// Examine looks at everything and judges it. It ends soon after the site's time-out, whatever hangs.
func Examine(ctx context.Context, s *Site) *Report {
	f := gather(ctx, s)
	r := &Report{Findings: []Finding{}}
	for _, judge := range []func(*facts) []Finding{
		judgeConfig, judgePlaceholders, judgeUnended, judgeGPUs, judgeDevices, judgeProcesses, judgeServers, judgeMeans, judgeClaims,
		judgeTimeouts, judgeRoutes, judgeBypasses, judgeNewDefault, judgePorts, judgeFolders, judgeListeners, judgeUnnamed, judgeOutsiders,
	} {
		r.Findings = append(r.Findings, judge(f)...)
	}
	slices.SortStableFunc(r.Findings, func(a, b Finding) int {
		return cmp.Compare(slices.Index(severities, a.Severity), slices.Index(severities, b.Severity))
	})
	for _, found := range r.Findings {
		switch found.Severity {
		case Error:
			r.Errors++
		case Warning:
			r.Warnings++
		}
	}
	return r
}

// Write shows the report to people.
func (r *Report) Write(w io.Writer) error {
	var b strings.Builder
	for _, f := range r.Findings {
		place := ""
		if f.Where != "" {
			place = f.Where + ": "
		}
		if f.Consumer != "" {
			place += "consumer " + f.Consumer + ": "
		}
		fmt.Fprintf(&b, "%-8s%s%s\n", f.Severity, place, f.What)
		if f.Mend != "" {
			fmt.Fprintf(&b, "        → %s\n", f.Mend)
		}
	}
	fmt.Fprintf(&b, "%s, %s\n", count(r.Errors, "error"), count(r.Warnings, "warning"))
	_, err := io.WriteString(w, b.String())
	return err
}

func count(n int, thing string) string {
	switch n {
	case 0:
		return "no " + thing + "s"
	case 1:
		return "1 " + thing
	default:
		return fmt.Sprintf("%d %ss", n, thing)
	}
}

// about begins a finding that concerns a consumer; word is the setting whose line is meant.
func (f *facts) about(severity Severity, check string, c *config.Consumer, word string) Finding {
	return Finding{Severity: severity, Check: check, Consumer: c.Name, Where: f.lines.of(c.Source, word)}
}

func (f Finding) saying(what, mend string) Finding {
	f.What, f.Mend = what, mend
	return f
}
