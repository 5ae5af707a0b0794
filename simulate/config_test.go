package simulate

import (
	"encoding/json"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	_ "github.com/gpu-broker/caddy-gpu-broker/gpu/samplers" // every sampler
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const site = `{
	"gpu": {"driver": "simulated", "totals": ["16GiB", "24GiB"]},
	"scheduler": "locked", "lock": "global", "cushion": "1MiB", "reserve": "1GiB", "max_queue": 7, "max_evictions": 2,
	"idle_unload": "observe", "eviction": "observe", "victim_priority": "lower", "credit": "90s", "client_cooldown": "2s",
	"reserved_interactive": {"places": 3, "below": 50}, "restore": [{"consumer": "a", "after": "2m"}],
	"consumers": [
		{"name": "a", "alias": ["llama3:8b"], "upstream": "127.0.0.1:1", "vram": "9GiB", "gpu": 1, "concurrency": 4, "reserved_interactive": 1, "lock": "none",
			"can_coexist_with": ["c"], "conflicts_with": ["b"], "pin": true, "no_evict": true, "vram_managed": true, "priority": 20,
			"keep_alive": "1m", "idle_timeout": "3m", "switch_cost": "30s", "max_run": "1h", "stops_when_left": "off"},
		{"name": "b", "upstream": "127.0.0.1:2", "vram": "2GiB", "enabled": "off"},
		{"name": "c", "upstream": "example.com:443", "cloud": true}
	]
}`

func resolved(t *testing.T, text string) *config.Broker {
	t.Helper()
	b := &config.Broker{}
	require.NoError(t, json.Unmarshal([]byte(text), b))
	require.NoError(t, config.Resolve(b, nil))
	return b
}

// What the scheduler can be told, the simulation must tell it, too. These it can't, on purpose.
var untold = []string{
	"Slots", // of World.Settings: they are made of the consumers
	"Async", "Residual", "CanProbe", "CanTell", "CanBusy",
	"Cloud", "Disabled", // those of another consumer
	"Consumer", "TurnOnly", "Starts", "Restart", "MaxRestarts", "Stale", // of a model, and of servers that are started
}

func TestEverySettingReachesTheScheduler(t *testing.T) {
	b := resolved(t, site)
	w := &World{Settings: broker.SchedulerConfig(b)}
	traits := lifecycle.Traits{Load: true, Unload: true}
	for _, v := range []reflect.Value{reflect.ValueOf(w.Settings), reflect.ValueOf(slots(b, b.Consumers[0], traits)[0])} {
		for i := range v.NumField() {
			if name := v.Type().Field(i).Name; !slices.Contains(untold, name) {
				assert.False(t, v.Field(i).IsZero(), "%s.%s is not set", v.Type(), name)
			}
		}
	}
	assert.True(t, slots(b, b.Consumers[1], traits)[0].Disabled)
	assert.True(t, slots(b, b.Consumers[2], traits)[0].Cloud)
}

func TestAConfigurationMakesAWorld(t *testing.T) {
	b := resolved(t, site)
	w, err := FromConfig(b, Assumptions{Load: map[string]time.Duration{"b": time.Second}})
	require.NoError(t, err)
	assert.Equal(t, []gpu.Bytes{16 * gpu.GiB, 24 * gpu.GiB}, w.GPUs)
	assert.Equal(t, []int{1}, w.Consumers[0].Slot.GPUs)
	assert.Equal(t, 27*time.Second, w.Consumers[0].Load(nil), "nine tenths of its switch_cost")
	assert.Equal(t, 3*time.Second, w.Consumers[0].Unload(nil))
	assert.Equal(t, time.Second, w.Consumers[1].Load(nil))
	assert.Equal(t, 2*time.Second, w.Consumers[1].Unload(nil))
	assert.Equal(t, caddy.Duration(20*time.Second), b.Consumers[1].SwitchCost)

	find := Names(b)
	for _, name := range []string{"a", "llama3:8b"} {
		consumer, priority, err := find(name)
		require.NoError(t, err)
		assert.Equal(t, "a", consumer)
		assert.Equal(t, 20, priority)
	}
	_, _, err = find("lama3:8b")
	assert.ErrorContains(t, err, `unknown consumer "lama3:8b": did you mean llama3:8b?`)
}

func TestAWorldNeedsGPUsForItsConsumers(t *testing.T) {
	b := resolved(t, site)
	_, err := FromConfig(b, Assumptions{GPUs: []gpu.Bytes{gpu.GiB}, Unload: map[string]time.Duration{"x": 0}})
	require.Error(t, err)
	assert.Contains(t, err.Error(), `consumer "a" is on GPU 1, and the simulation has 1: give --gpu once for each`)
	assert.Contains(t, err.Error(), `--unload: unknown consumer "x"`)
	b.GPURaw = nil
	require.NoError(t, config.Resolve(b, nil))
	_, err = FromConfig(b, Assumptions{})
	assert.ErrorContains(t, err, "the configuration says gpu auto, which does not tell how much memory there is: give --gpu 24GiB")
}

func TestN3_ANameInATraceMayBeOneThatAPatternStandsFor(t *testing.T) {
	find := Names(&config.Broker{Consumers: []*config.Consumer{
		{Name: "ollama", Models: []*config.Model{{Name: "llama", Alias: []string{"claude-*"}}, {Name: "qwen", Alias: []string{"claude-3*"}}}},
		{Name: "hosted", Alias: []string{"*-mini", "claude-2"}},
	}})
	for name, want := range map[string]string{"claude-1": "ollama/llama", "claude-3-mini": "ollama/qwen", "gpt-mini": "hosted", "claude-2": "hosted"} {
		consumer, _, err := find(name)
		require.NoError(t, err)
		assert.Equal(t, want, consumer, name)
	}
	_, _, err := find("gpt-4")
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "*")
}
