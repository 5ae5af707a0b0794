package doctor

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

func TestH8_VariablesThatLookLikeSecretsAndReachAServerAreNamed(t *testing.T) {
	environ := []string{"PATH=/bin", "AWS_SECRET_ACCESS_KEY=x", "db_password=y", "HF_TOKEN=z", "EMPTY_TOKEN=", "KEYBOARD=us", "PWD=/srv", "SSL_CERT_FILE=/c", "OLLAMA_HOST=h", "MONKEY_BARS=1"}
	for name, c := range map[string]struct {
		guest guest
		want  []string
	}{
		"all is inherited":    {guest{}, []string{"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "db_password"}},
		"one is set":          {guest{Env: map[string]any{"HF_TOKEN": "other"}}, []string{"AWS_SECRET_ACCESS_KEY", "db_password"}},
		"none is inherited":   {guest{EnvClear: true}, nil},
		"one is passed":       {guest{EnvClear: true, EnvPass: []string{"HF_TOKEN"}}, nil},
		"a pattern takes one": {guest{EnvClear: true, EnvPass: []string{"AWS_*", "OLLAMA_*"}}, []string{"AWS_SECRET_ACCESS_KEY"}},
		"a pattern takes all": {guest{EnvClear: true, EnvPass: []string{"*", "HF_TOKEN"}}, []string{"AWS_SECRET_ACCESS_KEY", "db_password"}},
	} {
		t.Run(name, func(t *testing.T) { assert.Equal(t, c.want, c.guest.secrets(environ)) })
	}
}

func TestH8_TheDoctorNamesSecretsAndNeverTheirValues(t *testing.T) {
	t.Setenv("GPU_BROKER_TEST_TOKEN", "hidden-value")
	f := factsOf(&config.Consumer{Name: "a"}, &config.Consumer{Name: "b"})
	f.site.Lifecycles = raws("a", `{"protocol":"process","command":["sleep"]}`, "b", `{"protocol":"process","command":["sleep"],"env_clear":true}`)
	said := texts(judgePorts(f))
	assert.Contains(t, said, "warning a: its server inherits variables of Caddy's environment that look like secrets: ")
	assert.Contains(t, said, "GPU_BROKER_TEST_TOKEN")
	assert.NotContains(t, said, "hidden-value")
	assert.NotContains(t, said, "warning b")
}
