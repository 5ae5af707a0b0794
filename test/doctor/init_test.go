package doctor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// usable says that a Caddyfile is well formatted, adapts and validates.
func (m *machine) usable(path string) {
	m.t.Helper()
	for _, args := range [][]string{
		{"fmt", "--diff", path}, {"adapt", "--adapter", "caddyfile", "--config", path}, {"validate", "--adapter", "caddyfile", "--config", path},
	} {
		out, errs, status := m.run(args...)
		assert.Zero(m.t, status, "%v\n%s%s", args, out, errs)
		assert.NotContains(m.t, errs, "not formatted", "%v", args)
	}
}

// serveSite runs Caddy with a configuration until the test ends, and says at which address its site answers.
func (m *machine) serveSite(config string) string {
	m.t.Helper()
	doc, err := os.ReadFile(config)
	require.NoError(m.t, err)
	site := regexp.MustCompile(`(?m)^:(\d+) \{$`).FindSubmatch(doc)
	require.NotNil(m.t, site, "%s", doc)
	url := "http://127.0.0.1:" + string(site[1])

	m.env = append(m.env, fmt.Sprintf("CADDY_ADMIN=localhost:%d", freePort(m.t)))
	log, err := os.Create(m.path("caddy.log"))
	require.NoError(m.t, err)
	cmd := m.command(context.Background(), "run", "--adapter", "caddyfile", "--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(m.t, cmd.Start())
	require.NoError(m.t, log.Close())
	m.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		ended := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		ended.Stop()
		if m.t.Failed() {
			text, _ := os.ReadFile(m.path("caddy.log"))
			m.t.Logf("caddy's log:\n%s", text)
		}
	})
	deadline := time.Now().Add(patience)
	for {
		resp, err := http.Get(url + "/gpu/healthz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return url
			}
		}
		require.True(m.t, time.Now().Before(deadline), "the site does not answer: %v", err)
		time.Sleep(10 * time.Millisecond) // between two questions: Caddy tells nobody that it is ready
	}
}

// post sends a request and returns the answer's body; it must be 200.
func post(t *testing.T, url, body string) (string, http.Header) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, "%s", answer)
	return string(answer), resp.Header
}

func TestInitWritesACaddyfileThatServesWhatRunsHere(t *testing.T) {
	mustBeFree(t, ollamaPort, comfyPort)
	m := newMachine(t)
	llms, err := modelserver.Start(modelserver.Options{Name: "ollama", Manner: modelserver.Ollama, Addr: fmt.Sprintf("127.0.0.1:%d", ollamaPort),
		SimDir: m.path("gpu"), Models: map[string]gpu.Bytes{"llama3.2:3b": 3 * gpu.GiB, "qwen3:8b": 7 * gpu.GiB}})
	require.NoError(t, err)
	defer llms.Close()
	images := serve(t, modelserver.Options{Name: "comfyui", Manner: modelserver.ComfyUI, Addr: fmt.Sprintf("127.0.0.1:%d", comfyPort)})
	post(t, llms.URL()+"/api/generate", `{"model":"llama3.2:3b","prompt":"hi","stream":false}`) // now it holds one
	before := llms.Stats()

	out, errs, status := m.run("gpu-broker", "init")
	require.Zero(t, status, errs)
	config := m.path("Caddyfile")
	doc, err := os.ReadFile(config)
	require.NoError(t, err)
	text := string(doc)
	assert.Contains(t, out, "ollama at 127.0.0.1:11434")
	assert.Contains(t, out, "comfyui at 127.0.0.1:8188")
	assert.Contains(t, text, "# What the server says that it holds of it now.\n\t\t\t\tvram 3GiB\n")
	assert.Regexp(t, `model qwen3:8b \{\n\t+# Its file and a tenth, .*\n\t+vram \d`, text)
	assert.Equal(t, before.LoadsStarted, llms.Stats().LoadsStarted, "it was made to load")
	assert.Zero(t, images.Stats().Worked+images.Stats().UnloadCalls)

	m.usable(config)
	report, status := m.doctor(config)
	assert.Zero(t, status, "%+v", report.Findings)
	for _, found := range report.Findings {
		assert.NotEqual(t, doctor.Error, found.Severity, "%+v", found)
	}

	url := m.serveSite(config)
	answer, header := post(t, url+"/v1/chat/completions", `{"model":"qwen3:8b","messages":[{"role":"user","content":"hi"}]}`)
	assert.Contains(t, answer, "choices")
	assert.Contains(t, header.Get("X-GPU-Broker-Consumer"), "ollama")
	answer, _ = post(t, url+"/api/generate", `{"model":"llama3.2:3b","prompt":"hi","stream":false}`)
	assert.Contains(t, answer, "response")
	answer, header = post(t, url+"/comfyui/prompt", `{"prompt":{"1":{"class_type":"KSampler","inputs":{}}}}`)
	assert.Contains(t, answer, "prompt_id")
	assert.Equal(t, "comfyui", header.Get("X-GPU-Broker-Consumer"))
	resp, err := http.Get(url + "/v1/models")
	require.NoError(t, err)
	defer resp.Body.Close()
	var models struct{ Data []struct{ ID string } }
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&models))
	assert.Contains(t, fmt.Sprint(models.Data), "llama3.2:3b")
}

func TestInitOverwritesNothing(t *testing.T) {
	m := newMachine(t)
	own := m.write("Caddyfile", "localhost\n")
	_, errs, status := m.run("gpu-broker", "init")
	assert.Equal(t, 1, status)
	assert.Contains(t, errs, "Caddyfile is there already: name another with --output, or overwrite it with --force")
	kept, err := os.ReadFile(own)
	require.NoError(t, err)
	assert.Equal(t, "localhost\n", string(kept))

	_, errs, status = m.run("gpu-broker", "init", "--force", "--address", "ai.example.com")
	require.Zero(t, status, errs)
	now, err := os.ReadFile(own)
	require.NoError(t, err)
	assert.Contains(t, string(now), "\nai.example.com {\n")
	m.usable(own)

	printed, _, status := m.run("gpu-broker", "init", "--output", "-", "--address", ":9443")
	assert.Zero(t, status)
	assert.Contains(t, printed, "\n:9443 {\n")
	assert.NotContains(t, printed, "bind")

	_, errs, status = m.run("gpu-broker", "init", "--output", m.path("other"), "--address", "a b")
	assert.Equal(t, 1, status)
	assert.Contains(t, errs, `--address "a b" is no address of a site`)
	_, errs, status = m.run("gpu-broker", "init", "--output", filepath.Join(m.dir, "none", "Caddyfile"))
	assert.Equal(t, 1, status)
	assert.Contains(t, errs, "writing the configuration")
}

func TestInitSaysThatItFoundNothing(t *testing.T) {
	mustBeFree(t, ollamaPort, comfyPort)
	m := newMachine(t)
	out, errs, status := m.run("gpu-broker", "init", "--output", "new")
	require.Zero(t, status, errs)
	text, err := os.ReadFile(m.path("new"))
	require.NoError(t, err)
	if bytes.Contains(text, []byte("\n\t\tconsumer ")) {
		t.Fatalf("this test needs a machine without model servers at their default ports: end them\n%s", text)
	}
	assert.Contains(t, out, "No model server was found")
	assert.Contains(t, string(text), "#\tconsumer ollama {")
	m.usable(m.path("new"))
}
