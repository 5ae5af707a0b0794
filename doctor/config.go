package doctor

import (
	"encoding/json"
	"regexp"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// place is `file:line` as errors of the configuration name it.
var place = regexp.MustCompile(`([^\s:()'"]+):(\d+)`)

// titled is a fault that begins with what it is about: a consumer or a route, and where that is.
var titled = regexp.MustCompile(`(?m)^(?:consumer "([^"]*)"|(gpu_broker))(?: \(([^()\s]+:\d+)\))?: (.*)$`)

// judgeConfig tells the faults of the configuration, one by one.
func judgeConfig(f *facts) (out []Finding) {
	seen := map[string]bool{}
	tell := func(severity Severity, fault error) {
		for text := range strings.Lines(fault.Error()) {
			text = strings.TrimSpace(text)
			if text == "" || seen[text] {
				continue
			}
			seen[text] = true
			found := Finding{Severity: severity, Check: "config", Where: place.FindString(text), What: text, Mend: mendConfig(text)}
			if m := titled.FindStringSubmatch(text); m != nil {
				found.Consumer, found.Where, found.What = m[1], f.lines.of(m[3], settingOf(m[4])), m[4]
				if m[2] != "" {
					found.What = m[2] + ": " + found.What
				}
			}
			out = append(out, found)
		}
	}
	for _, fault := range f.site.Faults {
		tell(Error, fault)
	}
	if f.site.Broker == nil && len(out) > 0 {
		out[0].Mend += "; `caddy gpu-broker init` writes a configuration that works on this machine"
	}
	for _, w := range f.site.Warnings {
		severity := Error
		if w.Advice {
			severity = Warning
		}
		tell(severity, w.Err)
	}
	if f.site.Broker != nil && len(f.site.Broker.Consumers) == 0 {
		out = append(out, Finding{Severity: Error, Check: "config", Where: f.site.File, What: "the configuration has no consumer: there is nothing to share the GPU among",
			Mend: "add one for each model server: consumer NAME { ... }; `caddy gpu-broker init` writes them for those that run here"})
	}
	return out
}

// ofLifecycle is what stands before the faults of a lifecycle.
var ofLifecycle = regexp.MustCompile(`^(?:(?:lifecycle [a-z_]+|server): )+`)

// settingOf is the setting that a fault of a consumer speaks of: it begins with it, or with its lifecycle.
func settingOf(text string) string {
	text = strings.TrimPrefix(ofLifecycle.ReplaceAllString(text, ""), "unknown ")
	end := strings.IndexFunc(text, func(r rune) bool { return r != '_' && (r < 'a' || r > 'z') })
	if end < 0 {
		return text
	}
	return text[:end]
}

// isFaulty reports whether the configuration of a consumer has a fault: then what is known of it may be half of it.
func (s *Site) isFaulty(consumer string) bool {
	for _, fault := range s.Faults {
		for _, m := range titled.FindAllStringSubmatch(fault.Error(), -1) {
			if m[1] == consumer {
				return true
			}
		}
	}
	return false
}

// mendConfig is what to do about a fault; its text mostly says so itself.
func mendConfig(text string) string {
	switch {
	case strings.Contains(text, "did you mean "):
		_, rest, _ := strings.Cut(text, "did you mean ")
		word, _, _ := strings.Cut(rest, "?")
		return "write " + word
	case strings.Contains(text, "unrecognized placeholder"), strings.Contains(text, "evaluated to empty"), strings.Contains(text, "placeholder"):
		return "set what the placeholder names where Caddy runs (for a service: Environment= of its unit), or write the value itself"
	default:
		return "correct that line; `caddy validate` tells the same"
	}
}

// driverOf is the name of the configured sampler.
func driverOf(b *config.Broker) string {
	var guest struct {
		Driver string `json:"driver"`
	}
	if b == nil || json.Unmarshal(b.GPURaw, &guest) != nil || guest.Driver == "" {
		return config.DefaultDriver
	}
	return guest.Driver
}
