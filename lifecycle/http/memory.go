package httplife

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bootid"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// memory is what a server that can't tell was asked last: whether it has been
// unloaded. A file holds it over a restart of Caddy, but not of the machine that Caddy runs on. Its zero value remembers nothing.
type memory struct {
	mu   sync.Mutex
	path string // empty: there is no file
	of   string // the server's address, with which the file begins: a consumer may get another
	gone bool
	log  *zap.Logger
}

// open reads what was remembered.
func (m *memory) open(deps lifecycle.Deps) {
	m.log, m.of = deps.Logger, deps.Upstream
	if deps.Dir == "" {
		return
	}
	m.path = filepath.Join(deps.Dir, deps.Consumer+".unloaded")
	text, err := os.ReadFile(m.path)
	of, boot, _ := strings.Cut(string(text), "\n")
	m.gone = err == nil && of == m.of && (boot == "" || boot == bootid.Get())
}

func (m *memory) unloaded() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gone
}

// note remembers that it was unloaded.
func (m *memory) note() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gone = true
	if m.path == "" {
		return
	}
	err := os.MkdirAll(filepath.Dir(m.path), 0o700)
	if err == nil {
		err = os.WriteFile(m.path+".new", []byte(m.of+"\n"+bootid.Get()), 0o600)
	}
	if err == nil {
		err = os.Rename(m.path+".new", m.path) // never half of it
	}
	if err != nil {
		m.log.Warn("after a restart it will not be known that the server is unloaded", zap.Error(err))
	}
}

// forget says that it is loaded, as it is once it has started.
func (m *memory) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.gone {
		return
	}
	m.gone = false
	if m.path == "" {
		return
	}
	if err := os.Remove(m.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.log.Warn("after a restart the server will be taken for unloaded", zap.Error(err))
	}
}
