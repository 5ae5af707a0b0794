package readme

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// designPages are the pages of docs/design by the word that cites them.
var designPages = map[string]string{
	"spec": "contract.md", "accounting": "accounting.md", "policy": "policy.md", "placement": "placement.md", "switching": "switching.md", "hosts": "hosts.md",
}

var (
	citation    = regexp.MustCompile(`\b(spec|accounting|policy|placement|switching|hosts)(?:'s)? (?:§(\d+)(?:\.(\d+))?|rule (\d+))`)
	sectionHead = regexp.MustCompile(`^## §(\d+) `)
	numbered    = regexp.MustCompile(`^(\d+)\. `)
)

// places are the sections of a page, and their numbered lines: "4", "4.7".
func places(t *testing.T, page string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "docs/design", page))
	require.NoError(t, err)
	out := map[string]bool{}
	section := ""
	for line := range strings.Lines(string(text)) {
		if m := sectionHead.FindStringSubmatch(line); m != nil {
			section = m[1]
			out[section] = true
		} else if m := numbered.FindStringSubmatch(line); m != nil && section != "" {
			out[section+"."+m[1]] = true
		}
	}
	return out
}

func TestWhatTheCodeCitesOfTheContractIsThere(t *testing.T) {
	known := map[string]map[string]bool{}
	for word, page := range designPages {
		known[word] = places(t, page)
	}
	cited := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".") {
				return filepath.SkipDir
			}
			return err
		}
		if !strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, ".md") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range citation.FindAllStringSubmatch(string(text), -1) {
			place := m[2]
			switch {
			case m[4] != "":
				place = "1." + m[4] // the rules of policy are those of its first section
			case m[3] != "":
				place += "." + m[3]
			}
			cited++
			if !known[m[1]][place] {
				t.Errorf("%s cites %q: docs/design/%s has no §%s", path, m[0], designPages[m[1]], place)
			}
		}
		return nil
	}))
	require.Greater(t, cited, 50, "citations are found")
}
