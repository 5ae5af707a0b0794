package presets

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

const (
	// maxFile bounds a user's file.
	maxFile = 1 << 20
	// maxDepth bounds how many presets may build upon each other.
	maxDepth = 8
)

// IsFile reports whether a preset's name is the path of a file: it has a slash or a dot.
func IsFile(name string) bool { return strings.ContainsAny(name, `/\.`) }

// Load returns a preset as part of a consumer: the one of that name, or, if the
// name is a path, the one in that file, relative to the working directory. Both
// nil: there is none of that name, and known lists those that there are.
func Load(name string) (consumer json.RawMessage, known []string, err error) {
	p, known, err := Find(name)
	if p == nil {
		return nil, known, err
	}
	return p.Consumer, nil, nil
}

// Find is Load with what is known beside it.
func Find(name string) (p *Preset, known []string, err error) {
	p, err = load(name, "", nil)
	switch {
	case err != nil:
		return nil, nil, err
	case p == nil:
		return nil, Names(), nil
	}
	return p, nil, nil
}

// load reads a preset and those that it is built upon. A path is relative to
// dir; seen are those that are built upon this one.
func load(name, dir string, seen []string) (*Preset, error) {
	if !IsFile(name) {
		return builtIn(name)
	}
	path := filepath.FromSlash(name)
	if !filepath.IsAbs(path) {
		path = filepath.Join(dir, path)
	}
	if slices.Contains(seen, path) {
		return nil, fmt.Errorf("the file builds upon itself: %s extends %s", strings.Join(seen, ", which extends "), path)
	}
	if len(seen) == maxDepth {
		return nil, fmt.Errorf("more than %d files extend each other: %s", maxDepth, strings.Join(seen, ", "))
	}
	data, err := read(path)
	if err != nil {
		return nil, err
	}
	p, err := parse(name, data)
	if err == nil {
		err = check(p)
	}
	if err != nil {
		return nil, fmt.Errorf("file %s: %w", path, err)
	}
	if p.extends == "" {
		return p, nil
	}
	under, err := load(p.extends, filepath.Dir(path), append(slices.Clone(seen), path))
	switch {
	case err != nil:
		return nil, fmt.Errorf("file %s: extends %s: %w", path, p.extends, err)
	case under == nil:
		return nil, fmt.Errorf("file %s: extends: %w", path, config.Unknown("preset", p.extends, Names()))
	}
	if p.Consumer, err = config.Merge(under.Consumer, p.Consumer); err != nil {
		return nil, fmt.Errorf("file %s: extends %s: %w", path, p.extends, err)
	}
	if p.About.Title == "" {
		p.About = under.About
	}
	return p, nil
}

// read reads a user's file.
func read(path string) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading it: %w", err)
	case !info.Mode().IsRegular(): // to open a pipe would wait for its writer
		return nil, fmt.Errorf("%s is no file but a folder or the like: name a file of JSON", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading it: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading it: %w", err)
	case len(data) > maxFile:
		return nil, fmt.Errorf("%s is larger than %d bytes, which is the most that a preset may have", path, maxFile)
	}
	return data, nil
}

// check says what is wrong with a user's file, which nobody else has looked at.
func check(p *Preset) error {
	var consumer config.Consumer
	if err := strict(p.Consumer, &consumer); err != nil {
		return err
	}
	for field, given := range map[string]bool{"name": consumer.Name != "", "preset": consumer.Preset != "", "source": consumer.Source != ""} {
		if given {
			hint := ""
			if field == "preset" {
				hint = "; to build upon another write extends"
			}
			return fmt.Errorf("%s is the consumer's own, and has no place in a preset: leave it out%s", field, hint)
		}
	}
	return checkRoutes(consumer.LifecycleRaw)
}

// checkRoutes refuses fields that the routes of a lifecycle do not have. Other
// lifecycles check themselves; the routes that they keep under server are checked here.
func checkRoutes(raw json.RawMessage) error {
	if len(raw) == 0 {
		return nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return fmt.Errorf("lifecycle: %w", err)
	}
	if p, given := fields["protocol"]; given && string(p) != `"`+config.DefaultProtocol+`"` {
		return checkRoutes(fields["server"])
	}
	delete(fields, "protocol")
	routes, err := json.Marshal(fields)
	if err == nil {
		err = strict(routes, new(httplife.Lifecycle))
	}
	if err != nil {
		return fmt.Errorf("lifecycle: %w", err)
	}
	return nil
}

// strict decodes JSON and refuses fields that are not known.
func strict(data []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return at(data, err)
	}
	return nil
}

// at adds to an error of the JSON the line where it is.
func at(data []byte, err error) error {
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) {
		return err
	}
	return fmt.Errorf("line %d: %w", 1+bytes.Count(data[:min(syntax.Offset, int64(len(data)))], []byte("\n")), err)
}
