//go:build linux

package real

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/internal/tinygguf"
	"github.com/gpu-broker/caddy-gpu-broker/test/real/tinywhisper"
)

// The models of a router and of a model runner. The runner knows them as ai/tiny and so on.
const (
	Tiny  = "tiny"  // answers at once
	Tiny2 = "tiny2" // the same with other weights
	Slow  = "slow"  // takes some milliseconds for each token, so that a long answer streams for seconds
)

var models = []struct {
	name string
	size tinygguf.Size
	seed uint64
}{{Tiny, tinygguf.Tiny(), 1}, {Tiny2, tinygguf.Tiny(), 2}, {Slow, tinygguf.Slow(), 1}}

// LlamaServer builds llama.cpp's server if it is not cached and gives its path.
func LlamaServer(t testing.TB) string {
	t.Helper()
	return build(t, "llamacpp")
}

// WhisperServer builds whisper.cpp's server if it is not cached and gives its path.
func WhisperServer(t testing.TB) string {
	t.Helper()
	return build(t, "whispercpp")
}

// ModelRunner builds Docker's model runner if it is not cached and gives its path.
func ModelRunner(t testing.TB) string {
	t.Helper()
	return build(t, "modelrunner")
}

// LlamaModel writes the named model as a file of the folder and gives its path.
func LlamaModel(t testing.TB, folder, name string) string {
	t.Helper()
	for _, model := range models {
		if model.name == name {
			path := filepath.Join(folder, name+".gguf")
			writeFile(t, path, func(w io.Writer) error { return tinygguf.Write(w, model.size, model.seed) })
			return path
		}
	}
	t.Fatalf("want %s, %s or %s, found model %q", Tiny, Tiny2, Slow, name)
	return ""
}

// WhisperModel writes a model for whisper-server and gives its path.
func WhisperModel(t testing.TB, folder string, seed uint64) string {
	t.Helper()
	path := filepath.Join(folder, "whisper-"+strconv.FormatUint(seed, 10)+".bin")
	writeFile(t, path, func(w io.Writer) error { return tinywhisper.Write(w, tinywhisper.Tiny(), seed) })
	return path
}

// LlamaArguments are those for a llama-server on a port of 127.0.0.1: one thread, one answer at a
// time. Several threads would wait for each other by spinning, where other tests want the processor.
func LlamaArguments(port int, more ...string) []string {
	return append([]string{"--host", "127.0.0.1", "--port", strconv.Itoa(port), "--threads", "1", "--parallel", "1", "--offline"}, more...)
}

// WhisperArguments are those for a whisper-server on a port of 127.0.0.1. Its thresholds let every
// text pass, which else it would try again, several times, with a model that only guesses. (It takes
// --no-fallback and does not heed it.)
func WhisperArguments(port int, model string) []string {
	return []string{"--host", "127.0.0.1", "--port", strconv.Itoa(port), "--threads", "1", "--logprob-thold", "-1000", "--entropy-thold", "0", "--no-timestamps", "--model", model}
}

// StartLlamaServer starts a llama-server with one model. It is ready when this returns.
func StartLlamaServer(t testing.TB, model string, arguments ...string) *Server {
	t.Helper()
	port := FreePort(t)
	command := exec.Command(LlamaServer(t), LlamaArguments(port, append([]string{"--model", LlamaModel(t, t.TempDir(), model)}, arguments...)...)...)
	return start(t, command, port, "/health")
}

// StartLlamaRouter starts a llama-server without a model of its own, over all of them. None is
// loaded. A model that is told to end while it computes is killed after a second (by itself the
// router waits ten).
func StartLlamaRouter(t testing.TB, arguments ...string) *Server {
	t.Helper()
	folder, port := t.TempDir(), FreePort(t)
	for _, model := range models {
		LlamaModel(t, folder, model.name)
	}
	presets := filepath.Join(t.TempDir(), "presets.ini")
	writeFile(t, presets, func(w io.Writer) error {
		_, err := io.WriteString(w, "version = 1\n\n[*]\nstop-timeout = 1\n")
		return err
	})
	arguments = append([]string{"--models-dir", folder, "--models-preset", presets}, arguments...)
	command := exec.Command(LlamaServer(t), LlamaArguments(port, arguments...)...)
	command.Env = append(os.Environ(), "HOME="+t.TempDir()) // where it looks for more models
	return start(t, command, port, "/health")
}

// StartWhisper starts a whisper-server with one model.
func StartWhisper(t testing.TB) *Server {
	t.Helper()
	port := FreePort(t)
	command := exec.Command(WhisperServer(t), WhisperArguments(port, WhisperModel(t, t.TempDir(), 1))...)
	return start(t, command, port, "/health")
}

// StartModelRunner starts Docker's model runner and gives it all the models. None is loaded.
func StartModelRunner(t testing.TB, environment ...string) *Server {
	t.Helper()
	home, port := t.TempDir(), FreePort(t)
	// llama-server's signal handler takes a lock that the interrupted thread may hold: where its last answer has only
	// just gone out it hangs, about once in a thousand times. The model runner would wait for it without end.
	servers := t.TempDir()
	writeFile(t, filepath.Join(servers, "com.docker.llama-server"), func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "#!/bin/sh\nexec timeout --foreground --kill-after=5 0 '%s' \"$@\"\n", LlamaServer(t))
		return err
	})
	if err := os.Chmod(filepath.Join(servers, "com.docker.llama-server"), 0o700); err != nil {
		t.Fatal(err)
	}
	command := exec.Command(ModelRunner(t))
	command.Dir = home // its runners' sockets
	command.Env = append(append(os.Environ(),
		"HOME="+home, "MODELS_PATH="+filepath.Join(home, "models"), "MODEL_RUNNER_LOG_DIR="+t.TempDir(),
		"MODEL_RUNNER_PORT="+strconv.Itoa(port), "LLAMA_SERVER_PATH="+servers,
		"LLAMA_ARGS=--threads 1 --parallel 1", "DO_NOT_TRACK=1"), environment...)
	s := start(t, command, port, "/")
	for _, model := range models {
		if err := s.give(LlamaModel(t, t.TempDir(), model.name), "ai/"+model.name); err != nil {
			t.Fatalf("giving the model runner model %s: %v", model.name, err)
		}
	}
	return s
}

// give puts a model file into a model runner's store, under a name.
func (s *Server) give(file, name string) error {
	archive, id, err := archiveModel(file)
	if err != nil {
		return err
	}
	if err := s.want(http.MethodPost, "/models/load", archive, http.StatusOK); err != nil {
		return err
	}
	query := url.Values{"repo": {name}, "tag": {"latest"}}
	return s.want(http.MethodPost, "/models/"+id+"/tag?"+query.Encode(), nil, http.StatusCreated)
}

func (s *Server) want(method, path string, body any, status int) error {
	found, answer, err := s.Ask(context.Background(), method, path, body)
	if err == nil && found != status {
		err = errors.New(method + " " + path + ": want status " + strconv.Itoa(status) + ", found " + strconv.Itoa(found) + ": " + string(answer))
	}
	return err
}

func writeFile(t testing.TB, path string, write func(io.Writer) error) {
	t.Helper()
	file, err := os.Create(path)
	if err == nil {
		err = errors.Join(write(file), file.Close())
	}
	if err != nil {
		t.Fatalf("writing %s: %v", path, err)
	}
}
