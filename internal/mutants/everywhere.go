package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// oneAtATime is held while the tests of all packages run: they take the whole machine.
var oneAtATime sync.Mutex

// everywhere runs the tests of every package on a fault that those of its room do not find, first without a site, then
// end to end on dir's caddy. A test that fails must fail again by itself, as a fault does and a crowded machine does not.
func everywhere(root, dir, overlay string, r room) (by string, err error) {
	oneAtATime.Lock()
	defer oneAtATime.Unlock()
	packages, err := output(root, "go", "list", "./...")
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, packages)
	}
	units := slices.DeleteFunc(strings.Fields(packages), func(pkg string) bool {
		return strings.Contains(pkg, "/test/") || strings.HasSuffix(pkg, "/internal/mutants")
	})
	sites := []string{"./test/e2e", "./test/presets", "./test/doctor", "./test/examples"}
	for _, which := range [][]string{append([]string{"-short"}, units...), append([]string{"-p=1", "-parallel=8", "-count=1"}, sites...)} {
		run := func(name string) (string, error) {
			args := []string{
				"GPU_BROKER_CADDY=" + filepath.Join(dir, "caddy"),
				"go", "test", "-overlay", overlay, "-vet=off", "-failfast", "-timeout=10m", "-skip=^(TestAlone|TestSoak|TestReal|TestE2_)",
			}
			if name != "" {
				args = append(args, "-run=^"+name+"$")
			}
			return verdictOf(root, r.apart, "env", append(args, which...)...)
		}
		if by, err = run(""); err == nil && by != "" {
			name, _, _ := strings.Cut(by, " ")
			if !strings.HasPrefix(name, "Test") { // it did not end, or panicked: nobody knows which
				name = ""
			}
			by, err = run(name)
		}
		if err != nil || by != "" {
			return by, err
		}
	}
	return "", nil
}
