package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// resolved is a configuration that has no faults.
func resolved(t *testing.T, doc string) *Broker {
	t.Helper()
	b := new(Broker)
	require.NoError(t, json.Unmarshal([]byte(doc), b))
	require.NoError(t, Resolve(b, nil))
	return b
}

func texts(list []Warning) (out []string) {
	for _, w := range list {
		out = append(out, w.Err.Error())
	}
	return out
}

func TestN2_ASizeWithoutAUnitIsWarnedOf(t *testing.T) {
	for doc, want := range map[string]string{
		`{"consumers":[{"name":"a","vram":13}]}`:                                           `consumer "a": vram is 13 bytes, because a number without a unit counts bytes: did you mean 13GiB?`,
		`{"consumers":[{"name":"a","vram":"6144"}]}`:                                       `did you mean 6144MiB?`,
		`{"consumers":[{"name":"a","vram":"9GiB","residual":300,"source":"Caddyfile:7"}]}`: `consumer "a" (Caddyfile:7): residual is 300 bytes, because a number without a unit counts bytes: did you mean 300MiB?`,
		`{"consumers":[{"name":"a","models":[{"name":"m","vram":7,"source":"f:9"}]}]}`:     `consumer "a": model "m" (f:9): vram is 7 bytes, because a number without a unit counts bytes: did you mean 7GiB?`,
		`{"cushion":256,"sources":{"cushion":"Caddyfile:3"}}`:                              `gpu_broker (Caddyfile:3): cushion is 256 bytes, because a number without a unit counts bytes: did you mean 256MiB?`,
		`{"reserve":1}`:                     `reserve is 1 bytes, because a number without a unit counts bytes: did you mean 1GiB?`,
		`{"max_body":64}`:                   `max_body is 64 bytes, because a number without a unit counts bytes: did you mean 64MiB?`,
		`{"max_buffered":2,"max_body":"1"}`: `max_buffered is 2 bytes`,
	} {
		got := resolved(t, doc).Warnings()
		assert.Contains(t, strings.Join(texts(got), "\n"), want, doc)
		for _, w := range got {
			assert.False(t, w.Advice, "%s: doctor must call it an error", w.Err)
		}
	}
	for _, doc := range []string{
		`{"cushion":0,"max_body":"64KiB","max_buffered":65536,"reserve":"1MiB","consumers":[{"name":"a","vram":1048576},{"name":"b","vram":"13"}],"scheduler":"passthrough"}`,
		`{"cushion":"1048577","consumers":[{"name":"a","vram":"500MB"}]}`,
	} {
		b := resolved(t, doc)
		for _, text := range texts(b.Warnings()) {
			assert.Contains(t, text, `"b"`, doc)
		}
	}
}

func TestN5_SettingsThatContradictEachOtherAreWarnedOf(t *testing.T) {
	a := func(settings string) string { return `{"consumers":[{"name":"a","vram":"1GiB",` + settings + `}]}` }
	for doc, want := range map[string]string{
		a(`"pin":true,"vram_managed":true`):                                `consumer "a": it has pin and vram_managed`,
		a(`"pin":true,"idle_timeout":60000000000`):                         `pin and idle_timeout 1m0s`,
		a(`"fallback":["b"],"pin_primary":true},{"name":"b","cloud":true`): `fallback and pin_primary`,
		a(`"pin":true},{"name":"b","vram":"1GiB","conflicts_with":["a"]`):  `consumer "b": conflicts_with names a, which is pinned`,
		a(`"vram_managed":true,"models":[{"name":"m","pin":true}]`):        `model "m": it has pin, and its consumer vram_managed`,
		a(`"models":[{"name":"m","pin":true,"idle_timeout":1000000000}]`):  `model "m": it is pinned and has idle_timeout 1s`,
		a(`"alias":["x","y-*"],"models":[{"name":"m"}]`):                   `consumer "a": its alias x, y-* stands for none of its models`,
		a(`"alias":["x"],"auto_models":true`):                              `consumer "a": its alias x stands for none of its models`,
		`{"max_body":"1GiB","max_buffered":"512MiB"}`:                      `max_body 1GiB is above max_buffered 512MiB`,
	} {
		got := resolved(t, doc).Warnings()
		assert.Len(t, got, 1, doc)
		assert.Contains(t, strings.Join(texts(got), "\n"), want, doc)
	}
	for doc, want := range map[string]string{
		`{"request_log":"requests.csv"}`: `request_log "requests.csv" is relative`,
		a(`"pin":true}],"restore":[{"consumer":"a","after":1000000000}],"consumers":[{"name":"a","vram":"1GiB","pin":true`): `restore names a, which is pinned`,
		a(`"idle_timeout":1000000000,"keep_alive":2000000000`):                                                              `idle_timeout 1s is shorter than its keep_alive 2s`,
	} {
		got := resolved(t, doc).Warnings()
		require.Len(t, got, 1, doc)
		assert.Contains(t, got[0].Err.Error(), want)
		assert.True(t, got[0].Advice, "%s stays a warning", got[0].Err)
	}
	for _, doc := range []string{
		a(`"keep_alive":60000000000,"no_evict":true`), a(`"idle_timeout":60000000000,"vram_managed":true`), a(`"pin":true,"idle_timeout":0`),
		a(`"enabled":"off","pin":true,"vram_managed":true`), a(`"pin":true,"no_evict":true`), `{"request_log":"/var/log/requests.csv"}`,
	} {
		assert.Empty(t, resolved(t, doc).Warnings(), doc)
	}
}

