package caddyfile

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// lifecycleRoute is a request of the lifecycle http, in its JSON form.
type lifecycleRoute struct {
	Method         string         `json:"method,omitempty"`
	Path           string         `json:"path,omitempty"`
	Header         http.Header    `json:"header,omitempty"`
	Body           string         `json:"body,omitempty"`
	Accept         []int          `json:"accept,omitempty"`
	Success        string         `json:"success,omitempty"`
	UnloadedOn     []int          `json:"unloaded_on,omitempty"`
	Timeout        caddy.Duration `json:"timeout,omitempty"`
	Loaded         string         `json:"loaded,omitempty"`
	ResidentMiB    string         `json:"resident_mib,omitempty"`
	ResidentBytes  string         `json:"resident_bytes,omitempty"`
	Names          string         `json:"names,omitempty"`
	SizesBytes     string         `json:"sizes_bytes,omitempty"`
	SizesMiB       string         `json:"sizes_mib,omitempty"`
	FullSizesBytes string         `json:"full_sizes_bytes,omitempty"`
	FullSizesMiB   string         `json:"full_sizes_mib,omitempty"`
	Digests        string         `json:"digests,omitempty"`
	Loading        string         `json:"loading,omitempty"`
	Busy           string         `json:"busy,omitempty"`
	BusyMetrics    []string       `json:"busy_metrics,omitempty"`
	ForEach        *forEach       `json:"for_each,omitempty"`
}

// forEach is a request whose answer lists the items that a route is called for.
type forEach struct {
	Method string      `json:"method,omitempty"`
	Path   string      `json:"path,omitempty"`
	Header http.Header `json:"header,omitempty"`
	Values string      `json:"values,omitempty"`
}

// readRoute reads `WORD [METHOD] /path { ... }`, or `WORD off`, which is nil
// and takes a preset's route away.
func readRoute(d *caddyfile.Dispenser) (*lifecycleRoute, error) {
	name := d.Val()
	args := d.RemainingArgs()
	if slices.Equal(args, []string{config.Off}) {
		return nil, nil
	}
	r := &lifecycleRoute{}
	var err error
	if r.Method, r.Path, err = methodAndPath(args); err != nil {
		return nil, d.Errf("%s: %w; write %s [METHOD] /path, or %s off", name, err, name, name)
	}
	s := newSaid(nil)
	return r, readBlock(d, name, map[string]word{
		"header": func(d *caddyfile.Dispenser) error {
			if r.Header == nil {
				r.Header = http.Header{}
			}
			return readHeader(d, r.Header)
		},
		"body":             r.readBody,
		"accept":           statuses(&r.Accept),
		"unloaded_on":      statuses(&r.UnloadedOn),
		"success":          single(s, &r.Success, "$.success", jsonPath),
		"names":            single(s, &r.Names, "$.models[*].name", jsonPath),
		"sizes_bytes":      single(s, &r.SizesBytes, "$.models[*].size", jsonPath),
		"sizes_mib":        single(s, &r.SizesMiB, "$.models[*].mib", jsonPath),
		"full_sizes_bytes": single(s, &r.FullSizesBytes, "$.models[*].size", jsonPath),
		"full_sizes_mib":   single(s, &r.FullSizesMiB, "$.models[*].mib", jsonPath),
		"digests":          single(s, &r.Digests, "$.models[*].digest", jsonPath),
		"loading":          single(s, &r.Loading, "$.loading[*].name", jsonPath),
		"busy_metrics":     list(&r.BusyMetrics, "NAME ..."),
		"timeout":          single(s, &r.Timeout, "5s", someDuration),
		"loaded":           single(s, &r.Loaded, "$.loaded", jsonPath),
		"resident_mib":     single(s, &r.ResidentMiB, "$.gpu_resident_mib", jsonPath),
		"resident_bytes":   single(s, &r.ResidentBytes, "$.size_vram", jsonPath),
		"busy":             single(s, &r.Busy, "$.busy", jsonPath),
		"for_each":         r.readForEach,
	})
}

// readBody reads `body TEXT`. Errors don't show the text: it may hold a secret.
func (r *lifecycleRoute) readBody(d *caddyfile.Dispenser) error {
	var body string
	if !d.AllArgs(&body) {
		return wants(d, "body TEXT, with TEXT in backquotes if it holds blanks or quotes")
	}
	if r.Body != "" && r.Body != body {
		return d.Errf("body is set twice: leave one of them out")
	}
	r.Body = body
	return nil
}

