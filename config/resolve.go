package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
)

// maxName is the greatest length of a consumer's name: it is a label of metrics.
const maxName = 64

// maxSize is the largest amount of memory that a setting may name: sums of many such do not overflow.
const maxSize = 1024 * gpu.TiB

// Resolve makes a configuration ready for use, in place: it lays each
// consumer's preset under what the user wrote, expands the placeholders in its
// upstream, fills in all defaults (but Cushion's, see CushionFor) and checks
// everything. presets may be nil, if there are none.
//
// What it finds doubtful without being a fault, Warnings returns afterwards.
//
// Its error holds all faults at once, each in a line of its own. Then the GPURaw and LifecycleRaw that are empty are
// those whose faults are told, so that the others can be looked into all the same.
func Resolve(b *Broker, presets Presets) error {
	f := &faults{}
	f.checkDriver(b)
	noDriver := len(f.list) > 0
	b.fillDefaults()
	f.checkBroker(b)

	where := map[string]string{}
	var noLifecycle []*Consumer
	for i, c := range b.Consumers {
		if c == nil {
			f.add("consumer number "+strconv.Itoa(i+1), "it is null: leave it out")
			continue
		}
		who := c.title(i)
		merged, err := c.withPreset(presets)
		if err != nil {
			f.add(who, "%w", err)
		}
		b.Consumers[i] = merged
		if known := merged.fillDefaultsAndCheck(f, who, b); !known || err != nil { // without its preset much of it is missing
			noLifecycle = append(noLifecycle, merged)
		}
		if first, twice := where[c.Name]; twice && c.Name != "" {
			f.add(who, "this name is taken by %s: a consumer is defined once", first)
		} else {
			where[c.Name] = who
		}
	}
	f.checkAmong(b)
	f.doubtSizes(b)
	f.doubtSettings(b)
	if len(f.list) == 0 { // else it is not used, and may have been written by halves
		f.doubles(b)
	}
	b.warnings = f.warnings
	if noDriver {
		b.GPURaw = nil
	}
	for _, c := range noLifecycle {
		c.LifecycleRaw = nil
	}
	return errors.Join(f.list...)
}

// title names a consumer in errors.
func (c *Consumer) title(index int) string {
	title := "consumer " + strconv.Quote(c.Name)
	if c.Name == "" {
		title = "consumer number " + strconv.Itoa(index+1)
	}
	return faultlines.Title(title, c.Source)
}

// title names the broker's own settings in errors, with the place of the first of words that has one.
func (b *Broker) title(words ...string) string {
	var source string
	for _, word := range words {
		source = cmp.Or(source, b.Sources[word])
	}
	return faultlines.Title("gpu_broker", source)
}