func TestK7_OneServerUnderTwoNamesIsWarnedOfAndShared(t *testing.T) {
	t.Setenv("K7_UPSTREAM", "127.0.0.1:8188")
	for _, second := range []string{"127.0.0.1:8188", "localhost:8188", "LOCALHOST:8188", "[::1]:8188", "0.0.0.0:8188", "{env.K7_UPSTREAM}"} {
		b := resolved(t, `{"restore":[{"consumer":"b","after":1000000000}],"consumers":[
			{"name":"a","upstream":"127.0.0.1:8188","vram":"9GiB","lifecycle":{"unload":{"path":"/free"}}},
			{"name":"b","upstream":"`+second+`","vram":"10GiB","pin":true,"lifecycle":{"unload":{"path":"/free"}}},
			{"name":"c","upstream":"127.0.0.1:8189","vram":"1GiB"}]}`)
		require.Len(t, b.Warnings(), 2, second) // the other is about restore
		w := b.Warnings()[1]
		assert.False(t, w.Advice)
		for _, want := range []string{`consumer "b": its upstream `, "that of consumer a", "shares a", "model"} {
			assert.Contains(t, w.Err.Error(), want)
		}
		a, double := b.Consumers[0], b.Consumers[1]
		assert.Equal(t, "a", double.Shares)
		assert.True(t, a.Pin, "what pins one of them pins their server")
		assert.EqualValues(t, "10GiB", b.SharedVRAM(a).String(), "one server's memory is booked once")
		assert.Equal(t, "a", b.Restore[0].Consumer)
		assert.Empty(t, b.Consumers[2].Shares)
	}
}

func TestK7_DoublesThatCannotShareKeepOutOfEachOthersWay(t *testing.T) {
	equal := func(a, b string) bool { return a == b }
	b := resolved(t, `{"consumers":[{"name":"a","upstream":"gpu1:11434","models":[{"name":"m","vram":"1GiB","alias":["mm"]}]},
		{"name":"b","upstream":"GPU1:11434","models":[{"name":"n","vram":"1GiB"}]}]}`)
	require.Len(t, b.Warnings(), 1)
	first, second := b.Consumers[0], b.Consumers[1]
	for model, first2nd := range map[string][2]bool{"m": {false, true}, "mm": {false, true}, "n": {true, true}, "other": {false, true}} {
		assert.Equal(t, first2nd, [2]bool{first.LeavesToDouble(model, equal), second.LeavesToDouble(model, equal)}, model)
	}

	b = resolved(t, `{"consumers":[{"name":"a","upstream":"gpu1:11434","vram":"4GiB"},{"name":"b","upstream":"gpu1:11434","models":[{"name":"n","vram":"1GiB"}]}]}`)
	require.Len(t, b.Warnings(), 1)
	assert.Contains(t, b.Warnings()[0].Err.Error(), "requests for a are refused")
	assert.False(t, b.Consumers[0].IsEnabled(), "it would unload the other's models")
	assert.True(t, b.Consumers[1].IsEnabled())
}

