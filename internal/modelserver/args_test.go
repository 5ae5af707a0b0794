package modelserver

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// childEnv makes the test binary the program itself.
const childEnv = "MODELSERVER_TEST_CHILD"

func TestSpecsAreReadOnTopOfTheFlags(t *testing.T) {
	base := Options{Total: 16 * gpu.GiB}
	got, err := ParseSpec(base, `name=ollama, manner=ollama, addr=127.0.0.1:11434, models=tiny:1GiB+qwen:7b:5GiB, load=1s, unload=200ms, release=0.8s, run=2s, lazy=true, concurrency=4`)
	require.NoError(t, err)
	require.Equal(t, Options{
		Name: "ollama", Manner: Ollama, Addr: "127.0.0.1:11434", Total: 16 * gpu.GiB,
		Models:   map[string]gpu.Bytes{"tiny": gpu.GiB, "qwen:7b": 5 * gpu.GiB},
		LoadTime: time.Second, UnloadTime: 200 * time.Millisecond, ReleaseDelay: 800 * time.Millisecond, RunTime: 2 * time.Second,
		Lazy: true, Concurrency: 4,
	}, got)

	for _, bad := range []string{"name", "nope=1", "vram=8XB", "load=soon", "lazy=perhaps", "gpu=x", "models=tiny", `faults={"x":1}`} {
		_, err := ParseSpec(base, bad)
		require.Error(t, err, bad)
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	for want, args := range map[string][]string{
		"flag provided but not defined": {"-nope"},
		"unknown option":                {"nope=1"},
		"manner":                        {"manner=nope"},
	} {
		var out, complaints bytes.Buffer
		require.NotZero(t, run(append([]string{"-sim-dir", t.TempDir()}, args...), &out, &complaints))
		require.Contains(t, complaints.String(), want)
	}
	var usage bytes.Buffer
	require.Zero(t, run([]string{"-h"}, io.Discard, &usage))
	require.Contains(t, usage.String(), "-vram")
	for _, m := range Manners() {
		require.Contains(t, usage.String(), string(m))
	}
}

// child starts the program and returns the lines that it prints when it is ready.
func child(t *testing.T, lines int, args ...string) (*exec.Cmd, []string) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(bound(t), self, args...)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	var got []string
	scanner := bufio.NewScanner(out)
	for len(got) < lines && scanner.Scan() {
		got = append(got, scanner.Text())
	}
	require.Len(t, got, lines)
	return cmd, got
}

func TestOneProcessRunsSeveralServersAndStopsOnSIGTERM(t *testing.T) {
	dir := t.TempDir()
	cmd, ready := child(t, 3, "-sim-dir", dir, "-total", "16GiB", "-preloaded", "true",
		"name=mvoice,vram=2GiB", "name=comfyui,manner=comfyui,vram=3GiB", "name=ollama,manner=ollama,vram=1GiB")
	require.Equal(t, 6*gpu.GiB, used(t, dir))
	for i, start := range []string{"mvoice plain http://", "comfyui comfyui http://", "ollama ollama http://"} {
		require.True(t, strings.HasPrefix(ready[i], start), ready[i])
		url := strings.Fields(ready[i])[2]
		require.True(t, decode[Report](t, want(t, 200, call(bound(t), "GET", url+"/control", "")).body).Stats.Loaded)
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait())
	require.Zero(t, used(t, dir))
}

func TestKilledProcessFreesItsMemory(t *testing.T) {
	dir := t.TempDir()
	cmd, _ := child(t, 1, "-sim-dir", dir, "-name", "mvoice", "-vram", "2GiB", "-preloaded", "true")
	require.Equal(t, 2*gpu.GiB, used(t, dir))
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Zero(t, used(t, dir))
}

func TestServerAloneDiesAsAProcess(t *testing.T) {
	dir := t.TempDir()
	cmd, ready := child(t, 1, "-sim-dir", dir, "-name", "mvoice", "-vram", "2GiB", "-faults", `{"die_on_load":true}`)
	url := strings.Fields(ready[0])[2]
	require.Error(t, call(bound(t), "POST", url+loadPath, "").err)
	require.Error(t, cmd.Wait())
	require.Equal(t, 137, cmd.ProcessState.ExitCode())

	cmd, ready = child(t, 1, "-sim-dir", dir, "-name", "mvoice")
	url = strings.Fields(ready[0])[2]
	want(t, 200, call(bound(t), "POST", url+"/control", `{"kill":true}`))
	require.Error(t, cmd.Wait())
	require.Equal(t, 137, cmd.ProcessState.ExitCode())
}

func TestTwoProcessesNeverOverfillTheGPU(t *testing.T) {
	dir := t.TempDir()
	var urls []string
	for _, name := range []string{"a", "b"} {
		_, ready := child(t, 1, "-sim-dir", dir, "-total", "10GiB", "-vram", "6GiB", "-name", name)
		urls = append(urls, strings.Fields(ready[0])[2])
	}
	for range 20 {
		a := send(bound(t), "POST", urls[0]+loadPath, "")
		b := send(bound(t), "POST", urls[1]+loadPath, "")
		first, second := <-a, <-b
		require.NoError(t, first.err)
		require.NoError(t, second.err)
		require.False(t, first.status == 200 && second.status == 200, "both loaded")
		want(t, 200, call(bound(t), "POST", urls[0]+unloadPath, ""))
		want(t, 200, call(bound(t), "POST", urls[1]+unloadPath, ""))
	}
	require.Zero(t, used(t, dir))
}
