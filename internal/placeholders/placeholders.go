// Package placeholders reads Caddy's placeholders for the lifecycles.
package placeholders

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"
)

// Values are what texts with placeholders came to when a configuration was read, by these texts.
type Values map[string]string

// Read replaces the placeholders in text, and keeps what it comes to. where names it in an error.
func (v Values) Read(where, text string) (string, error) {
	value, err := caddy.NewReplacer().ReplaceOrErr(text, true, true)
	if err != nil {
		// Caddy's error names the placeholder, never its value.
		return "", fmt.Errorf("%s: %w: set it, or correct its name", where, err)
	}
	v[text] = value
	return value, nil
}

// Fingerprint differs where the values do. It does not show them.
func (v Values) Fingerprint() string {
	h := sha256.New()
	for _, text := range slices.Sorted(maps.Keys(v)) {
		_, _ = fmt.Fprintf(h, "%q=%q\n", text, v[text])
	}
	return hex.EncodeToString(h.Sum(nil))
}