func TestK7_WhatIsNoDoubleIsNotWarnedOf(t *testing.T) {
	for _, second := range []string{`"shares":"a"`, `"enabled":"off"`, `"cloud":true,"vram":0`, `"upstream":"127.0.0.1:8189"`} {
		doc := `{"consumers":[{"name":"a","upstream":"127.0.0.1:8188","vram":"9GiB"},{"name":"b","upstream":"127.0.0.1:8188","vram":"1GiB",` + second + `}]}`
		assert.Empty(t, resolved(t, doc).Warnings(), second)
	}
}

func TestK7_AnyNumberOfNamesForOneServerComesToTheSameInAnyOrder(t *testing.T) {
	const whole = `"upstream":"gpu1:11434","vram":"5GiB"`
	model := func(name string) string { return whole + `,"models":[{"name":"` + name + `"}]` }
	for name, tc := range map[string]struct {
		consumers map[string]string
		want      string // those that are on, with their models, whatever the order; empty: all share the first
	}{
		"three with models":      {map[string]string{"one": model("m"), "two": model("n"), "three": model("o")}, "one[m] three[o] two[n]"},
		"two with models":        {map[string]string{"aaa": whole, "one": model("m"), "two": model("n")}, "one[m] two[n]"},
		"one with models":        {map[string]string{"aaa": whole, "one": model("m"), "zzz": whole}, "one[m]"},
		"none with models":       {map[string]string{"aaa": whole, "bbb": whole, "ccc": whole}, ""},
		"four with models":       {map[string]string{"four": model("p"), "one": model("m"), "two": model("n"), "three": model("o")}, "four[p] one[m] three[o] two[n]"},
		"four, two of each":      {map[string]string{"aaa": whole, "one": model("m"), "two": model("n"), "zzz": whole}, "one[m] two[n]"},
		"one that is off":        {map[string]string{"aaa": whole + `,"enabled":"off"`, "bbb": model("m"), "ccc": model("n")}, "bbb[m] ccc[n]"},
		"one that shares":        {map[string]string{"aaa": whole, "bbb": whole, "ccc": whole, "face": `"shares":"bbb","vram":"1GiB"`}, ""},
		"shares and models":      {map[string]string{"aaa": whole, "face": `"shares":"aaa","vram":"1GiB"`, "one": model("m"), "two": model("n")}, "one[m] two[n]"},
		"shares by another port": {map[string]string{"aaa": `"upstream":"gpu1:1","vram":"5GiB"`, "bbb": `"upstream":"gpu1:2","vram":"5GiB"`, "face": `"shares":"aaa","upstream":"gpu1:2","vram":"1GiB"`}, ""},
		"models auto":            {map[string]string{"all": whole + `,"auto_models":true`, "one": model("m"), "two": model("n")}, "all[] one[m] two[n]"},
	} {
		for _, order := range shuffles(slices.Sorted(maps.Keys(tc.consumers))) {
			at := name + ", " + strings.Join(order, " ")
			var list []string
			for _, c := range order {
				list = append(list, `{"name":"`+c+`",`+tc.consumers[c]+`}`)
			}
			b := resolved(t, `{"consumers":[`+strings.Join(list, ",")+`]}`)
			var on []string
			sharing, owners := map[string]int{}, map[string][]string{}
			for _, c := range b.Consumers {
				switch {
				case c.Shares != "":
					sharing[c.Shares]++
					assert.True(t, !c.IsEnabled() || b.consumer(c.Shares).IsEnabled(), "%s shares one that is off", at)
				case c.IsEnabled():
					on = append(on, c.Name+fmt.Sprint(c.modelNames()))
					for _, m := range []string{"m", "n", "o", "p", "unnamed"} {
						if slices.Contains(c.modelNames(), m) || !c.LeavesToDouble(m, func(a, b string) bool { return a == b }) {
							owners[m] = append(owners[m], c.Name)
						}
					}
				}
			}
			for m, whose := range owners {
				assert.Len(t, whose, 1, "%s: %s", at, m)
			}
			if tc.want != "" {
				slices.Sort(on)
				assert.Equal(t, tc.want, strings.Join(on, " "), at)
			} else {
				first := order[slices.IndexFunc(order, func(c string) bool { return c != "face" })]
				assert.Equal(t, map[string]int{first: len(order) - 1}, sharing, at)
			}
			if tc.consumers["all"] != "" {
				assert.Equal(t, []string{"all"}, owners["unnamed"], at)
			}
		}
	}
}

