package readme

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/gpu-broker/caddy-gpu-broker"
	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// root is the folder of the repository.
const root = "../.."

// pages are the README and what users read in docs/, by their path from the root.
func pages(t *testing.T) map[string]string {
	t.Helper()
	return pagesAt(t, "README.md", "docs/*.md")
}

// pagesAt are the pages that patterns match, by their path from the root. Each pattern must match one.
func pagesAt(t *testing.T, patterns ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, pattern := range patterns {
		paths, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, paths, pattern)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			name, err := filepath.Rel(root, path)
			require.NoError(t, err)
			out[filepath.ToSlash(name)] = string(text)
		}
	}
	return out
}

// block is a fenced block: what stands between the fences, and after the first of them.
type block struct{ page, kind, text string }

var fence = regexp.MustCompile("(?ms)^```([^\n]*)\n(.*?)^```$")

func blocks(t *testing.T) (all []block) {
	t.Helper()
	for page, text := range pages(t) {
		for _, m := range fence.FindAllStringSubmatchIndex(text, -1) {
			line := strings.Count(text[:m[0]], "\n") + 1
			all = append(all, block{fmt.Sprintf("%s:%d", page, line), text[m[2]:m[3]], text[m[4]:m[5]]})
		}
	}
	return all
}

// frames turn a part of a Caddyfile into a whole one.
var frames = map[string]string{
	"caddyfile": "%s",
	"caddyfile global": `{
	gpu_broker {
%s	}
}
`,
	"caddyfile site": `{
	gpu_broker {
		consumer mvoice {
			upstream 127.0.0.1:8766
			vram 2.8GiB
		}
		consumer ollama {
			preset ollama
			upstream 127.0.0.1:11434
			vram 6GiB
		}
		consumer comfyui {
			preset comfyui
			upstream 127.0.0.1:8188
			vram 13GiB
		}
	}
}

:8080 {
%s}
`,
}

var depth = map[string]int{"caddyfile global": 2, "caddyfile site": 1}

func (b block) caddyfile() string {
	margin := strings.Repeat("\t", depth[b.kind])
	var text strings.Builder
	for line := range strings.Lines(b.text) {
		if strings.TrimSpace(line) != "" {
			text.WriteString(margin)
		}
		text.WriteString(line)
	}
	return fmt.Sprintf(frames[b.kind], text.String())
}

// aside puts what Caddy writes for itself into the test's own folder, and sets the variables that examples name.
func aside(t *testing.T) {
	t.Helper()
	before := caddy.DefaultStorage.Path
	caddy.DefaultStorage.Path = t.TempDir()
	t.Cleanup(func() { caddy.DefaultStorage.Path = before })
	t.Setenv("ENGINE_TOKEN", "test")
	t.Setenv("MVOICE_TOKEN", "test")
	t.Setenv("TABBY_ADMIN_KEY", "test")
}

func validate(t *testing.T, config []byte) {
	t.Helper()
	var cfg caddy.Config
	require.NoError(t, caddy.StrictUnmarshalJSON(config, &cfg))
	require.NoError(t, caddy.Validate(&cfg))
}

func TestEveryBlockIsOfAKindThatIsChecked(t *testing.T) {
	counts := map[string]int{}
	for _, b := range blocks(t) {
		counts[b.kind]++
		switch b.kind {
		case "sh", "text", "json", "json error", "json decision":
		default:
			assert.Contains(t, frames, b.kind, "%s: a block of a kind that no test checks", b.page)
		}
	}
	for _, kind := range []string{"caddyfile", "caddyfile global", "caddyfile site", "json"} {
		assert.NotZero(t, counts[kind], "there is no block of the kind %q: is it read at all?", kind)
	}
}

func TestEveryCaddyfileIsFormattedAdaptsAndValidates(t *testing.T) {
	adapter := caddyconfig.GetAdapter("caddyfile")
	require.NotNil(t, adapter)
	for _, b := range blocks(t) {
		if frames[b.kind] == "" {
			continue
		}
		t.Run(b.page, func(t *testing.T) {
			aside(t)
			text := b.caddyfile()
			assert.Equal(t, string(caddyfile.Format([]byte(text))), text, "caddy fmt would write it otherwise")
			config, warnings, err := adapter.Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
			require.NoError(t, err)
			assert.Empty(t, warnings)
			validate(t, config)
		})
	}
}

