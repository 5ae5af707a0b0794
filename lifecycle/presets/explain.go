package presets

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

// Row is one thing that is to be known of a preset. In Lines, what is to be written or sent stands between backquotes.
type Row struct {
	Label string   `json:"label"`
	Lines []string `json:"lines"`
}

// Explain says in words what a preset does, and what is known of its server.
func (p *Preset) Explain() ([]Row, error) {
	var c config.Consumer
	if err := json.Unmarshal(p.Consumer, &c); err != nil {
		return nil, err
	}
	var l httplife.Lifecycle
	if len(c.LifecycleRaw) > 0 {
		if err := json.Unmarshal(c.LifecycleRaw, &l); err != nil {
			return nil, err
		}
	}
	var rows []Row
	add := func(label string, lines ...string) {
		if len(lines) > 0 && lines[0] != "" {
			rows = append(rows, Row{label, lines})
		}
	}
	a := &p.About
	if a.Port > 0 {
		add("port", fmt.Sprint(a.Port))
	}
	add("frees the memory", a.Frees)
	add("costs", a.Costs)
	add("running work", unloads[a.Unload])
	add("models", models(a))
	add("set", a.Set...)
	add("health", inWords(l.Health, http.MethodGet, "its port takes a connection"))
	add("residency", p.residency(&l))
	if l.Catalog != nil {
		add("has", inWords(l.Catalog, http.MethodGet, "")+", its models at `"+l.Catalog.Names+"`")
	}
	add("compares names", comparison(&l))
	add("load", p.load(&l))
	add("unload", p.unload(&l))
	add("busy", busy(&l))
	if c.Async || len(c.AsyncRoutes) > 0 {
		on := "all its GPU work"
		if len(c.AsyncRoutes) > 0 {
			on = quoted(c.AsyncRoutes)
		}
		add("answers early", "The answer to "+on+" comes before the work is done: the GPU is held until the server says that it is idle.")
	}
	if c.Residual > 0 {
		add("residual", fmt.Sprintf("%s: its process keeps a CUDA context", c.Residual))
	}
	var from []string
	for _, f := range c.ModelFrom {
		from = append(from, strings.TrimSpace(f.Source+" "+f.Name))
	}
	add("names its model in", quotedList(from))
	add("needs the GPU", quotedList(c.GPURoutes))
	add("needs no GPU", quotedList(c.FreeRoutes))
	add("names a model there", quotedList(c.NamedRoutes))
	add("counts as use", quotedList(c.Touch))
	for _, u := range c.UnloadRequests {
		text := "`" + u.Route + "`"
		switch {
		case len(u.True) > 0:
			text += " with " + strings.Join(quotedAll(u.True), " or ")
		case u.Zero != "":
			text += " with `" + u.Zero + "` 0"
		}
		if len(u.Empty) > 0 && u.Zero == "" {
			text += " without " + quoted(u.Empty)
		} else if len(u.Empty) > 0 {
			text += " and no " + quoted(u.Empty)
		}
		add("gives memory back", text)
	}
	for _, name := range slices.Sorted(maps.Keys(c.PinnedSet)) {
		add("at a pinned model", fmt.Sprintf("`%s` is sent as `%s`, where a client sends it", name, c.PinnedSet[name]))
	}
	add("refused with 403", quotedList(c.Blocked))
	if c.UnlistedRequests == config.UnlistedGPU {
		add("all else", "GET, HEAD and OPTIONS are passed on at once; any other request, and a WebSocket, takes a turn")
	} else {
		add("all else", "is passed on at once; any other request than GET, HEAD and OPTIONS, and a WebSocket, only while the server is loaded, else it takes a turn")
	}
	add("matches paths", matches(c.PathMatch))
	add("to know", a.Notes...)
	add("known from", a.Source)
	return rows, nil
}

// matches is how a server matches paths, in words.
func matches(rules []string) string {
	var words []string
	for _, rule := range rules {
		words = append(words, map[string]string{"suffix": "by their end", "caseless": "without regard to case", "trim_slash": "without slashes at the end",
			"merge_slashes": "several slashes as one", "query": "with the query as their end"}[rule])
	}
	return strings.Join(words, ", ")
}

var unloads = map[string]string{
	Waits:   "An unload waits for its end.",
	Refuses: "An unload does nothing while it lasts, so the broker waits for its end first.",
	Aborts:  "An unload would end it, so the broker waits for its end first.",
	Breaks:  "An unload would break it, so the broker waits for its end first.",
}

func models(a *About) string {
	switch {
	case a.Models == Each:
		return "Each that you name in a `model` block is loaded and unloaded by itself; without any, all are loaded and unloaded together."
	case a.Models == Must:
		return "Name them in `model` blocks: each is loaded and unloaded by itself. It loads nothing that it is not told to."
	case a.NeedsName:
		return "One; write `model_name`, which says what it is told to load. It loads nothing that it is not told to."
	default:
		return ""
	}
}