// shuffles are all orders of a list.
func shuffles(list []string) (out [][]string) {
	if len(list) == 0 {
		return [][]string{nil}
	}
	for i, first := range list {
		for _, others := range shuffles(slices.Concat(list[:i], list[i+1:])) {
			out = append(out, append([]string{first}, others...))
		}
	}
	return out
}

func (c *Consumer) modelNames() (out []string) {
	for _, m := range c.Models {
		out = append(out, m.Name)
	}
	return out
}

func TestK7_WarningsNameThePartnerThatStays(t *testing.T) {
	const whole = `"upstream":"127.0.0.1:11434","vram":"5GiB"`
	of := func(settings ...string) []string {
		for i, s := range settings {
			settings[i] = fmt.Sprintf(`{"name":%q,%s}`, string(rune('a'+i)), s)
		}
		return texts(resolved(t, `{"consumers":[`+strings.Join(settings, ",")+`]}`).Warnings())
	}
	const that, one = `its upstream 127.0.0.1:11434 is that of consumer `, `: one server is one consumer. `
	assert.Equal(t, []string{
		`consumer "a": ` + that + `b` + one + `Write a model line at b for what a stands for. Until then requests for a and e are refused`,
		`consumer "d": ` + that + `b` + one + `Write a model line at b for what d stands for. Until then requests for d are refused`,
		`consumer "c": ` + that + `b` + one + `Move its models there. Until then each serves only the models that it names`,
	}, of(whole, whole+`,"models":[{"name":"m"}]`, whole+`,"models":[{"name":"n"}]`, whole, `"shares":"a","vram":"1GiB"`))
	got := of(whole, whole, `"upstream":"localhost:11434","vram":"5GiB"`)
	require.Len(t, got, 2)
	assert.Contains(t, got[0], `consumer "b": `+that+`a: one server`)
	assert.Contains(t, got[1], `consumer "c": its upstream localhost:11434 is that of consumer a, which writes it 127.0.0.1:11434: one server`)
}

func TestK7_AModelThatTwoNamesHaveIsTheFirstOnes(t *testing.T) {
	b := resolved(t, `{"consumers":[{"name":"a","upstream":"gpu1:1","vram":"5GiB","models":[{"name":"m"}]},
		{"name":"b","upstream":"gpu1:1","vram":"5GiB","pin":true,"models":[{"name":"m"},{"name":"n"}]},
		{"name":"c","upstream":"gpu1:1","vram":"5GiB","models":[{"name":"n"},{"name":"m"}]}]}`)
	require.Len(t, b.Warnings(), 2)
	assert.Contains(t, b.Warnings()[0].Err.Error(), "requests here for m are refused")
	assert.Contains(t, b.Warnings()[1].Err.Error(), "requests here for n, m are refused")
	assert.True(t, b.Consumers[0].Models[0].Pin, "what pins it at one of them pins it")
	assert.Equal(t, []string{"n"}, b.Consumers[1].modelNames())
	assert.False(t, b.Consumers[2].IsEnabled(), "it has no model of its own")
}

func TestK7_ServersThatTheBrokerStartsAtOneAddressAreWarnedOfAndLeftAlone(t *testing.T) {
	const plain = `"upstream":"gpu1:1","vram":"5GiB"`
	const process = plain + `,"lifecycle":{"protocol":"process","command":["a"]}`
	for _, list := range [][]string{{process, plain, plain}, {plain, process, plain}, {plain, plain, process}} {
		var docs []string
		for i, settings := range list {
			docs = append(docs, fmt.Sprintf(`{"name":%q,%s}`, string(rune('a'+i)), settings))
		}
		b := new(Broker)
		require.NoError(t, json.Unmarshal([]byte(`{"consumers":[`+strings.Join(docs, ",")+`]}`), b))
		groups, rivals := servers(b)
		assert.Len(t, groups, 2, list)
		assert.Len(t, rivals, 1, list)
	}
}
