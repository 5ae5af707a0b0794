package doctor

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const (
	// supposed is the size of a card that can't be read.
	supposed = 24 * gpu.GiB
	// most bounds how many models of one server are written down.
	most = 20
	// loadMargin is what a card must have free beyond a claim.
	loadMargin = config.DefaultCushion
)

// writer writes a Caddyfile from a discovery.
type writer struct {
	strings.Builder
	d     *Discovery
	check func(block string) error
	names map[string]bool // of consumers, models and aliases that are taken
	kept  []Server        // those that got a consumer
}

// Caddyfile is a configuration for what was found. address is the site's;
// empty: a port of this machine alone. check reports whether a gpu_broker block
// can be used: consumers of which it says no are written as comments.
func (d *Discovery) Caddyfile(address string, check func(block string) error) string {
	w := &writer{d: d, check: check, names: map[string]bool{}}
	w.line("# Written by `caddy gpu-broker init`. Read it before you use it: claims that nobody could measure are guesses.")
	w.line("# `caddy gpu-broker doctor` says what is still wrong, `caddy run` serves it.")
	w.line("")
	w.line("{")
	w.line("gpu_broker {")
	w.gpu()
	for _, s := range d.Servers {
		w.consumer(s)
	}
	if len(w.kept) == 0 {
		w.example()
	}
	w.line("}")
	w.line("}")
	w.line("")
	w.site(address)
	return string(caddyfile.Format([]byte(w.String())))
}

func (w *writer) line(format string, args ...any) {
	if len(args) > 0 {
		format = fmt.Sprintf(format, args...)
	}
	w.WriteString(format + "\n")
}

// gpu says how the GPUs are read.
func (w *writer) gpu() {
	if w.d.Sampler == "" {
		w.line("# No GPU can be read here:")
		for _, why := range strings.Split(w.d.Why, "; ") {
			w.line("#\t%s", comment(why))
		}
		w.line("# So it is declared: correct the size. `gpu auto` reads it by itself once its driver works.")
		w.line("gpu static %s", supposed)
		return
	}
	for _, dev := range w.d.Devices {
		w.line("# GPU %d: %s, %s.", dev.Index, comment(dev.Name), dev.Total)
	}
	w.line("# It is read by %s.", w.d.Sampler)
	w.line("gpu auto")
}

// consumer writes what is known of one server.
func (w *writer) consumer(s Server) {
	e, _ := EngineOf(s.Engine)
	w.line("")
	w.line("# %s, found at %s.", e.Title, s.Address)
	if e.Frees != "" {
		w.line("# What frees its memory: %s.", comment(e.Frees))
	}
	for _, set := range e.Set {
		w.line("# What is wanted of it: %s.", comment(set))
	}
	block, names := w.block(s, e)
	if err := w.check("gpu static " + supposed.String() + "\n" + block); err != nil {
		w.line("# Its consumer lacks something: %s.", comment(oneLine(err)))
		w.line("#")
		for text := range strings.Lines(string(caddyfile.Format([]byte(block)))) {
			w.line("#\t%s", strings.TrimSuffix(text, "\n"))
		}
		return
	}
	for name := range names {
		w.names[name] = true
	}
	w.kept = append(w.kept, s)
	w.WriteString(block)
}

