package config

import "testing"

func TestNearestFindsWhatWasMeant(t *testing.T) {
	for _, tc := range []struct {
		found   string
		allowed []string
		want    string
	}{
		{"evictng", Schedulers, Evicting},
		{"Evicting", Schedulers, Evicting},
		{"lcoked", Schedulers, Locked},
		{"pass", Schedulers, Passthrough},
		{"zebra", Schedulers, ""},
		{"comfy", []string{"ollama", "comfyui"}, "comfyui"},
		{"olama", []string{"ollama", "comfyui"}, "ollama"},
		{"of", Switches, Off},
		{"onn", Switches, On},
		{"true", Switches, ""},
		{"", Switches, ""},
		{"x", nil, ""},
	} {
		if got := Nearest(tc.found, tc.allowed); got != tc.want {
			t.Errorf("nearest to %q in %v: %q, want %q", tc.found, tc.allowed, got, tc.want)
		}
	}
}

func TestDistanceCountsEdits(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"", "abc", 3},
		{"abc", "", 3},
		{"kitten", "sitting", 3},
		{"vram", "varm", 1},
		{"ab", "ba", 1},
		{"flaw", "lawn", 2},
		{"same", "same", 0},
	} {
		if got := distance(tc.a, tc.b); got != tc.want {
			t.Errorf("%q to %q: %d, want %d", tc.a, tc.b, got, tc.want)
		}
		if back := distance(tc.b, tc.a); back != tc.want {
			t.Errorf("%q to %q: %d, want %d", tc.b, tc.a, back, tc.want)
		}
	}
}

func TestUnknownListsTheAllowedWordsAndTheNearest(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want string
	}{
		{Unknown("scheduler", "evictng", Schedulers), `unknown scheduler "evictng": did you mean evicting? allowed: evicting, locked, passthrough`},
		{Unknown("scheduler", "zebra", Schedulers), `unknown scheduler "zebra": allowed: evicting, locked, passthrough`},
		{Unknown("gpu driver", "aut", []string{"nvml", "auto", "auto"}), `unknown gpu driver "aut": did you mean auto? allowed: auto, nvml`},
		{Unknown("preset", "x", nil), `unknown preset "x": there is none`},
	} {
		if tc.err.Error() != tc.want {
			t.Errorf("got %s\nwant %s", tc.err, tc.want)
		}
	}
}
