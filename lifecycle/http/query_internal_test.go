package httplife

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// decoded is a value as an answer holds it.
func decoded(t *testing.T, text string) (value any) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(text), &value), text)
	return value
}

func TestAValueOfAnAnswerMeansYesOrNo(t *testing.T) {
	for text, want := range map[string]bool{
		"true": true, "false": false, "null": false, "0": false, "1": true, "0.5": true, "-1": false,
		`""`: false, `" "`: false, `"none"`: false, `" None "`: false, `"null"`: false, `"unloaded"`: false, `"FALSE"`: false, `"true"`: true, `"idle"`: true, `"0"`: true,
		"[]": false, "[0]": true, "{}": false, `{"a":0}`: true,
	} {
		require.Equal(t, want, truth(decoded(t, text)), text)
	}
}

func TestAnAmountOfMemoryIsASumThatMakesSense(t *testing.T) {
	for text, want := range map[string]gpu.Bytes{
		"0": 0, "3": 3 << 20, "0.5": 1 << 19, "[1,2]": 3 << 20, "[]": 0, "[[1],[2,[3]]]": 6 << 20,
		"-1": -1, "[1,-1]": -1, `"3"`: -1, `[1,"2"]`: -1, "null": -1, "{}": -1, "true": -1, "1e13": -1, "8796093022208": -1, "8796093022207": 8796093022207 << 20,
	} {
		require.Equal(t, want, amount(decoded(t, text), gpu.MiB), text)
	}
}

func TestAListOfAnAnswerHoldsEachValueOnce(t *testing.T) {
	for text, want := range map[string][]any{
		`["a","b","a",1,true,null,1]`: {"a", "b", 1.0, true}, `"a"`: {"a"}, "[]": nil, "null": nil, "7": {7.0},
	} {
		got, err := list(decoded(t, text))
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{`[["a"]]`, `[{}]`, `{"a":1}`} {
		_, err := list(decoded(t, text))
		require.Error(t, err, text)
	}
}

func TestModelsAreReadWithWhatStandsBesideTheirNames(t *testing.T) {
	query := func(expression string) *query {
		q, err := newQuery(expression)
		require.NoError(t, err)
		return q
	}
	r := &route{names: query("$.models[*].name"), sizes: query("$.models[*].gpu"), fulls: query("$.models[*].all"), digests: query("$.models[*].digest"), sizeUnit: gpu.MiB, fullUnit: 1}
	for _, c := range []struct {
		answer string
		most   int
		want   []lifecycle.Model
	}{
		{`{"models":[]}`, 9, []lifecycle.Model{}},
		{`{"models":[{"name":"a","gpu":1,"all":2,"digest":"x"},{"name":"b","gpu":3,"all":4,"digest":"y"}]}`, 9,
			[]lifecycle.Model{{Name: "a", Resident: 1 << 20, Size: 2, Digest: "x"}, {Name: "b", Resident: 3 << 20, Size: 4, Digest: "y"}}},
		{`{"models":[{"name":"a","gpu":1,"all":2,"digest":"x"},{"name":"b","gpu":3,"all":4,"digest":"y"}]}`, 1, []lifecycle.Model{{Name: "a", Resident: 1 << 20, Size: 2, Digest: "x"}}},
		{`{"models":[{"name":"a","gpu":1},{"name":"b"}]}`, 9, []lifecycle.Model{{Name: "a", Resident: -1, Size: -1}, {Name: "b", Resident: -1, Size: -1}}}, // whose is it?
		{`{"models":[{"name":"","gpu":1,"all":2,"digest":7},{"name":5,"gpu":1,"all":2,"digest":7}]}`, 9, []lifecycle.Model{{Name: "5", Resident: 1 << 20, Size: 2}}},
	} {
		got, err := r.listModels(t.Context(), decoded(t, c.answer), c.most)
		require.NoError(t, err, c.answer)
		require.Equal(t, c.want, got, c.answer)
	}
	for _, answer := range []string{`{}`, `{"models":7}`, `{"models":[{"name":[]}]}`} {
		_, err := r.listModels(t.Context(), decoded(t, answer), 9)
		require.Error(t, err, answer)
	}
}

func TestAnAnswerSaysOfATargetWhetherItIsLoaded(t *testing.T) {
	d := newDriver(&plan{}, lifecycle.Deps{})
	one := []lifecycle.Model{{Name: "a", Digest: "x"}}
	for _, c := range []struct {
		said   said
		target lifecycle.Target
		want   lifecycle.Tri
	}{
		{said{loaded: lifecycle.Yes}, lifecycle.Target{}, lifecycle.Yes},
		{said{loaded: lifecycle.No, models: one}, lifecycle.Target{}, lifecycle.No},
		{said{loaded: lifecycle.Yes}, lifecycle.Target{Model: "a"}, lifecycle.Unknown},
		{said{models: one}, lifecycle.Target{Model: "a"}, lifecycle.Yes},
		{said{models: one}, lifecycle.Target{Model: "b"}, lifecycle.No},
		{said{models: one}, lifecycle.Target{Model: "b", Digest: "x"}, lifecycle.Yes},
		{said{models: one}, lifecycle.Target{Model: "b", Digest: "y"}, lifecycle.No},
		{said{models: []lifecycle.Model{{Name: "a"}}}, lifecycle.Target{Model: "b"}, lifecycle.No},
		{said{models: []lifecycle.Model{}}, lifecycle.Target{Model: "a"}, lifecycle.No},
	} {
		require.Equal(t, c.want, d.of(c.said, c.target), "%+v", c)
	}
}

func TestALackOfMemoryIsReadFromAnAnswerHoweverItIsPut(t *testing.T) {
	for body, want := range map[string]bool{
		"CUDA out of memory. Tried to allocate": true, `{"code":"OUT_OF_MEMORY"}`: true, "torch.OutOfMemoryError": true, "insufficient memory": true,
		"": false, "memory": false, "out of disk": false,
	} {
		require.Equal(t, want, saysOutOfMemory([]byte(body)), body)
	}
}
