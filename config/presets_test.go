package config_test

import (
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

func TestEveryPresetThatIsShippedCanBeUsed(t *testing.T) {
	if len(presets.Names()) == 0 {
		t.Fatal("there are none")
	}
	for _, name := range presets.Names() {
		b := &config.Broker{Consumers: []*config.Consumer{{Name: "a", Preset: name, VRAM: gpu.GiB}}}
		err := config.Resolve(b, presets.Load)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if c := b.Consumers[0]; len(c.GPURoutes) == 0 || string(c.LifecycleRaw) == `{"protocol":"http"}` {
			t.Errorf("%s adds nothing: %+v", name, c)
		}
	}
}
