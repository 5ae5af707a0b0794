package supervised

import (
	"os/user"
	"strings"
	"unicode"
)

// WhoAmI is the user that Caddy runs as, for people.
func WhoAmI() string {
	u, err := user.Current()
	if err != nil {
		return "Caddy's user"
	}
	return "user " + u.Username
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
