package supervised

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/caddyserver/caddy/v2"
)

// Expand replaces the placeholders in a field.
func Expand(module, field, value string) (string, error) {
	// Caddy's error names the placeholder, never its value.
	expanded, err := caddy.NewReplacer().ReplaceOrErr(value, true, true)
	if err != nil {
		return "", fmt.Errorf("lifecycle %s: %s: %w: set it, or correct its name", module, field, err)
	}
	return expanded, nil
}

// maxLine bounds what is shown of what somebody else says, in bytes.
const maxLine = 300

// Line is what somebody else says as one short line.
func Line(text string) string {
	text = strings.Join(strings.FieldsFunc(strings.ToValidUTF8(text, "?"), func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r)
	}), " ")
	if len(text) > maxLine {
		text = strings.ToValidUTF8(text[:maxLine], "") + "…"
	}
	return text
}