func TestEveryJSONConfigurationValidates(t *testing.T) {
	for _, b := range blocks(t) {
		if b.kind != "json" || strings.HasPrefix(b.page, doctorsPage) {
			continue
		}
		t.Run(b.page, func(t *testing.T) {
			aside(t)
			validate(t, []byte(b.text))
		})
	}
}

func TestAConfigurationWithAFaultWouldBeFound(t *testing.T) {
	aside(t)
	b := block{kind: "caddyfile site", text: "gpu_broker nobody\n"}
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(b.caddyfile()), nil)
	require.NoError(t, err)
	var cfg caddy.Config
	require.NoError(t, caddy.StrictUnmarshalJSON(config, &cfg))
	assert.ErrorContains(t, caddy.Validate(&cfg), `unknown consumer "nobody"`)
}

// doctorsPage is the one whose JSON is what the command doctor prints.
const doctorsPage = "docs/doctor.md:"

func TestTheReportThatIsShownIsOne(t *testing.T) {
	found := false
	for _, b := range blocks(t) {
		if b.kind != "json" || !strings.HasPrefix(b.page, doctorsPage) {
			continue
		}
		found = true
		decoder := json.NewDecoder(strings.NewReader(b.text))
		decoder.DisallowUnknownFields()
		var report doctor.Report
		require.NoError(t, decoder.Decode(&report), b.page)
		count := map[doctor.Severity]int{}
		for _, f := range report.Findings {
			count[f.Severity]++
		}
		assert.NotZero(t, report.Errors+report.Warnings)
		assert.Equal(t, report.Errors, count[doctor.Error])
		assert.Equal(t, report.Warnings, count[doctor.Warning])
	}
	assert.True(t, found)
}

func TestTheDecisionThatIsShownIsOne(t *testing.T) {
	found := false
	for _, b := range blocks(t) {
		if b.kind != "json decision" {
			continue
		}
		found = true
		decoder := json.NewDecoder(bytes.NewReader([]byte(b.text)))
		decoder.DisallowUnknownFields()
		assert.NoError(t, decoder.Decode(new(scheduler.Decision)), b.page)
	}
	assert.True(t, found)
}

func TestTheErrorThatIsShownHasAllFieldsOfOneAndNoOther(t *testing.T) {
	wanted := map[string]bool{}
	for _, name := range []string{"errorDocument", "errorBody", "errorDetail", "errorHolder"} {
		for _, field := range taggedFields(t, root+"/errors.go", name) {
			wanted[field] = true
		}
	}
	found := false
	for _, b := range blocks(t) {
		if b.kind != "json error" {
			continue
		}
		found = true
		var document any
		require.NoError(t, json.Unmarshal([]byte(b.text), &document), b.page)
		shown := map[string]bool{}
		gatherKeys(document, shown)
		delete(shown, "0") // a GPU's index
		assert.Equal(t, wanted, shown, b.page)
	}
	assert.True(t, found)
}

func gatherKeys(v any, into map[string]bool) {
	switch v := v.(type) {
	case map[string]any:
		for key, inner := range v {
			into[key] = true
			gatherKeys(inner, into)
		}
	case []any:
		for _, inner := range v {
			gatherKeys(inner, into)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

func TestEveryLinkLeadsSomewhere(t *testing.T) {
	all := pagesAt(t, "*.md", "docs/*.md", "docs/design/*.md", "docs/design/decisions/*.md")
	for page, text := range all {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(m[1], "#")
			target := page
			if path != "" {
				target = filepath.ToSlash(filepath.Join(filepath.Dir(page), path))
				assert.FileExists(t, filepath.Join(root, target), "linked from %s", page)
			}
			if anchor != "" {
				assert.Contains(t, anchors(all[target]), anchor, "%s links to %s", page, m[1])
			}
		}
	}
}

var (
	heading   = regexp.MustCompile(`(?m)^#+ (.+)$`)
	forAnchor = regexp.MustCompile(`[^a-z0-9 _-]`)
)

// anchors are the names that GitHub gives a page's headings.
func anchors(page string) (names []string) {
	page = fence.ReplaceAllString(page, "")
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		plain := forAnchor.ReplaceAllString(strings.ToLower(m[1]), "")
		names = append(names, strings.ReplaceAll(plain, " ", "-"))
	}
	return names
}
