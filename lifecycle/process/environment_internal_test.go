package process

import (
	"slices"
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestH8_AServerGetsOfCaddysEnvironmentOnlyWhatItMay(t *testing.T) {
	inherited := []string{"PATH=/bin", "HOME=/srv", "LANG=C", "API_TOKEN=secret", "OLLAMA_HOST=x", "OLLAMA_MODELS=y", "OLLAMA=z", "NOTIFY_SOCKET=/run/n", "CUDA_CACHE_PATH=/c"}
	for _, tc := range []struct {
		name  string
		clear bool
		pass  []string
		want  []string
	}{
		{"all of it", false, nil, []string{"PATH=/bin", "HOME=/srv", "LANG=C", "API_TOKEN=secret", "OLLAMA_HOST=x", "OLLAMA_MODELS=y", "OLLAMA=z", "CUDA_CACHE_PATH=/c"}},
		{"cleared", true, nil, []string{"PATH=/bin", "HOME=/srv", "LANG=C"}},
		{"but for some", true, []string{"OLLAMA_*", "CUDA_CACHE_PATH", "NOTIFY_SOCKET"}, []string{"PATH=/bin", "HOME=/srv", "LANG=C", "OLLAMA_HOST=x", "OLLAMA_MODELS=y", "CUDA_CACHE_PATH=/c"}},
	} {
		p := &plan{envClear: tc.clear, envPass: tc.pass}
		if got := p.environment(inherited, lifecycle.Target{}, nil, "m"); !slices.Equal(got, append(tc.want, marker+"=m")) {
			t.Errorf("%s: %q", tc.name, got)
		}
	}
}
