package routing

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

func TestK3_WhichBodiesAskForAnUnload(t *testing.T) {
	generate := config.UnloadRequest{Zero: "keep_alive", Empty: []string{"prompt"}}
	chat := config.UnloadRequest{Zero: "keep_alive", Empty: []string{"messages"}}
	const unload, ends, none = "unload", "work that ends with an unload", "work"
	for _, c := range []struct {
		rule config.UnloadRequest
		body string
		want string
	}{
		{generate, `{"model":"m","keep_alive":0}`, unload},
		{generate, `{"keep_alive" : 0.0, "model":"m","prompt":"","stream":false,"options":{}}`, unload},
		{generate, `{"model":"m","keep_alive":"0"}`, unload},
		{generate, `{"model":"m","keep_alive":"0s","prompt":null}`, unload},
		{generate, `{"model":"m","keep_alive":"0h0m"}`, unload},
		{generate, `{"model":"m","keep_alive":"-0s"}`, unload},
		{generate, `{"model":"m","keep_alive":-0}`, unload},
		{generate, `{"model":"m","Keep_Alive":0}`, unload},
		{chat, `{"model":"m","messages":[],"keep_alive":0}`, unload},
		{chat, `{"model":"m","messages":[ ],"keep_alive":0}`, unload},
		{chat, `{"model":"m","messages":[{"role":"user","content":"a"}],"keep_alive":0}`, ends},
		{generate, `{"model":"m","prompt":"a","keep_alive":0}`, ends},
		{generate, `{"model":"m","Prompt":"a","keep_alive":0}`, ends},
		{generate, `{"model":"m","prompt":" ","keep_alive":0}`, ends},
		{generate, `{"model":"m","prompt": "" ,"keep_alive":0}`, unload},
		{generate, `{"model":"m","keep_alive":-1}`, none},
		{generate, `{"model":"m","keep_alive":"-1m"}`, none},
		{generate, `{"model":"m","keep_alive":"5m"}`, none},
		{generate, `{"model":"m","keep_alive":0.5}`, none},
		{generate, `{"model":"m","keep_alive":"0.5s"}`, none},
		{generate, `{"model":"m","keep_alive":"zero"}`, none},
		{generate, `{"model":"m","keep_alive":null}`, none},
		{generate, `{"model":"m","keep_alive":0,"Keep_Alive":"5m"}`, none},
		{generate, `{"model":"m","options":{"keep_alive":0}}`, none},
		{generate, `{"model":"m","prompt":"keep_alive: 0"}`, none},
		{generate, `{"model":"m","keep_alive":0`, none},
		{generate, `[{"keep_alive":0}]`, none},
		{generate, ``, none},
		{generate, `{"model":"m","keep_alive":0,"x":"` + strings.Repeat("x", 4<<10-len(`{"model":"m","keep_alive":0,"x":""}`)) + `"}`, unload},
		{generate, `{"model":"m","keep_alive":0,"x":"` + strings.Repeat("x", 4<<10-len(`{"model":"m","keep_alive":0,"x":""}`)+1) + `"}`, none},
	} {
		got := none
		y := &Body{memory: []byte(c.body)}
		if said, ok := y.Unloads(c.rule); ok && said.Only {
			got = unload
			require.Equal(t, "m", said.Model)
		} else if ok {
			got = ends
		}
		require.Equal(t, c.want, got, c.body)
	}
}

func TestABodyThatAsksForNoUnloadIsNotDecoded(t *testing.T) {
	rule := config.UnloadRequest{Zero: "keep_alive", Empty: []string{"prompt"}}
	y := &Body{memory: []byte(`{"model":"m","prompt":"keep it short","keep_alive":"5m","stream":false}`)}
	require.Zero(t, testing.AllocsPerRun(100, func() { y.Unloads(rule) }))
}