// statuses is a word with one or more statuses of HTTP.
func statuses(field *[]int) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) == 0 {
			return wants(d, name+" STATUS ..., as in "+name+" 200 204")
		}
		for _, arg := range args {
			status, err := strconv.Atoi(arg)
			if err != nil || status < 200 || status > 599 {
				return d.Errf("%s: %q is not a status of HTTP, a number from 200 to 599", name, arg)
			}
			*field = append(*field, status)
		}
		return nil
	}
}

// jobRoute follows jobs that answers name.
type jobRoute struct {
	Path   string      `json:"path,omitempty"`
	ID     string      `json:"id,omitempty"`
	Done   string      `json:"done,omitempty"`
	Header http.Header `json:"header,omitempty"`
}

// readJobs reads `jobs /path/{item} { id $.id; done $.done }`, or `jobs off`.
func readJobs(d *caddyfile.Dispenser) (*jobRoute, error) {
	args := d.RemainingArgs()
	if slices.Equal(args, []string{config.Off}) {
		return nil, nil
	}
	if len(args) != 1 || !strings.HasPrefix(args[0], "/") {
		return nil, wants(d, "jobs /path/{item} { ... }, or jobs off")
	}
	j, s := &jobRoute{Path: args[0]}, newSaid(nil)
	return j, readBlock(d, "jobs", map[string]word{
		"id":   single(s, &j.ID, "$.id", jsonPath),
		"done": single(s, &j.Done, "`$.status == \"done\"`", jsonPath),
		"header": func(d *caddyfile.Dispenser) error {
			if j.Header == nil {
				j.Header = http.Header{}
			}
			return readHeader(d, j.Header)
		},
	})
}

// readForEach reads `for_each [METHOD] /path $.values`.
func (r *lifecycleRoute) readForEach(d *caddyfile.Dispenser) error {
	const usage = "for_each [METHOD] /path $.values"
	args := d.RemainingArgs()
	if len(args) < 2 {
		return wants(d, usage)
	}
	if r.ForEach != nil {
		return d.Errf("for_each is set twice: leave one of them out")
	}
	last := len(args) - 1
	f := &forEach{}
	var err error
	if f.Method, f.Path, err = methodAndPath(args[:last]); err != nil {
		return d.Errf("for_each: %w; write %s", err, usage)
	}
	if f.Values, err = jsonPath(args[last]); err != nil {
		return d.Errf("for_each: %w", err)
	}
	r.ForEach = f
	return readBlock(d, "for_each", map[string]word{
		"header": func(d *caddyfile.Dispenser) error {
			if f.Header == nil {
				f.Header = http.Header{}
			}
			return readHeader(d, f.Header)
		},
	})
}

// readHeader reads `header NAME VALUE`. Errors don't show the value.
func readHeader(d *caddyfile.Dispenser, header http.Header) error {
	var name, value string
	if !d.AllArgs(&name, &value) {
		return wants(d, "header NAME VALUE, with VALUE in quotes if it holds blanks")
	}
	if name == "" || strings.ContainsAny(name, " :{}\t\r\n") {
		return d.Errf("header: its name may not be empty or hold blanks, colons or braces; write header NAME VALUE")
	}
	header.Add(name, value)
	return nil
}

// methodAndPath reads `[METHOD] /path`.
func methodAndPath(args []string) (method, path string, err error) {
	switch len(args) {
	case 1:
		path = args[0]
	case 2:
		method, path = args[0], args[1]
		if err := known("method", config.Methods)(method); err != nil {
			return "", "", err
		}
	default:
		return "", "", fmt.Errorf("found %d arguments", len(args))
	}
	if !strings.HasPrefix(path, "/") {
		return "", "", fmt.Errorf("path %q does not begin with a slash", path)
	}
	return method, path, nil
}

// jsonPath takes a JSON path or an expression of such; its details are checked by the lifecycle.
func jsonPath(s string) (string, error) {
	if !strings.Contains(s, "$") {
		return "", fmt.Errorf("%q is not a JSON path: write for example $.loaded", s)
	}
	return s, nil
}

// isPlaceholder reports whether s holds a placeholder that Caddy expands when it runs.
func isPlaceholder(s string) bool {
	return strings.Contains(s, "{") && strings.Contains(s, "}")
}