// block is a consumer's block, and the names in it.
func (w *writer) block(s Server, e Engine) (string, map[string]bool) {
	b := &writer{d: w.d}
	names := map[string]bool{s.Name: true}
	b.line("consumer %s {", s.Name)
	b.line("preset %s", e.Preset)
	b.line("upstream %s", s.Address)
	if s.GPU > 0 {
		b.line("gpu %d", s.GPU)
	}
	b.claim(s, e)
	if e.NeedsProcess {
		b.line("# Nothing but the end of its process frees its memory, and the broker has not started it: so it stays. Let the")
		b.line("# broker start it instead, and remove pin and upstream:")
		b.line("#\tprocess %s", orWord(e.Command, "COMMAND --port {gpu_broker.port}"))
		b.line("pin")
	}
	free := func(name string) bool { return !w.names[name] && !names[name] }
	switch {
	case e.Models != "":
		for _, m := range s.named(free, config.CheckModelName) {
			names[m.Name] = true
			size, why := s.modelClaim(m, e, w.d)
			b.line("model %s {", quoted(m.Name))
			b.line("# %s", why)
			b.line("vram %s", sizeText(size))
			b.line("}")
		}
	case e.LLM:
		var aliases []string
		for _, m := range s.named(free, config.CheckAlias) {
			names[m.Name] = true
			aliases = append(aliases, quoted(m.Name))
		}
		if len(aliases) > 0 {
			b.line("alias %s", strings.Join(aliases, " "))
		}
		if e.NeedsName && len(s.Models) > 0 {
			b.line("# By this name it is loaded again; see that it is right.")
			b.line("model_name %s", quoted(s.Models[0].Name))
		}
	}
	b.line("}")
	return b.String(), names
}

// named are the models that a server lists and whose names can be used, those that it holds first.
func (s *Server) named(free func(string) bool, check func(string) error) (out []ListedModel) {
	all := slices.Clone(s.Models)
	slices.SortStableFunc(all, func(a, b ListedModel) int { return s.rank(a) - s.rank(b) })
	seen := map[string]bool{}
	for _, m := range all {
		if len(out) < most && free(m.Name) && !seen[m.Name] && check(m.Name) == nil {
			seen[m.Name] = true
			out = append(out, m)
		}
	}
	return out
}

func (s *Server) rank(m ListedModel) int {
	if s.held(m.Name) > 0 {
		return 0
	}
	return 1
}

// held is how much the server says that it holds of a model; 0: nothing, or it does not say.
func (s *Server) held(model string) gpu.Bytes {
	for _, m := range s.Report.Models {
		if (lifecycle.Names{Tag: "latest"}).Same(m.Name, model) {
			return max(0, m.Resident)
		}
	}
	return 0
}

// claim writes what a server takes, and how that is known.
func (w *writer) claim(s Server, e Engine) {
	size, why := e.Claim, "A guess: correct it to what it takes with your largest model."
	loaded := s.Report.Loaded == lifecycle.Yes
	switch {
	case e.Models != "":
		why = "For a model that is not named below. A guess."
	case s.Report.Resident > 0:
		size, why = s.Report.Resident, "What it says that it holds now."
	case s.Measured >= gpu.GiB && (loaded || s.Measured >= e.Claim):
		size, why = s.Measured, "Measured: what its processes hold now."
	case s.Measured >= gpu.GiB:
		why = "A guess, for its processes hold " + s.Measured.String() + " now and it does not say what of its models that is."
	}
	w.line("# %s", why)
	w.line("vram %s", sizeText(w.d.atMost(size, s.GPU)))
}

// modelClaim is what a model takes, and how that is known.
func (s *Server) modelClaim(m ListedModel, e Engine, d *Discovery) (size gpu.Bytes, why string) {
	size, why = e.Claim, "A guess."
	if held := s.held(m.Name); held > 0 {
		size, why = held, "What the server says that it holds of it now."
	} else if m.File > 0 {
		size, why = gpu.Bytes(m.File)/10*11+gpu.GiB/2, "Its file and a tenth, and 512MiB for context: more with a long context."
	}
	return d.atMost(size, s.GPU), why
}

// atMost is size, or what fits on the card if that is less.
func (d *Discovery) atMost(size gpu.Bytes, index int) gpu.Bytes {
	total := supposed
	if dev, ok := device(d.Devices, index); ok && dev.Total > 0 {
		total = dev.Total
	}
	if most := total - loadMargin; size > most {
		return gpu.Bytes(int64(most) * 10 / int64(gpu.GiB) * int64(gpu.GiB) / 10) // rounded down, that it fits
	}
	return size
}

