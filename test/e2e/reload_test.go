package e2e

import (
	"os"
	"path/filepath"

	"github.com/stretchr/testify/require"
)

// reloaded gives Caddy its Caddyfile changed by edit, which must be taken, and keeps it.
func (s *site) reloaded(edit func(caddyfile string) string) {
	s.t.Helper()
	file := filepath.Join(s.dir, "Caddyfile")
	old, err := os.ReadFile(file)
	require.NoError(s.t, err)
	changed := edit(string(old))
	require.NotEqual(s.t, string(old), changed, "the edit changed nothing")
	a := s.adminDo("POST", "/load", "text/caddyfile", changed)
	require.Equal(s.t, 200, a.status, "%s", a.body)
	s.write(changed)
}
