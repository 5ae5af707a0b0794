package caddyfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// ParseGlobal reads the global option gpu_broker, which d stands before, and
// adds it to what earlier blocks gave; existing is nil if there were none. It
// does not change existing. Its error holds all faults, one a line.
func ParseGlobal(d *caddyfile.Dispenser, existing *config.Broker) (*config.Broker, error) {
	b := &config.Broker{}
	if existing != nil {
		*b = *existing
		b.Consumers = slices.Clone(existing.Consumers)
		b.Sources = maps.Clone(existing.Sources)
	}
	var faults []error
	for d.Next() {
		name := d.Val()
		if len(d.RemainingArgs()) > 0 {
			faults = append(faults, wants(d, name+" { ... }"))
		}
		faults = append(faults, readBlock(d, name, noted(b, brokerWords(b))))
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	return b, nil
}

func brokerWords(b *config.Broker) map[string]word {
	s := newSaid(nil)
	return map[string]word{
		"gpu":      sampler(&b.GPURaw),
		"consumer": consumer(b),

		"scheduler": single(s, &b.Scheduler, config.Evicting, oneOf("scheduler", config.Schedulers)),
		"lock":      single(s, &b.Lock, config.LockExclusive, oneOf("lock", config.Locks)),
		"headers":   single(s, &b.Headers, config.Off, oneOf("headers setting", config.Switches)),

		"idle_unload":  single(s, &b.IdleUnload, config.Observe, oneOf("idle_unload setting", config.IdleUnloads)),
		"idle_timeout": optional(s, &b.IdleTimeout, "15m", duration),
		"eviction":     single(s, &b.Eviction, config.Observe, oneOf("eviction setting", config.Evictions)),

		"cushion":      optional(s, &b.Cushion, "256MiB", size),
		"reserve":      single(s, &b.Reserve, "1GiB", size),
		"max_body":     single(s, &b.MaxBody, "256MiB", someSize),
		"max_buffered": single(s, &b.MaxBuffered, "2GiB", someSize),

		"cors_origins": checkedList(&b.CORSOrigins, "ORIGIN ...", config.CheckOrigin),

		"upload_idle":   optional(s, &b.UploadIdle, "30s", duration),
		"stall_timeout": optional(s, &b.StallTimeout, "30s", duration),
		"tunnel_idle":   optional(s, &b.TunnelIdle, "5m", duration),

		"max_queue":     single(s, &b.MaxQueue, "512", number(1)),
		"max_evictions": single(s, &b.MaxEvictions, "5", number(1)),

		"budget":         single(s, &b.Budget, "10m", someDuration),
		"max_run":        single(s, &b.MaxRun, "30m", duration),
		"stop_grace":     optional(s, &b.StopGrace, "30s", duration),
		"probe_interval": single(s, &b.ProbeInterval, "5s", someDuration),
		"probe_timeout":  single(s, &b.ProbeTimeout, "2s", someDuration),
		"load_timeout":   single(s, &b.LoadTimeout, "5m", someDuration),
		"unload_timeout": single(s, &b.UnloadTimeout, "30s", someDuration),
		"evict_wait":     single(s, &b.EvictWait, "10s", someDuration),
		"drain_timeout":  single(s, &b.DrainTimeout, "10m", someDuration),
		"abandon_after":  single(s, &b.AbandonAfter, "10s", someDuration),
		"outsider_wait":  single(s, &b.OutsiderWait, "10s", someDuration),

		"overtake":      optional(s, &b.Overtake, "15", factor),
		"overtake_min":  optional(s, &b.OvertakeMin, "30s", duration),
		"overtake_max":  optional(s, &b.OvertakeMax, "10m", duration),
		"hold":          optional(s, &b.Hold, "0.25", factor),
		"lock_overtake": optional(s, &b.LockOvertake, "20s", duration),
		"credit":        optional(s, &b.Credit, "60s", duration),

		"client_cooldown":      single(s, &b.ClientCooldown, "2s", duration),
		"reserved_interactive": reserved(&b.ReservedInteractive),
		"victim_priority":      single(s, &b.VictimPriority, config.VictimLower, oneOf("victim_priority", config.VictimPriorities)),
		"stay_warm":            stayWarm(&b.StayWarm),
		"restore":              restore(&b.Restore),
		"request_log":          single(s, &b.RequestLog, "/var/log/caddy/gpu-requests.csv", anyText),
	}
}

// noted are words that note where they stand in b, but for those whose value does so itself.
func noted(b *config.Broker, words map[string]word) map[string]word {
	for name, read := range words {
		if name == "consumer" || name == "restore" {
			continue
		}
		words[name] = func(d *caddyfile.Dispenser) error {
			if b.Sources == nil {
				b.Sources = map[string]string{}
			}
			if b.Sources[name] == "" {
				b.Sources[name] = source(d)
			}
			return read(d)
		}
	}
	return words
}

// source is where d stands.
func source(d *caddyfile.Dispenser) string { return fmt.Sprintf("%s:%d", d.File(), d.Line()) }

// sampler reads `gpu <driver> ...`; the driver's module reads the rest.
func sampler(field *json.RawMessage) word {
	return func(d *caddyfile.Dispenser) error {
		if !d.NextArg() {
			return wants(d, "gpu DRIVER, as in gpu auto")
		}
		driver := d.Val()
		raw, err := guest(d, "gpu driver", config.SamplerNamespace, "driver")
		if err != nil {
			return err
		}
		if len(*field) > 0 && !sameJSON(*field, raw) {
			var first struct{ Driver string }
			_ = json.Unmarshal(*field, &first) // written by us: the name is for people only
			if first.Driver == driver {
				return d.Errf("gpu %s is set twice, with different settings: leave one of them out", driver)
			}
			return d.Errf("gpu is set twice, to %s and to %s: leave one of them out", first.Driver, driver)
		}
		*field = raw
		return nil
	}
}

// guest reads the rest of the segment, which begins with the module's name, as
// a module of namespace, and gives its JSON with the name at the key inline.
// readHere names those that are read without their module.
func guest(d *caddyfile.Dispenser, what, namespace, inline string, readHere ...string) (json.RawMessage, error) {
	name := d.Val()
	if _, err := caddy.GetModule(namespace + "." + name); err != nil {
		return nil, d.WrapErr(config.Unknown(what, name, append(config.GuestNames(namespace), readHere...)))
	}
	module, err := caddyfile.UnmarshalModule(d, namespace+"."+name)
	if err != nil {
		return nil, err
	}
	var warnings []caddyconfig.Warning
	raw := caddyconfig.JSONModuleObject(module, inline, name, &warnings)
	if len(warnings) > 0 {
		return nil, d.WrapErr(fmt.Errorf("%s %s: %s", what, name, warnings[0].Message))
	}
	return raw, nil
}

func sameJSON(a, b json.RawMessage) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	p, _ := json.Marshal(x) // what was unmarshalled can be marshalled
	q, _ := json.Marshal(y)
	return bytes.Equal(p, q)
}
