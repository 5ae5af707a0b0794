package presets_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"

	_ "github.com/gpu-broker/caddy-gpu-broker/lifecycle/systemd" // which is allowed in a configuration only if it is there
)

func TestWhatAConsumerLacksOfItsPresetIsSaid(t *testing.T) {
	for _, tc := range []struct{ consumer, want string }{
		{`{"preset":"llamacpp"}`, "preset llamacpp: only the end of its process frees its memory"},
		{`{"preset":"llamacpp","pin":true}`, ""},
		{`{"preset":"llamacpp","no_evict":true}`, ""},
		{`{"preset":"llamacpp","enabled":"off"}`, ""},
		{`{"preset":"llamacpp","lifecycle":{"protocol":"systemd","unit":"llama"}}`, ""},
		{`{"preset":"llamacpp","lifecycle":{"unload":{"path":"/mine"}}}`, ""},
		{`{"preset":"tabbyapi"}`, "preset tabbyapi: it has to be told what to load: write model_name NAME"},
		{`{"preset":"tabbyapi","lifecycle":{"model_name":"x"}}`, ""},
		{`{"preset":"tabbyapi","lifecycle":{"load":{"path":"/v1/model/load","body":"{\"model_name\":\"x\"}"}}}`, ""},
		{`{"preset":"tabbyapi","lifecycle":{"load":null}}`, ""},
		{`{"preset":"tabbyapi","lifecycle":{"protocol":"systemd","unit":"tabby"}}`, "write model_name NAME"},
		{`{"preset":"triton"}`, "name its models in model blocks"},
		{`{"preset":"triton","models":[{"name":"x"}]}`, ""},
		{`{"preset":"triton","lifecycle":{"model_name":"x"}}`, ""},
		{`{"preset":"ollama"}`, ""},
		{`{}`, ""},
	} {
		c := &config.Consumer{}
		require.NoError(t, json.Unmarshal([]byte(tc.consumer), c))
		c.Name, c.VRAM = "a", 1
		b := &config.Broker{Consumers: []*config.Consumer{c}}
		require.NoError(t, config.Resolve(b, presets.Load), tc.consumer)
		lacks := presets.Lacking(b.Consumers[0])
		if tc.want == "" {
			assert.Empty(t, lacks, tc.consumer)
			continue
		}
		if assert.Len(t, lacks, 1, tc.consumer) {
			assert.Contains(t, lacks[0], tc.want)
		}
	}
}
