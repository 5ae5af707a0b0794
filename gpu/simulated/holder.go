package simulated

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// DirEnv names the environment variable that replaces the default folder.
const DirEnv = "GPU_BROKER_SIM_DIR"

// The names in the folder that mean something. Everything else whose name
// does not begin with a PID is passed over.
const (
	outsiderPrefix = "outsider-"
	stateFile      = "state"
)

// DefaultDir is the folder in which pretending servers and the sampler meet
// where none is configured: $GPU_BROKER_SIM_DIR, else one folder per user
// under the system's folder for temporary files.
func DefaultDir() string {
	if dir := os.Getenv(DirEnv); dir != "" {
		return dir
	}
	return filepath.Join(os.TempDir(), "caddy-gpu-broker-sim-"+strconv.Itoa(os.Getuid()))
}

// Holder is the memory that one pretending server holds on simulated GPUs. It
// keeps one small file in the folder that a simulated sampler reads, written
// by renaming so that no look sees half of it. If its process dies, the
// sampler drops the file: a killed server frees its memory as a real one does.
//
// A Holder may be used by several goroutines.
type Holder struct {
	path   string
	header string

	mu     sync.Mutex
	held   map[int]gpu.Bytes
	closed bool
}

// NewHolder makes a Holder of this process in dir (empty: DefaultDir), which
// is made if it does not exist. The name is shown as the process's name and
// tells apart several servers in one process; it may be empty if there is only
// one. Nothing is written before the first Set; what an earlier Holder of the
// same process and name left is removed.
func NewHolder(dir, name string) (*Holder, error) {
	file := strconv.Itoa(os.Getpid())
	header := ""
	if start := startTime(os.Getpid()); start != "" {
		// A PID is used again one day, and the folder may outlive a reboot.
		header = "#start " + start + "\n"
	}
	if name != "" {
		file += "-" + name
		header += "#name " + name + "\n"
	}
	return newHolder(dir, name, file, header)
}

// NewOutsider makes a Holder that stands for a program which is none of the
// broker's: a game, a desktop. Its file counts whether or not the process
// lives, until Close.
func NewOutsider(dir, name string) (*Holder, error) {
	if name == "" {
		return nil, errors.New("a simulated outsider needs a name")
	}
	return newHolder(dir, name, outsiderPrefix+name, "#name "+name+"\n")
}

func newHolder(dir, name, file, header string) (*Holder, error) {
	if strings.ContainsAny(name, "/\\\r\n\x00") {
		return nil, fmt.Errorf("simulated holder: name %q: slashes and line ends are not possible in a file's name", name)
	}
	if dir == "" {
		dir = DefaultDir()
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("simulated holder: making its folder: %w", err)
	}
	h := &Holder{path: filepath.Join(dir, file), header: header, held: map[int]gpu.Bytes{}}
	if err := h.write(); err != nil {
		return nil, err
	}
	return h, nil
}

// Set says that the server now holds b on the GPU of that index, in place of
// what it held there before. Zero holds nothing.
func (h *Holder) Set(index int, b gpu.Bytes) error {
	if index < 0 || b < 0 {
		return fmt.Errorf("simulated holder: GPU %d, %d bytes: neither may be negative", index, int64(b))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return errors.New("simulated holder: Set after Close")
	}
	before, had := h.held[index]
	if b == 0 {
		delete(h.held, index)
	} else {
		h.held[index] = b
	}
	err := h.write()
	if err != nil {
		// The record must say what the file says.
		delete(h.held, index)
		if had {
			h.held[index] = before
		}
	}
	return err
}

// Close frees everything. Later calls do nothing.
func (h *Holder) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	h.closed = true
	clear(h.held)
	return h.write()
}

// write brings the file in line with held. The caller owns mu, or h is new.
func (h *Holder) write() error {
	if len(h.held) == 0 {
		if err := os.Remove(h.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("simulated holder: freeing memory: %w", err)
		}
		return nil
	}
	var text strings.Builder
	text.WriteString(h.header)
	indices := make([]int, 0, len(h.held))
	for index := range h.held {
		indices = append(indices, index)
	}
	slices.Sort(indices)
	for _, index := range indices {
		fmt.Fprintf(&text, "%d %d\n", index, int64(h.held[index]))
	}
	return writeFile(h.path, text.String())
}

// writeFile replaces a file in one step. The temporary name begins with a dot,
// which the sampler passes over.
func writeFile(path, text string) error {
	dir, file := filepath.Split(path)
	temporary := filepath.Join(dir, "."+file+".tmp")
	if err := os.WriteFile(temporary, []byte(text), 0o600); err != nil {
		return fmt.Errorf("simulated memory: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return errors.Join(fmt.Errorf("simulated memory: %w", err), os.Remove(temporary))
	}
	return nil
}
