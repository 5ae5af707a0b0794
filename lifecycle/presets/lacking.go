package presets

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

// Lacking says what a resolved consumer with a preset leaves out, so that its
// server can't be unloaded or loaded. Each is worth a warning: it may be meant.
func Lacking(c *config.Consumer) (lacks []string) {
	if c.Preset == "" || c.Cloud || !c.IsEnabled() || c.Shares != "" {
		return nil
	}
	p, _, err := Find(c.Preset)
	if err != nil || p == nil {
		return nil // that is told elsewhere
	}
	var l struct {
		Protocol string
		httplife.Lifecycle
		Server httplife.Lifecycle
	}
	if json.Unmarshal(c.LifecycleRaw, &l) != nil {
		return nil // so is that
	}
	routes := &l.Lifecycle
	starts := l.Protocol != "" && l.Protocol != config.DefaultProtocol
	if starts {
		routes = &l.Server
	}
	stays := c.Pin || c.NoEvict || c.VRAMManaged
	if p.About.NeedsProcess && !starts && !stays && routes.Unload == nil {
		lacks = append(lacks, fmt.Sprintf("preset %s: only the end of its process frees its memory, and the broker does not start it: it is never unloaded. "+
			"Give it process, systemd or docker, or write pin, if it is to stay loaded", c.Preset))
	}
	unnamed := routes.Load != nil && routes.ModelName == "" && !c.HasModels() && (strings.Contains(routes.Load.Path, "{model}") || strings.Contains(routes.Load.Body, "{model}"))
	switch {
	case !unnamed:
	case p.About.NeedsName:
		lacks = append(lacks, fmt.Sprintf("preset %s: it has to be told what to load: write model_name NAME", c.Preset))
	case p.About.Models == Must:
		lacks = append(lacks, fmt.Sprintf("preset %s: it loads only what it is told to: name its models in model blocks, or its one with model_name NAME", c.Preset))
	}
	return lacks
}