func FuzzUnloads(f *testing.F) {
	f.Add([]byte(`{"model":"m","keep_alive":0}`))
	f.Add([]byte(`{"keep_alive":"0s","prompt":[]}`))
	f.Add([]byte(`{"0keep_alive":0}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		y := &Body{memory: body}
		if said, ok := y.Unloads(config.UnloadRequest{Zero: "keep_alive", Empty: []string{"prompt"}}); !ok && said != (Unload{}) {
			t.Error("it says something of a body that asks for nothing")
		}
	})
}

func TestAKeyMayBeWrittenInEscapesOrInAnotherCase(t *testing.T) {
	for body, want := range map[string]bool{
		"": false, `\u00`: false, `\u004`: true, `\u0041`: true, `\u005f`: true, `\u0061`: true, `\u007a`: true, `\u0031`: false, `\u0080`: false, `\u00e9`: false,
		`\u00e9 \u0061`: true, `\u0030\u0031`: false, `u0061`: false, `\u0161`: false,
	} {
		require.Equal(t, want, escapesLetters([]byte(body)), body)
	}
	for _, c := range []struct {
		body, field string
		want        int
	}{{"", "a", -1}, {"a", "a", 0}, {"xA", "a", 1}, {"keepalive keep_Alive", "keep_alive", 10}, {"keep_aliv", "keep_alive", -1}, {"KEEP_ALIVE", "keep_alive", 0}, {"kkeep", "keep", 1}} {
		require.Equal(t, c.want, indexFold([]byte(c.body), c.field), "%+v", c)
	}
}

func TestWhatIsEmpty(t *testing.T) {
	for value, want := range map[string]bool{
		"null": true, `""`: true, "[]": true, "{}": true, "[ ]": true, "{\n}": true,
		`" "`: false, "0": false, "false": false, "[{}]": false, `{"a":1}`: false, `"[]"`: false, `"{}"`: false,
	} {
		require.Equal(t, want, isEmpty([]byte(value)), value)
	}
}

func TestAFieldIsFoundInAnyCase(t *testing.T) {
	for c := byte('a'); c <= 'z'; c++ {
		field := string(c) + "_x"
		for _, first := range []byte{c, c - 'a' + 'A'} {
			require.Equal(t, 2, indexFold([]byte(`{"`+string(first)+`_X":0}`), field))
		}
		require.Equal(t, -1, indexFold([]byte(`{"`+string(c^1)+`_x":0}`), field))
	}
}

func TestK3_WhichBodiesAskForAnUnloadOnARouteThatOnlyFreesMemory(t *testing.T) {
	free := config.UnloadRequest{True: []string{"unload_models", "free_memory"}}
	for body, want := range map[string]bool{
		`{"unload_models":true}`: true, `{"free_memory":1}`: true, `{"unload_models":false,"free_memory":"yes"}`: true, `{"Unload_Models":true}`: true, `{"unload_models":[0]}`: true,
		`{}`: false, `{"unload_models":false}`: false, `{"free_memory":null,"unload_models":0}`: false, `{"unload_models":"","free_memory":0.0}`: false, `{"other":true}`: false,
		``: true, `[]`: true, `{"unload_models":NaN}`: true, "\x00{": true, `{"other":"` + strings.Repeat("x", MaxUnloadBody) + `"}`: true,
	} {
		_, ok := (&Body{memory: []byte(body)}).Unloads(free)
		require.Equal(t, want, ok, "%.60s", body)
	}
	said, ok := (*Body)(nil).Unloads(free)
	require.True(t, ok && said.Only, "a body that was not read")
	said, ok = (&Body{memory: []byte(`{"model":"m"}`)}).Unloads(config.UnloadRequest{})
	require.True(t, ok && said.Only, "the route alone")
	require.Equal(t, "m", said.Model)
	_, ok = (*Body)(nil).Unloads(config.UnloadRequest{Zero: "keep_alive"})
	require.False(t, ok)
}

func TestK3_ABodyWithoutWorkAsksForAnUnload(t *testing.T) {
	rule := config.UnloadRequest{Empty: []string{"prompt", "keep_alive"}}
	for body, want := range map[string]bool{
		`{"model":"m"}`: true, `{"model":"m","prompt":"","keep_alive":""}`: true, `{}`: true,
		`{"model":"m","keep_alive":"5m"}`: false, `{"model":"m","prompt":"x"}`: false, `[]`: false, ``: false,
	} {
		said, ok := (&Body{memory: []byte(body)}).Unloads(rule)
		require.Equal(t, want, ok, body)
		require.Equal(t, want, said.Only, body)
	}
}