// sizeText is a size in tenths of a gibibyte, rounded up.
func sizeText(size gpu.Bytes) string {
	tenths := (int64(size)*10 + int64(gpu.GiB) - 1) / int64(gpu.GiB)
	return strings.TrimSuffix(strconv.FormatFloat(float64(max(1, tenths))/10, 'f', 1, 64), ".0") + "GiB"
}

// example shows what a consumer looks like where none was found.
func (w *writer) example() {
	w.line("")
	w.line("# No model server that can be used was found at its default port. This is what one looks like; `caddy gpu-broker presets` lists")
	w.line("# the kinds of servers that are known.")
	w.line("#")
	for _, text := range []string{"consumer ollama {", "\tpreset ollama", "\tupstream 127.0.0.1:11434", "\t# what its largest model takes", "\tvram 6GiB", "}"} {
		w.line("#\t%s", text)
	}
}

// site writes the routes.
func (w *writer) site(address string) {
	local := address == ""
	if local {
		address = ":" + w.d.FreePort(8080)
		w.line("# For this machine alone. To serve others give it a name, such as ai.example.com, and remove bind; then think of who may use it:")
		w.line("# most model servers ask for no password, Caddy can (basic_auth).")
	}
	w.line("%s {", address)
	if local {
		w.line("bind 127.0.0.1")
		w.line("")
	}
	w.line("# Who holds what, who waits and why.")
	w.line("handle /gpu/* {\ngpu_broker_status\n}")

	var llms, ollama []string
	single := "" // the first of those with one model
	for _, s := range w.kept {
		if e, _ := EngineOf(s.Engine); e.LLM {
			llms = append(llms, s.Name)
			if e.Models == "" && single == "" {
				single = s.Name
			}
		}
		if s.Engine == "ollama" {
			ollama = append(ollama, s.Name)
		}
	}
	if len(llms) > 0 {
		w.line("")
		w.line("# OpenAI's API: the model that a request names decides which server gets it.")
		w.line("handle /v1/* {\ngpu_broker {\nmodel_from body")
		if single != "" {
			w.line("# of requests that name none")
			w.line("default %s", single)
		}
		w.line("}")
		w.proxy(len(ollama) > 0)
		w.line("}")
	}
	if len(ollama) > 0 {
		w.line("")
		w.line("# Ollama's own API.")
		w.line("handle /api/* {\ngpu_broker %s", ollama[0])
		w.proxy(true)
		w.line("}")
	}
	for _, s := range w.kept {
		e, _ := EngineOf(s.Engine)
		w.line("")
		w.line("# All of %s, below /%s/.", e.Title, s.Name)
		w.line("redir /%s /%s/", s.Name, s.Name)
		w.line("handle_path /%s/* {\ngpu_broker %s", s.Name, s.Name)
		w.proxy(s.Engine == "ollama")
		w.line("}")
	}
	if len(w.kept) == 0 {
		w.line("")
		for _, text := range []string{"handle_path /ollama/* {", "\tgpu_broker ollama", "\treverse_proxy {http.gpu_broker.upstream}", "}"} {
			w.line("#\t%s", text)
		}
	}
	w.line("}")
}

// proxy leads to the server. Ollama refuses names that are not this machine's.
func (w *writer) proxy(ownHost bool) {
	if ownHost {
		w.line("reverse_proxy {http.gpu_broker.upstream} {\nheader_up Host {upstream_hostport}\n}")
		return
	}
	w.line("reverse_proxy {http.gpu_broker.upstream}")
}

// comment is a text that fits a comment: one line.
func comment(text string) string {
	return strings.TrimSuffix(strings.Join(strings.Fields(text), " "), ".")
}

// quoted is a word of a Caddyfile.
func quoted(word string) string {
	if strings.ContainsAny(word, " \t\"`{}#\\") {
		return "`" + strings.ReplaceAll(word, "`", "") + "`"
	}
	return word
}

// CheckAddress says what is wrong with the address of a site.
func CheckAddress(address string) error {
	if strings.ContainsAny(address, " \t\r\n{}\"`#") {
		return fmt.Errorf("--address %q is no address of a site: write a name, a port or both, as in ai.example.com or :8080", address)
	}
	return nil
}
