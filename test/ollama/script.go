//go:build linux

package ollama

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// runScript runs one of this folder's scripts and gives the path that it prints.
func runScript(t testing.TB, name string) string {
	t.Helper()
	script, err := findScript(name)
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(script)
	var said bytes.Buffer
	command.Stderr = &said
	output, err := command.Output()
	if said.Len() > 0 {
		t.Logf("%s:\n%s", name, said.Bytes())
	}
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return strings.TrimSpace(string(output))
}

// findScript looks for test/ollama in the test's folder and those above it, so that a test of any
// package of the module may use it.
func findScript(name string) (string, error) {
	folder, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		script := filepath.Join(folder, "test", "ollama", name)
		if _, err := os.Stat(script); err == nil {
			return script, nil
		}
		above := filepath.Dir(folder)
		if above == folder {
			return "", errors.New("no test/ollama/" + name + " here or above: run the test from within the module's tree")
		}
		folder = above
	}
}
