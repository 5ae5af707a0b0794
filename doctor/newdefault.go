package doctor

import (
	_ "embed"
	"encoding/json"
	"slices"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// formerRoutes are the gpu_routes of presets before what no list names began to take a turn, by preset.
//
//go:embed formerroutes.json
var formerRoutes []byte

// maxChanged bounds the routes that one finding names.
const maxChanged = 12

// judgeNewDefault tells which requests of a consumer take a turn, or are refused, that were passed on before presets set
// unlisted_requests.
func judgeNewDefault(f *facts) (out []Finding) {
	if f.site.Broker == nil {
		return nil
	}
	var former map[string][]string
	if err := json.Unmarshal(formerRoutes, &former); err != nil {
		return nil // a test holds that it can be read
	}
	for _, c := range f.site.Broker.Consumers {
		if c == nil || c.UnlistedRequests != config.UnlistedGPU || former[c.Preset] == nil {
			continue
		}
		before, own := former[c.Preset], false
		if p, _, err := presets.Find(c.Preset); err == nil && p != nil {
			var preset config.Consumer
			if json.Unmarshal(p.Consumer, &preset) == nil && !slices.Equal(preset.GPURoutes, c.GPURoutes) {
				before, own = c.GPURoutes, true // the user's list replaced the preset's
			}
		}
		changed := slices.DeleteFunc(slices.Clone(c.GPURoutes), func(route string) bool { return slices.Contains(before, route) || slices.Contains(c.Bypass, route) })
		what := "what no list names takes a turn since this version: every request but GET, HEAD and OPTIONS, and every WebSocket"
		switch {
		case own:
			what += "; before, what gpu_routes does not name was passed on"
		case len(changed) > maxChanged:
			what += "; so do " + strings.Join(changed[:maxChanged], ", ") + " and others, which were passed on before"
		case len(changed) > 0:
			what += "; so do " + strings.Join(changed, ", ") + ", which were passed on before"
		}
		out = append(out, f.about(Note, "new_default", c, "preset").saying(what,
			"name in bypass what needs no GPU; `unlisted_requests free` brings the old rule back, and `caddy gpu-broker presets "+c.Preset+"` shows the lists"))
	}
	return out
}
