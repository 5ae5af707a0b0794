package presets_test

import (
	"bufio"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// tables are the route tables of servers, by preset.
func tables(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/routes/*.txt")
	require.NoError(t, err)
	return files
}

func TestK2_EachPresetHoldsAgainstTheRoutesOfItsServer(t *testing.T) {
	require.Len(t, tables(t), 11)
	kinds := map[string][]config.Need{
		"computes": {config.NeedsGPU},
		"turn":     {config.NeedsGPU, config.NeedsTurn},
		"free":     {config.NeedsNothing, config.NeedsTouch},
		"blocked":  {config.NeedsLeave},
	}
	for _, file := range tables(t) {
		name := strings.TrimSuffix(filepath.Base(file), ".txt")
		t.Run(name, func(t *testing.T) {
			consumer, _ := read(t, name)
			assert.Equal(t, config.UnlistedGPU, consumer.UnlistedRequests, "its requests compute")
			routes, err := config.NewRoutes(&consumer, nil, nil)
			require.NoError(t, err)
			f, err := os.Open(file)
			require.NoError(t, err)
			defer f.Close()
			lines, heads := bufio.NewScanner(f), 0
			for lines.Scan() {
				if strings.HasPrefix(lines.Text(), "# ") {
					heads++
					continue
				}
				fields := strings.Fields(lines.Text())
				require.Len(t, fields, 3, lines.Text())
				require.Contains(t, kinds, fields[2])
				r := request(t, fields[0], fields[1])
				assert.Contains(t, kinds[fields[2]], routes.Needs(r), "%s: %s", lines.Text(), routes.Needs(r))
			}
			assert.Equal(t, 2, heads, "its version and its source")
		})
	}
}

// TestK2_PresetsOfUIsKeepLists tells which presets leave unlisted requests alone.
func TestK2_OnlyPresetsOfUIsPassWhatTheyDoNotList(t *testing.T) {
	var uis []string
	for _, name := range presets.Names() {
		if consumer, _ := read(t, name); consumer.UnlistedRequests != config.UnlistedGPU {
			uis = append(uis, name)
		}
	}
	assert.Equal(t, []string{"a1111", "comfyui", "forge", "invokeai", "sdnext"}, uis)
}

// request is a request as the handler sees it. WS is a WebSocket.
func request(t *testing.T, method, target string) *http.Request {
	t.Helper()
	r := &http.Request{Method: method, Header: http.Header{}}
	path, query, _ := strings.Cut(target, "?")
	r.URL = &url.URL{Path: path, RawQuery: query}
	if method == "WS" {
		r.Method = http.MethodGet
		r.Header.Set("Connection", "Upgrade")
		r.Header.Set("Upgrade", "websocket")
	}
	return r
}
