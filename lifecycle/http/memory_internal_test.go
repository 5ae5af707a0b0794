package httplife

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bootid"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// remembers opens the memory of a server that can't tell whether it is loaded.
func remembers(dir, upstream string) *memory {
	m := new(memory)
	m.open(lifecycle.Deps{Consumer: "a", Upstream: upstream, Dir: dir, Logger: zap.NewNop()})
	return m
}

func TestThatAServerWasUnloadedIsKnownUntilItOrTheHostStartsAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "broker")
	m := remembers(dir, "127.0.0.1:1")
	require.False(t, m.unloaded())
	m.note()
	require.True(t, m.unloaded())
	require.True(t, remembers(dir, "127.0.0.1:1").unloaded(), "Caddy has restarted")
	require.False(t, remembers(dir, "127.0.0.1:2").unloaded(), "it is another server")
	require.False(t, remembers("", "127.0.0.1:1").unloaded())

	file := filepath.Join(dir, "a.unloaded")
	for path, want := range map[string]fs.FileMode{dir: 0o700, file: 0o600} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, want, info.Mode().Perm(), "it is nobody else's business: %s", path)
	}
	for text, want := range map[string]bool{
		"127.0.0.1:1\n" + bootid.Get(): true,
		"127.0.0.1:1\nof another boot": false,
		"127.0.0.1:1":                  true, // as it was written before it held the boot
		"":                             false,
	} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		require.Equal(t, want, remembers(dir, "127.0.0.1:1").unloaded(), "%q", text)
	}

	m.forget()
	require.False(t, m.unloaded())
	require.NoFileExists(t, file)
	require.False(t, remembers(dir, "127.0.0.1:1").unloaded())

	m = remembers("", "127.0.0.1:1") // without a folder it is known as long as Caddy runs
	m.note()
	require.True(t, m.unloaded())
	m.forget()
	require.False(t, m.unloaded())
}

func TestThatTheMemoryOfAServerFailsIsTold(t *testing.T) {
	core, logs := observer.New(zapcore.WarnLevel)
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	m := remembers(file, "127.0.0.1:1") // which is no folder
	m.log = zap.New(core)
	m.forget() // it has nothing to forget
	require.Zero(t, logs.Len())
	m.note()
	require.Equal(t, 1, logs.FilterMessageSnippet("it will not be known that the server is unloaded").Len())
	m.forget()
	require.Equal(t, 1, logs.FilterMessageSnippet("the server will be taken for unloaded").Len())
	require.False(t, m.unloaded())

	m = remembers(t.TempDir(), "127.0.0.1:1")
	m.log = zap.New(core)
	m.note()
	require.NoError(t, os.Remove(m.path)) // somebody else has
	m.forget()
	require.Equal(t, 2, logs.Len())
}

func TestADriverTakesOverWhatTheOneBeforeItRemembered(t *testing.T) {
	for _, c := range []struct{ before, after, want bool }{{true, true, true}, {true, false, false}, {false, true, false}, {false, false, false}} {
		made := func(remember bool) *driver {
			return newDriver(&plan{remember: remember}, lifecycle.Deps{Consumer: "a", Upstream: "127.0.0.1:1", Logger: zap.NewNop()})
		}
		before, after := made(c.before), made(c.after)
		after.Inherit(before)
		before.last.note() // it is still at work
		require.Equal(t, c.want, after.last.unloaded(), "%+v", c)
	}
}