// fillDefaultsAndCheck also reports whether c has a lifecycle that there is.
func (c *Consumer) fillDefaultsAndCheck(f *faults, who string, b *Broker) (known bool) {
	if c.explicit["concurrency"] {
		f.add(who, "concurrency is 0: it must be at least 1; enabled off refuses all requests")
	}
	c.fillDefaults(b)

	if err := CheckName(c.Name); err != nil {
		f.add(who, "%w", err)
	}
	f.word(who, "enabled", c.Enabled, Switches)
	f.word(who, "stops_when_left", c.StopsWhenLeft, Switches)
	if c.Lock != "" {
		f.word(who, "lock", c.Lock, ConsumerLocks)
	}
	f.notNegative(who, "concurrency", c.Concurrency)
	f.notNegative(who, "gpu", c.GPU)
	f.size(who, "vram", c.VRAM)
	f.size(who, "residual", c.Residual)
	f.checkModels(who, c, b)
	if c.VRAM == 0 && b.Scheduler == Evicting && !c.Cloud && !c.HasModels() {
		f.add(who, "vram is missing: say how much GPU memory it takes when loaded, as in vram 6GiB")
	}
	if c.Cloud {
		f.checkCloud(who, c)
	}
	if err := CheckPriority(*c.Priority); err != nil {
		f.add(who, "%w", err)
	}
	f.checkReserved(who, c, b)
	if c.Category != "" {
		if err := CheckCategory(c.Category); err != nil {
			f.add(who, "%w", err)
		}
	}
	f.duration(who, "keep_alive", &c.KeepAlive)
	f.duration(who, "idle_timeout", c.IdleTimeout)
	f.duration(who, "max_run", c.MaxRun)
	f.duration(who, "switch_cost", &c.SwitchCost)
	f.duration(who, "budget", &c.Budget)
	f.duration(who, "load_timeout", &c.LoadTimeout)
	f.duration(who, "unload_timeout", &c.UnloadTimeout)

	if expanded, err := caddy.NewReplacer().ReplaceOrErr(c.Upstream, true, true); err != nil {
		f.add(who, "upstream %q: %w", c.Upstream, err)
	} else {
		c.Upstream = expanded
		if err := CheckUpstream(c.Upstream); err != nil && c.Upstream != "" {
			f.add(who, "%w", err)
		}
	}
	for _, list := range []struct {
		field    string
		patterns []string
	}{{"gpu_routes", c.GPURoutes}, {"free_routes", c.FreeRoutes}, {"named_routes", c.NamedRoutes}, {"bypass", c.Bypass}, {"touch", c.Touch}, {"async_routes", c.AsyncRoutes}, {"start_on", c.StartOn}, {"blocked", c.Blocked}} {
		for _, text := range list.patterns {
			if _, err := ParseRoutePattern(text); err != nil {
				f.add(who, "%s: %w", list.field, err)
			}
		}
	}

	if _, err := ParsePathMatch(c.PathMatch); err != nil {
		f.add(who, "path_match: %w", err)
	}
	if c.UnlistedRequests != "" {
		f.word(who, "unlisted_requests", c.UnlistedRequests, UnlistedWords)
	}
	for _, u := range c.UnloadRequests {
		if err := u.Check(); err != nil {
			f.add(who, "unload_requests: %w", err)
		}
	}
	f.checkPinnedSet(who, c)

	raw, protocol, err := withProtocol(c.LifecycleRaw)
	switch {
	case err != nil:
		f.add(who, "lifecycle: %w", err)
	case protocol == DefaultProtocol:
		known = true
	default:
		known = f.word(who, "lifecycle", protocol, append(GuestNames(LifecycleNamespace), DefaultProtocol))
		if b.Scheduler != Evicting {
			f.add(who, "lifecycle %s needs the scheduler %s: with %s nothing is started or stopped", protocol, Evicting, b.Scheduler)
		}
	}
	if len(c.AsyncRoutes) > 0 {
		c.Async = true
	}
	if len(c.StartOn) > 0 && (err != nil || protocol == DefaultProtocol) {
		f.add(who, "start_on is for servers that the broker starts: give it a process, or leave start_on out")
	}
	c.LifecycleRaw = raw
	return known
}

// CheckName says what is wrong with a consumer's name.
func CheckName(name string) error {
	switch {
	case name == "":
		return errors.New("it has no name")
	case len(name) > maxName:
		return fmt.Errorf("its name has %d bytes: at most %d are allowed", len(name), maxName)
	}
	for _, r := range name {
		if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.", r)) {
			return fmt.Errorf("its name holds %q: only letters, digits, -, _ and . are allowed", r)
		}
	}
	return nil
}

// CheckCategory says what is wrong with the word for a kind of work.
func CheckCategory(word string) error {
	if CheckName(word) != nil {
		return fmt.Errorf("category %q: write %s, or a word of your own, of at most %d letters, digits, dots, - and _", word, strings.Join(categories(), ", "), maxName)
	}
	return nil
}

// CheckPriority says what is wrong with a priority.
func CheckPriority(n int) error {
	if n < 0 || n > MaxPriority {
		return fmt.Errorf("priority is %d: it must be from 0 to %d; lower is more urgent", n, MaxPriority)
	}
	return nil
}

