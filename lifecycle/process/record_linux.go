package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// folder is where in the broker's folder the records are.
const folder = "processes"

// record is what is kept of a server that runs, so that the next Caddy finds it if this one is killed.
type record struct {
	Mark     string   `json:"mark"` // the value of its marker, and the name of the file
	Consumer string   `json:"consumer"`
	Boot     string   `json:"boot"`
	Owner    identity `json:"owner"`  // the Caddy that started it
	Leader   identity `json:"leader"` // of its process group; 0 until it has started
	Guard    identity `json:"guard"`  // that is in the group too
}

func (r *record) path(dir string) string { return filepath.Join(dir, folder, r.Mark+".json") }

// save writes the record, whole or not at all.
func (r *record) save(dir string) error {
	if dir == "" {
		return nil
	}
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := r.path(dir)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", raw, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// remove removes the record, if there is one.
func (r *record) remove(dir string) error {
	if dir == "" {
		return nil
	}
	err := os.Remove(r.path(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// records reads those of all servers, also of those that other Caddys own.
// What is no record is left alone and told in err.
func records(dir string) (all []*record, err error) {
	entries, err := os.ReadDir(filepath.Join(dir, folder))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var faults []error
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			continue
		}
		r := new(record)
		raw, err := os.ReadFile(filepath.Join(dir, folder, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // its owner has just removed it
		}
		if err == nil {
			err = json.Unmarshal(raw, r)
		}
		if err == nil && r.Mark != name {
			err = fmt.Errorf("it is the record of %q", r.Mark)
		}
		if err != nil {
			faults = append(faults, fmt.Errorf("%s can't be read: %w: remove it", filepath.Join(dir, folder, e.Name()), err))
			continue
		}
		all = append(all, r)
	}
	return all, errors.Join(faults...)
}

// owned are those of the living that belong to the record's server: its
// process group, if that surely is its own, and whoever carries its mark.
func (r *record) owned(living []proc, groupIsOurs bool, marks func(pid int) string) []proc {
	var out []proc
	for _, p := range living {
		if p.pid != os.Getpid() && (groupIsOurs && p.group == r.Leader.PID || marks(p.pid) == r.Mark) {
			out = append(out, p)
		}
	}
	return out
}

// groupLives reports whether the number of the process group is still that of the
// server's, which it is as long as one lives that was in it from the beginning.
func (r *record) groupLives(living []proc) bool {
	return slices.ContainsFunc(living, func(p proc) bool {
		return p.identity() == r.Leader || p.identity() == r.Guard && p.group == r.Leader.PID
	})
}
