// Package bounds holds the fixed bounds of a package against docs/limits.md. Only tests import it.
package bounds

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Documented fails the test unless the page's rows about pkg ("lifecycle/http") are those of constants, by name, with
// their values: numbers, sizes in bytes, durations.
func Documented(t testing.TB, pkg string, constants map[string]any) {
	t.Helper()
	have := map[string]float64{}
	for name, value := range constants {
		have[name] = number(t, value)
	}
	want := map[string]float64{}
	for name, text := range Rows(t) {
		if at := strings.LastIndexByte(name, '.'); name[:at] == pkg {
			want[name[at+1:]] = parse(t, text)
		}
	}
	require.Equal(t, want, have, "docs/limits.md")
}

var row = regexp.MustCompile("^\\|.*\\| ([^|]+) \\|[^|]*\\| `([^|`]+)` \\|$")

// Rows are the limits on the page by constant ("lifecycle/http.maxAnswer").
func Rows(t testing.TB) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(moduleRoot(t), "docs/limits.md"))
	require.NoError(t, err)
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if m := row.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			require.NotContains(t, out, m[2])
			out[m[2]] = m[1]
		}
	}
	require.NotEmpty(t, out)
	return out
}

func moduleRoot(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	require.NoError(t, err)
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		above := filepath.Dir(dir)
		require.NotEqual(t, dir, above, "no go.mod above")
		dir = above
	}
}

// units are those of the page: bytes, nanoseconds, and none.
var units = map[string]float64{
	"": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
	"ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9,
}

func parse(t testing.TB, text string) float64 {
	t.Helper()
	figure, unit, _ := strings.Cut(text, " ")
	n, err := strconv.ParseFloat(figure, 64)
	require.NoError(t, err, text)
	require.Contains(t, units, unit, text)
	return n * units[unit]
}

func number(t testing.TB, value any) float64 {
	t.Helper()
	v := reflect.ValueOf(value)
	switch {
	case v.CanInt():
		return float64(v.Int())
	case v.CanUint():
		return float64(v.Uint())
	}
	require.True(t, v.CanFloat(), "%v is no number", value)
	return v.Float()
}
