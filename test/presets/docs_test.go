package presets_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

var update = flag.Bool("update", false, "write what the documentation says of the presets anew")

// TestTheDocumentationSaysWhatThePresetsDo compares what stands between two marks of a page with what the presets
// say; `go test ./test/presets -run TestTheDocumentation -update` writes it.
func TestTheDocumentationSaysWhatThePresetsDo(t *testing.T) {
	for path, want := range map[string]string{"../../docs/servers.md": sections(t), "../../README.md": table(t)} {
		const begin, end = "<!-- presets: written by test/presets -->\n", "<!-- /presets -->\n"
		raw, err := os.ReadFile(path)
		require.NoError(t, err)
		before, rest, found := strings.Cut(string(raw), begin)
		require.True(t, found, "%s has no line %s", path, begin)
		got, after, found := strings.Cut(rest, end)
		require.True(t, found, "%s has no line %s", path, end)
		if *update {
			require.NoError(t, os.WriteFile(path, []byte(before+begin+want+end+after), 0o644))
			continue
		}
		require.Equal(t, want, got, "%s is out of date: go test ./test/presets -run TestTheDocumentation -update", path)
	}
}

// table is one row a server.
func table(t *testing.T) string {
	var b strings.Builder
	b.WriteString("\n| preset | server | what frees its memory | what that costs | what to set |\n| --- | --- | --- | --- | --- |\n")
	for _, name := range presets.Names() {
		a := preset(t, name).About
		fmt.Fprintf(&b, "| [`%s`](docs/servers.md#%s) | %s | %s | %s | %s |\n", name, name, a.Title, a.Frees, a.Costs, cell(strings.Join(a.Set, "; ")))
	}
	return b.String() + "\n"
}

// sections is one section a server.
func sections(t *testing.T) string {
	var b strings.Builder
	for _, name := range presets.Names() {
		p := preset(t, name)
		rows, err := p.Explain()
		require.NoError(t, err)
		fmt.Fprintf(&b, "\n### %s\n\n%s.\n\n```caddyfile global\n%s```\n\n| what | how |\n| --- | --- |\n", name, p.About.Title, p.Caddyfile())
		lists := ""
		for _, row := range rows {
			switch row.Label {
			case "set":
				lists += "\nWhat to set:\n\n" + bullets(row.Lines)
			case "to know":
				lists += "\nWhat to know:\n\n" + bullets(row.Lines)
			default:
				fmt.Fprintf(&b, "| %s | %s |\n", row.Label, cell(strings.Join(row.Lines, " ")))
			}
		}
		b.WriteString(lists)
	}
	return b.String() + "\n"
}

func bullets(lines []string) string { return "- " + strings.Join(lines, "\n- ") + "\n" }

func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }
