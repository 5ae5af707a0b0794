package doctor

import (
	"fmt"
	"os"
	"regexp"
)

// variable is a placeholder for a variable of the environment, read by Caddy or put in by its Caddyfile; those with a default are none.
var variable = regexp.MustCompile(`\{(?:\$|env\.)([A-Za-z_][A-Za-z0-9_]*)\}`)

// remark is the comment of a line.
var remark = regexp.MustCompile(`(^|\s)#.*`)

// judgePlaceholders says which placeholders have no value. Where the broker itself needs one that is a
// fault, told by the configuration; elsewhere Caddy takes nothing for it and says nothing.
func judgePlaceholders(f *facts) (out []Finding) {
	seen := map[string]bool{}
	for _, fault := range f.site.Faults {
		for _, m := range variable.FindAllString(fault.Error(), -1) {
			seen[m] = true
		}
	}
	for i, text := range f.lines.read(f.site.File) {
		for _, m := range variable.FindAllStringSubmatch(remark.ReplaceAllString(text, ""), -1) {
			if _, set := os.LookupEnv(m[1]); set || seen[m[0]] {
				continue
			}
			seen[m[0]] = true
			out = append(out, Finding{Severity: Warning, Check: "config", Where: fmt.Sprintf("%s:%d", f.site.File, i+1),
				What: m[0] + " has no value here: nothing takes its place",
				Mend: "set " + m[1] + " where Caddy runs (for a service: Environment= of its unit), or write the value itself; {$" + m[1] + ":VALUE} has a default"})
		}
	}
	return out
}