// CheckUpstream says what is wrong with a server's address.
func CheckUpstream(address string) error {
	if strings.Contains(address, "@") { // what stands before it may be a secret
		return errors.New("upstream holds an @, but must be of the form host:port, as in 127.0.0.1:8188")
	}
	if scheme, rest, ok := strings.Cut(address, "://"); ok {
		return fmt.Errorf("upstream %q is not of the form host:port: leave out %s:// and any path, as in %s", address, scheme, strings.SplitN(rest, "/", 2)[0])
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || strings.ContainsAny(host, "/ ") {
		return fmt.Errorf("upstream %q is not of the form host:port, as in 127.0.0.1:8188 or [::1]:8188", address)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("upstream %q: the port is %q, but must be a number from 1 to 65535", address, port)
	}
	return nil
}

// faults collects what is wrong.
type faults struct {
	list     []error
	warnings []Warning // see Broker.Warnings
}

func (f *faults) add(who, format string, args ...any) {
	f.list = append(f.list, faultlines.Prefix(who, fmt.Errorf(format, args...)))
}

// word reports whether a word is among the allowed ones.
func (f *faults) word(who, field, found string, allowed []string) bool {
	err := oneOf(field, found, allowed)
	if err != nil {
		f.add(who, "%w", err)
	}
	return err == nil
}

func (f *faults) notNegative(who, field string, n int) {
	if n < 0 {
		f.add(who, "%s is %d: it must not be negative", field, n)
	}
}

func (f *faults) size(who, field string, n gpu.Bytes) {
	if n < 0 {
		f.add(who, "%s is %d bytes: it must not be negative", field, n)
	}
	if n > maxSize {
		f.add(who, "%s is %s: at most %s are possible", field, n, maxSize)
	}
}

// duration checks a duration; a nil one is not set.
func (f *faults) duration(who, field string, d *caddy.Duration) {
	if d != nil && *d < 0 {
		f.add(who, "%s is %s: it must not be negative", field, durationText(*d))
	}
}

func durationText(d caddy.Duration) string { return time.Duration(d).String() }

// checkDriver comes before the defaults: the default driver needs no check,
// and there would be no modules where only configuration is looked at.
func (f *faults) checkDriver(b *Broker) {
	if len(b.GPURaw) == 0 {
		return
	}
	var guest struct {
		Driver string `json:"driver"`
	}
	if err := json.Unmarshal(b.GPURaw, &guest); err != nil || guest.Driver == "" {
		f.add(b.title("gpu"), "gpu names no driver: it must be an object with the key driver, such as {\"driver\": %q}", DefaultDriver)
		return
	}
	if guest.Driver != DefaultDriver {
		f.word(b.title("gpu"), "gpu driver", guest.Driver, append(GuestNames(SamplerNamespace), DefaultDriver))
	}
}

func (f *faults) checkBroker(b *Broker) {
	f.word(b.title("scheduler"), "scheduler", b.Scheduler, Schedulers)
	f.word(b.title("lock"), "lock", b.Lock, Locks)
	for _, origin := range b.CORSOrigins {
		if err := CheckOrigin(origin); err != nil {
			f.add(b.title("cors_origins"), "cors_origins: %w", err)
		}
	}
	f.word(b.title("headers"), "headers setting", b.Headers, Switches)
	f.word(b.title("idle_unload"), "idle_unload setting", b.IdleUnload, IdleUnloads)
	f.word(b.title("eviction"), "eviction setting", b.Eviction, Evictions)
	f.word(b.title("victim_priority"), "victim_priority", b.VictimPriority, VictimPriorities)
	f.notNegative(b.title("max_queue"), "max_queue", b.MaxQueue)
	f.notNegative(b.title("max_evictions"), "max_evictions", b.MaxEvictions)
	if b.Cushion != nil {
		f.size(b.title("cushion"), "cushion", *b.Cushion)
	}
	f.size(b.title("reserve"), "reserve", b.Reserve)
	f.size(b.title("max_body"), "max_body", b.MaxBody)
	f.size(b.title("max_buffered"), "max_buffered", b.MaxBuffered)
	f.duration(b.title("upload_idle"), "upload_idle", b.UploadIdle)
	f.duration(b.title("stall_timeout"), "stall_timeout", b.StallTimeout)
	f.duration(b.title("tunnel_idle"), "tunnel_idle", b.TunnelIdle)
	f.duration(b.title("budget"), "budget", &b.Budget)
	f.duration(b.title("max_run"), "max_run", &b.MaxRun)
	f.duration(b.title("idle_timeout"), "idle_timeout", b.IdleTimeout)
	f.duration(b.title("stop_grace"), "stop_grace", b.StopGrace)
	f.duration(b.title("probe_interval"), "probe_interval", &b.ProbeInterval)
	f.duration(b.title("probe_timeout"), "probe_timeout", &b.ProbeTimeout)
	f.duration(b.title("load_timeout"), "load_timeout", &b.LoadTimeout)
	f.duration(b.title("unload_timeout"), "unload_timeout", &b.UnloadTimeout)
	f.duration(b.title("evict_wait"), "evict_wait", &b.EvictWait)
	f.duration(b.title("drain_timeout"), "drain_timeout", &b.DrainTimeout)
	f.duration(b.title("abandon_after"), "abandon_after", &b.AbandonAfter)
	f.duration(b.title("outsider_wait"), "outsider_wait", &b.OutsiderWait)
	f.duration(b.title("overtake_min"), "overtake_min", b.OvertakeMin)
	f.duration(b.title("overtake_max"), "overtake_max", b.OvertakeMax)
	f.duration(b.title("lock_overtake"), "lock_overtake", b.LockOvertake)
	f.duration(b.title("credit"), "credit", b.Credit)
	f.duration(b.title("client_cooldown"), "client_cooldown", &b.ClientCooldown)
	for _, category := range sortedKeys(b.StayWarm) {
		if err := CheckCategory(category); err != nil {
			f.add(b.title("stay_warm"), "stay_warm: %w", err)
		}
		f.duration(b.title("stay_warm"), "stay_warm "+category, new(b.StayWarm[category]))
	}
	if r := b.ReservedInteractive; r != nil {
		who := b.title("reserved_interactive")
		if r.Places < 1 || b.MaxQueue > 0 && r.Places >= b.MaxQueue {
			f.add(who, "reserved_interactive has %d places: it must be from 1 to less than max_queue, which is %d", r.Places, b.MaxQueue)
		}
		if r.Below < 1 || r.Below > MaxPriority {
			f.add(who, "reserved_interactive is for priorities below %d: it must be from 1 to %d", r.Below, MaxPriority)
		}
	}
	if expanded, err := caddy.NewReplacer().ReplaceOrErr(b.RequestLog, true, true); err != nil {
		f.add(b.title("request_log"), "request_log %q: %w", b.RequestLog, err)
	} else {
		b.RequestLog = expanded
	}
	if least, most := b.EffectiveOvertakeMin(), b.EffectiveOvertakeMax(); least > most {
		f.add(b.title("overtake_min", "overtake_max"), "overtake_min is %s, above overtake_max, which is %s", least, most)
	}
	for _, factor := range []struct {
		field string
		value float64
	}{{"overtake", b.EffectiveOvertake()}, {"hold", b.EffectiveHold()}} {
		if factor.value < 0 {
			f.add(b.title(factor.field), "%s is %v: it must not be negative", factor.field, factor.value)
		}
	}
}

// checkReserved checks the places that c keeps for urgent requests.
func (f *faults) checkReserved(who string, c *Consumer, b *Broker) {
	f.notNegative(who, "reserved_interactive", c.ReservedInteractive)
	if c.ReservedInteractive <= 0 || c.Cloud {
		return
	}
	if c.ReservedInteractive >= c.Concurrency {
		f.add(who, "reserved_interactive is %d: it must be less than concurrency, which is %d, or no other request would ever run", c.ReservedInteractive, c.Concurrency)
	}
	if b.ReservedInteractive == nil {
		f.add(who, "reserved_interactive needs the broker's, which says what is urgent, as in reserved_interactive 16 below %d", DefaultPriority)
	}
}