func (p *Preset) residency(l *httplife.Lifecycle) string {
	r := l.Residency
	if h := l.Health; r == nil && h != nil && (h.Loaded != "" || h.ResidentMiB != "" || h.ResidentBytes != "" || h.Names != "") {
		r = h // one route tells both
	}
	switch {
	case r == nil && l.Remember:
		return "can't be told: what it was asked last is remembered"
	case r == nil && p.About.NeedsProcess:
		return "it is loaded while its process runs"
	case r == nil:
		return "can't be told: only the GPU's memory tells"
	}
	text := inWords(r, http.MethodGet, "")
	if r.Loaded != "" {
		text += ", loaded if `" + r.Loaded + "`"
	}
	if r.Names != "" {
		text += ", its models at `" + r.Names + "`"
	}
	if r.SizesBytes != "" {
		text += ", their sizes at `" + r.SizesBytes + "`"
	}
	if r.FullSizesBytes != "" {
		text += ", with what is not on the GPU at `" + r.FullSizesBytes + "`"
	}
	if r.Digests != "" {
		text += ", their digests at `" + r.Digests + "`"
	}
	if r.Loading != "" {
		text += ", those being loaded at `" + r.Loading + "`"
	}
	for _, status := range r.UnloadedOn {
		text += fmt.Sprintf("; %d means that nothing is loaded", status)
	}
	return text
}

// comparison describes how the server compares models' names; empty: byte by byte.
func comparison(l *httplife.Lifecycle) string {
	var ways []string
	if l.ModelFoldCase {
		ways = append(ways, "without their case")
	}
	if l.ModelPrefix != "" {
		ways = append(ways, "with `"+l.ModelPrefix+"` in front of those without a registry or namespace")
	}
	if l.ModelTag != "" {
		ways = append(ways, "with `:"+l.ModelTag+"` after those without a tag")
	}
	return strings.Join(ways, ", ")
}

func (p *Preset) load(l *httplife.Lifecycle) string {
	waits := ""
	if l.LoadWaits {
		waits = ", which answers once it is loaded"
	}
	switch {
	case l.Load != nil && p.About.NeedsProcess:
		return "the start of its process, then " + inWords(l.Load, http.MethodPost, "") + waits
	case l.Load != nil:
		return inWords(l.Load, http.MethodPost, "") + waits
	case p.About.NeedsProcess:
		return "the start of its process"
	default:
		return "none: it loads inside its first request"
	}
}

func (p *Preset) unload(l *httplife.Lifecycle) string {
	if l.Unload == nil {
		return "the end of its process"
	}
	text := inWords(l.Unload, http.MethodPost, "")
	if each := l.Unload.ForEach; each != nil {
		text += fmt.Sprintf(", for each of `%s` in `%s %s`", each.Values, cmp.Or(each.Method, http.MethodGet), each.Path)
	}
	return text
}

func busy(l *httplife.Lifecycle) string {
	switch b := l.Busy; {
	case l.Jobs != nil:
		return fmt.Sprintf("each job, by its `%s`, is asked for at `GET %s` until `%s`", l.Jobs.ID, l.Jobs.Path, l.Jobs.Done)
	case b == nil:
		return "can't be told: only what goes through the broker is known"
	case len(b.BusyMetrics) > 0:
		return inWords(b, http.MethodGet, "") + ": " + strings.Join(quotedAll(b.BusyMetrics), " or ") + " above 0"
	default:
		return inWords(b, http.MethodGet, "") + ", busy if `" + b.Busy + "`"
	}
}

// inWords is a route, or none if there is no route. method is that of a route that names none.
func inWords(r *httplife.Route, method, none string) string {
	if r == nil {
		return none
	}
	text := "`" + cmp.Or(r.Method, method) + " " + r.Path + "`"
	if r.Body != "" {
		text += " with `" + r.Body + "`"
	}
	for _, name := range slices.Sorted(maps.Keys(r.Header)) {
		text += fmt.Sprintf(" and `%s: %s`", name, strings.Join(r.Header[name], ", "))
	}
	var others []string
	for _, status := range r.Accept {
		if status < 200 || status > 299 {
			others = append(others, fmt.Sprint(status))
		}
	}
	if len(others) > 0 {
		text += " (" + strings.Join(others, " and ") + " is no fault)"
	}
	if r.Success != "" {
		text += ", done if `" + r.Success + "`"
	}
	return text
}

func quotedAll(texts []string) []string {
	out := make([]string, len(texts))
	for i, text := range texts {
		out[i] = "`" + text + "`"
	}
	return out
}

func quotedList(texts []string) string { return strings.Join(quotedAll(texts), ", ") }

func quoted(texts []string) string { return strings.Join(quotedAll(texts), " and ") }

// Caddyfile is a consumer's block with the preset, for the user to complete.
func (p *Preset) Caddyfile() string {
	a := &p.About
	name := p.Name
	if IsFile(name) {
		name = "server"
	}
	var b strings.Builder
	line := func(text string) { b.WriteString("\t" + text + "\n") }
	b.WriteString("consumer " + name + " {\n")
	line("preset " + p.Name)
	switch {
	case a.NeedsProcess && a.Command != "":
		line("process " + a.Command)
	default:
		line(fmt.Sprintf("upstream 127.0.0.1:%d", a.Port))
		if a.NeedsProcess {
			line("systemd " + name)
		}
	}
	if a.Models == "" {
		line("vram 6GiB")
	}
	for _, text := range a.Example {
		line(text)
	}
	b.WriteString("}\n")
	return b.String()
}
