package gpubroker

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

func presetsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "presets [<name>] [--json]",
		Short: "Lists the kinds of model servers that are known, or explains one",
		Long: `
Lists the presets: what each server is called, on which port it listens, and what
frees its GPU memory. With a name, or the path of a preset of your own, it says
how that server is probed, loaded and unloaded, what that costs, what is to be
set at the server, and what to write into the Caddyfile.`,
		Example: `  caddy gpu-broker presets
  caddy gpu-broker presets vllm
  caddy gpu-broker presets ./my-server.json`,
		Args:         cobra.MaximumNArgs(1),
		SilenceUsage: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			out := cmd.OutOrStdout()
			if len(args) == 1 {
				return explainPreset(out, args[0], asJSON)
			}
			return listPresets(out, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "Print JSON")
	return cmd
}

// presetEntry is a preset in JSON.
type presetEntry struct {
	Name  string        `json:"name"`
	About presets.About `json:"about"`
	// Only of one that is explained.
	Consumer  json.RawMessage `json:"consumer,omitempty"`
	Explained []presets.Row   `json:"explained,omitempty"`
	Caddyfile string          `json:"caddyfile,omitempty"`
}

func listPresets(out io.Writer, asJSON bool) error {
	var all []presetEntry
	for _, name := range presets.Names() {
		p, _, err := presets.Find(name)
		if err != nil {
			return fmt.Errorf("preset %s: %w", name, err)
		}
		all = append(all, presetEntry{Name: name, About: p.About})
	}
	if asJSON {
		return printJSON(out, all)
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	rows := []string{"NAME\tPORT\tNEEDS A PROCESS\tWHAT FREES ITS MEMORY"}
	for _, p := range all {
		needs := "no"
		if p.About.NeedsProcess {
			needs = "yes"
		}
		rows = append(rows, fmt.Sprintf("%s\t%d\t%s\t%s: %s", p.Name, p.About.Port, needs, p.About.Title, strings.ReplaceAll(p.About.Frees, "`", "")))
	}
	if _, err := fmt.Fprintln(t, strings.Join(rows, "\n")); err != nil {
		return err
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprint(out, "\nA server that needs a process is unloaded only by stopping it: the broker must start it (process, systemd or docker).\n"+
		"caddy gpu-broker presets NAME explains one.\n")
	return err
}

func explainPreset(out io.Writer, name string, asJSON bool) error {
	p, known, err := presets.Find(name)
	switch {
	case err != nil:
		return fmt.Errorf("preset %s: %w", name, err)
	case p == nil:
		return config.Unknown("preset", name, known)
	}
	rows, err := p.Explain()
	if err != nil {
		return fmt.Errorf("preset %s: %w", name, err)
	}
	if asJSON {
		return printJSON(out, presetEntry{Name: name, About: p.About, Consumer: p.Consumer, Explained: rows, Caddyfile: p.Caddyfile()})
	}
	var b strings.Builder
	title := p.About.Title
	if title == "" {
		title = "a preset of your own"
	}
	fmt.Fprintf(&b, "%s: %s\n\n", name, title)
	for _, row := range rows {
		label := row.Label
		for _, line := range row.Lines {
			if len(row.Lines) > 1 {
				line = "- " + line
			}
			for _, part := range wrapped(line) {
				fmt.Fprintf(&b, "%-19s %s\n", label, part)
				label = ""
			}
		}
	}
	fmt.Fprintf(&b, "\nTo write, with what it takes as vram:\n\n%s", p.Caddyfile())
	if p.About.NeedsProcess {
		b.WriteString("\nWithout process, systemd or docker it is never unloaded for others: those that need its memory are refused.\n")
	} else if p.About.Command != "" {
		fmt.Fprintf(&b, "\nThe broker can also start and stop it; then leave upstream out and write\n\n\tprocess %s\n", p.About.Command)
	}
	_, err = io.WriteString(out, b.String())
	return err
}

// pieces are what a line is not broken within: words, and what stands between backquotes.
var pieces = regexp.MustCompile("(?:[^ `]|`[^`]*`)+")

// wrapped breaks a line for people, who see no backquotes.
func wrapped(line string) (parts []string) {
	const most = 100
	part := ""
	for _, piece := range pieces.FindAllString(line, -1) {
		piece = strings.ReplaceAll(piece, "`", "")
		switch {
		case part == "":
			part = piece
		case len(part)+1+len(piece) > most:
			parts, part = append(parts, part), piece
		default:
			part += " " + piece
		}
	}
	return append(parts, part)
}

func printJSON(out io.Writer, v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
