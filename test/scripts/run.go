// Package scripts runs scripts of this repository for tests.
package scripts

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Run runs a script, by its path in the repository, and gives the path that it prints.
func Run(t testing.TB, path string) string {
	t.Helper()
	script, err := find(path)
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	command := exec.Command(script)
	command.Stderr = &said
	output, err := command.Output()
	if said.Len() > 0 {
		t.Logf("%s:\n%s", path, said.Bytes())
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return strings.TrimSpace(string(output))
}

// find looks in the test's folder and those above it, so that a test of any package of the module may use it.
func find(path string) (string, error) {
	folder, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		script := filepath.Join(folder, path)
		if _, err := os.Stat(script); err == nil {
			return script, nil
		}
		above := filepath.Dir(folder)
		if above == folder {
			return "", fmt.Errorf("no %s here or above: run the test from within the module's tree", path)
		}
		folder = above
	}
}
