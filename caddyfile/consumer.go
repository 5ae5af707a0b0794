package caddyfile

import (
	"encoding/json"
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// consumer reads `consumer NAME { ... }` and adds it to b.
func consumer(b *config.Broker) word {
	return func(d *caddyfile.Dispenser) error {
		c := &config.Consumer{Source: source(d)}
		if !d.AllArgs(&c.Name) {
			return errors.Join(wants(d, "consumer NAME { ... }"), readConsumer(d, c))
		}
		var faults []error
		if err := config.CheckName(c.Name); err != nil {
			faults = append(faults, d.Errf("consumer %q: %w", c.Name, err))
		}
		for _, other := range b.Consumers {
			if other.Name == c.Name {
				faults = append(faults, d.Errf("consumer %q is defined twice, first at %s: leave one of them out", c.Name, other.Source))
			}
		}
		faults = append(faults, readConsumer(d, c))
		b.Consumers = append(b.Consumers, c)
		return errors.Join(faults...)
	}
}

func readConsumer(d *caddyfile.Dispenser, c *config.Consumer) error {
	for d.NextArg() { // there are none, unless the name was wrong
		continue
	}
	l := &lifecycle{http: map[string]any{}}
	faults := readBlock(d, "consumer", consumerWords(c, l))
	raw, err := l.json()
	c.LifecycleRaw = raw
	return errors.Join(faults, err)
}

func consumerWords(c *config.Consumer, l *lifecycle) map[string]word {
	s := newSaid(c.Explicit)
	words := map[string]word{
		"alias":   checkedList(&c.Alias, "NAME ...", config.CheckAlias),
		"preset":  single(s, &c.Preset, "ollama", anyText),
		"enabled": single(s, &c.Enabled, config.Off, oneOf("enabled setting", config.Switches)),
		"upstream": single(s, &c.Upstream, "127.0.0.1:8188", func(address string) (string, error) {
			if isPlaceholder(address) { // is expanded and checked where it runs
				return address, nil
			}
			return address, config.CheckUpstream(address)
		}),

		"vram":     single(s, &c.VRAM, "6GiB", someSize),
		"residual": single(s, &c.Residual, "512MiB", size),
		"gpu":      single(s, &c.GPU, "0", number(0)),

		"concurrency": single(s, &c.Concurrency, "1", number(1)),
		"lock":        single(s, &c.Lock, config.LockNone, oneOf("lock", config.ConsumerLocks)),
		"priority":    optional(s, &c.Priority, "100", priorityNumber),
		"category":    single(s, &c.Category, "llm", category),

		"reserved_interactive": single(s, &c.ReservedInteractive, "1", number(0)),

		"can_coexist_with": list(&c.CanCoexistWith, "CONSUMER ..."),
		"conflicts_with":   consumerNames("conflicts_with", &c.ConflictsWith),
		"fallback":         fallback(&c.Fallback, &c.FallbackAs),
		"send_as":          single(s, &c.SendAs, "NAME, or send_as client", sendAs),
		"processes":        list(&c.Processes, "PROCESS ..."),

		"pin":          flag(s, &c.Pin),
		"no_evict":     flag(s, &c.NoEvict),
		"vram_managed": flag(s, &c.VRAMManaged),
		"async":        flag(s, &c.Async),
		"pin_primary":  flag(s, &c.PinPrimary),
		"fold_keys":    flag(s, &c.FoldKeys),
		"unlisted":     flag(s, &c.Unlisted),
		"cloud":        flag(s, &c.Cloud),

		"keep_alive":     single(s, &c.KeepAlive, "5m", duration),
		"idle_timeout":   optional(s, &c.IdleTimeout, "15m", duration),
		"max_run":        optional(s, &c.MaxRun, "30m", duration),
		"switch_cost":    single(s, &c.SwitchCost, "20s", someDuration),
		"budget":         single(s, &c.Budget, "10m", someDuration),
		"load_timeout":   single(s, &c.LoadTimeout, "5m", someDuration),
		"unload_timeout": single(s, &c.UnloadTimeout, "30s", someDuration),

		"gpu_routes": patterns(&c.GPURoutes),
		"bypass":     patterns(&c.Bypass),
		"touch":      patterns(&c.Touch),

		"stops_when_left":   single(s, &c.StopsWhenLeft, config.Off, oneOf("stops_when_left setting", config.Switches)),
		"free_routes":       patterns(&c.FreeRoutes),
		"named_routes":      patterns(&c.NamedRoutes),
		"unlisted_requests": single(s, &c.UnlistedRequests, config.UnlistedGPU, oneOf("unlisted_requests", config.UnlistedWords)),
		"path_match":        checkedList(&c.PathMatch, "RULE ...", pathRule),

		"async_routes": patterns(&c.AsyncRoutes),
		"start_on":     patterns(&c.StartOn),
		"blocked":      patterns(&c.Blocked),
		"model":        readModel(c),
		"models": func(d *caddyfile.Dispenser) error {
			if args := d.RemainingArgs(); len(args) != 1 || args[0] != "auto" {
				return wants(d, "models auto")
			}
			c.AutoModels = true
			return nil
		},

		"unload_request": unloadRequest(&c.UnloadRequests),
		"pinned_set":     fieldValue(&c.PinnedSet),
		"model_from":     modelFrom(&c.ModelFrom),
		"shares": single(s, &c.Shares, "CONSUMER", func(name string) (string, error) {
			return name, config.CheckName(name)
		}),

		"lifecycle": l.read,
		"process":   l.started,
		"systemd":   l.started,
		"docker":    l.started,
	}
	for name, read := range l.httpWords() {
		words[name] = read
	}
	return words
}

// pathRule says what is wrong with a rule of path_match.
func pathRule(word string) error {
	_, err := config.ParsePathMatch([]string{word})
	return err
}

// readModel reads `model NAME { ... }` and adds it to c.
func readModel(c *config.Consumer) word {
	return func(d *caddyfile.Dispenser) error {
		m := &config.Model{Source: source(d)}
		if !d.AllArgs(&m.Name) {
			return wants(d, "model NAME { ... }")
		}
		var faults []error
		if err := config.CheckModelName(m.Name); err != nil {
			faults = append(faults, d.WrapErr(err))
		}
		for _, other := range c.Models {
			if other.Name == m.Name {
				faults = append(faults, d.Errf("model %q is defined twice, first at %s: leave one of them out", m.Name, other.Source))
			}
		}
		c.Models = append(c.Models, m)
		s := newSaid(nil)
		faults = append(faults, readBlock(d, "model", map[string]word{
			"alias":        checkedList(&m.Alias, "NAME ...", config.CheckAlias),
			"send_as":      single(s, &m.SendAs, "NAME, or send_as client", sendAs),
			"set":          fieldValue(&m.Set),
			"default":      fieldValue(&m.Default),
			"strip":        checkedList(&m.Strip, "FIELD ...", config.CheckChangedField),
			"vram":         single(s, &m.VRAM, "6GiB", someSize),
			"pin":          flag(s, &m.Pin),
			"unlisted":     flag(s, &m.Unlisted),
			"keep_alive":   single(s, &m.KeepAlive, "5m", duration),
			"idle_timeout": optional(s, &m.IdleTimeout, "15m", duration),
			"concurrency":  single(s, &m.Concurrency, "1", number(1)),
		}))
		return errors.Join(faults...)
	}
}

// lifecycle gathers how a consumer is probed, loaded and unloaded: the words
// of the protocol http, which may stand in the consumer's block itself, or
// another protocol's block.
type lifecycle struct {
	http    map[string]any // what is known of the protocol http, by JSON key
	httpAt  string         // where the first of its words stands
	other   json.RawMessage
	otherAt string
}

// json is the lifecycle's JSON, nil if the consumer's block says nothing of it.
func (l *lifecycle) json() (json.RawMessage, error) {
	routes := func() json.RawMessage {
		return caddyconfig.JSONModuleObject(l.http, "protocol", config.DefaultProtocol, nil)
	}
	switch {
	case l.other == nil && l.httpAt == "":
		return nil, nil
	case l.other == nil:
		return routes(), nil
	case l.httpAt == "":
		return l.other, nil
	}
	return config.WithServer(l.other, routes()) // what starts a server speaks to it by these
}

// read reads `lifecycle PROTOCOL { ... }`.
func (l *lifecycle) read(d *caddyfile.Dispenser) error {
	at := source(d)
	if !d.NextArg() {
		return wants(d, "lifecycle PROTOCOL { ... }")
	}
	protocol := d.Val()
	if protocol == config.DefaultProtocol {
		if d.NextArg() {
			return wants(d, "lifecycle "+protocol+" { ... }")
		}
		l.noteHTTP(d)
		return readBlock(d, "lifecycle "+protocol, l.httpWords())
	}
	if l.otherAt != "" {
		return d.Errf("lifecycle is set twice, first at %s: leave one of them out", l.otherAt)
	}
	raw, err := guest(d, "lifecycle", config.LifecycleNamespace, "protocol", config.DefaultProtocol)
	if err != nil {
		return err
	}
	l.other, l.otherAt = raw, at
	return nil
}

// started reads `PROTOCOL ...`, short for `lifecycle PROTOCOL ...`, of one that starts the server.
func (l *lifecycle) started(d *caddyfile.Dispenser) error {
	at := source(d)
	if l.otherAt != "" {
		return d.Errf("%s: how the server is started is said already, at %s: leave one of them out", d.Val(), l.otherAt)
	}
	raw, err := guest(d, "lifecycle", config.LifecycleNamespace, "protocol", config.DefaultProtocol)
	if err != nil {
		return err
	}
	l.other, l.otherAt = raw, at
	return nil
}

func (l *lifecycle) httpWords() map[string]word {
	words := map[string]word{
		"header": func(d *caddyfile.Dispenser) error {
			l.noteHTTP(d)
			header, _ := l.http["header"].(http.Header)
			if header == nil {
				header = http.Header{}
				l.http["header"] = header
			}
			return readHeader(d, header)
		},
	}
	s := newSaid(nil)
	for word, example := range map[string]string{"model_tag": "latest", "model_name": "NAME", "model_prefix": "registry.ollama.ai/library/"} {
		words[word] = func(d *caddyfile.Dispenser) error {
			l.noteHTTP(d)
			text, _ := l.http[word].(string)
			err := single(s, &text, example, anyText)(d)
			l.http[word] = text
			return err
		}
	}
	for _, word := range []string{"remember", "require_full_gpu", "load_waits", "model_fold_case"} {
		words[word] = func(d *caddyfile.Dispenser) error {
			l.noteHTTP(d)
			on, _ := l.http[word].(bool)
			err := flag(s, &on)(d)
			l.http[word] = on
			return err
		}
	}
	words["model_elsewhere"] = func(d *caddyfile.Dispenser) error {
		l.noteHTTP(d)
		endings, _ := l.http["model_elsewhere"].([]string)
		err := list(&endings, "ENDING ...")(d)
		l.http["model_elsewhere"] = endings
		return err
	}
	words["jobs"] = func(d *caddyfile.Dispenser) error {
		l.noteHTTP(d)
		twice := d.Errf("jobs is set twice: leave one of them out")
		jobs, err := readJobs(d)
		if _, ok := l.http["jobs"]; ok && err == nil {
			return twice
		}
		l.http["jobs"] = jobs
		return err
	}
	for _, name := range []string{"health", "residency", "load", "unload", "busy", "catalog"} {
		words[name] = func(d *caddyfile.Dispenser) error {
			l.noteHTTP(d)
			twice := d.Errf("%s is set twice: leave one of them out", name)
			route, err := readRoute(d)
			if err != nil {
				return err
			}
			if _, ok := l.http[name]; ok {
				return twice
			}
			l.http[name] = route // nil takes a preset's route away
			return nil
		}
	}
	return words
}

// noteHTTP notes that a word of the protocol http stands here.
func (l *lifecycle) noteHTTP(d *caddyfile.Dispenser) {
	if l.httpAt == "" {
		l.httpAt = source(d)
	}
}
