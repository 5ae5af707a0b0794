package doctor

import (
	"cmp"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// lines finds places in configuration files. It keeps the files that it has read.
type lines map[string][]string

// of is the place of a word's line in the block that begins at source, which
// is `file:line`: the line in the block itself rather than one deeper in it; source if there is none.
func (l lines) of(source, word string) string {
	file, first, ok := splitSource(source)
	if !ok || word == "" {
		return source
	}
	depth, deeper := 0, source
	text := l.read(file)
	for i := first - 1; i < len(text); i++ {
		fields := strings.Fields(remark.ReplaceAllString(text[i], ""))
		if depth > 0 && len(fields) > 0 && fields[0] == word {
			here := file + ":" + strconv.Itoa(i+1)
			switch {
			case depth == 1:
				return here
			case deeper == source:
				deeper = here
			}
		}
		for _, token := range fields {
			switch token {
			case "{":
				depth++
			case "}":
				depth--
			}
		}
		if depth <= 0 {
			break
		}
	}
	return deeper
}

// matching is the place of the first line of a file, from a line on, that
// begins with one of the words; otherwise if there is none.
func (l lines) matching(file string, from int, otherwise string, words ...string) string {
	begins := regexp.MustCompile(`^\s*(` + strings.Join(words, "|") + `)\s`)
	text := l.read(file)
	for i := max(0, from-1); i < len(text); i++ {
		if begins.MatchString(text[i]) {
			return file + ":" + strconv.Itoa(i+1)
		}
	}
	return otherwise
}

// isWord tells what begins with a letter or a digit.
var isWord = regexp.MustCompile(`^\w`)

// find is the place of the line of a directive, a regular expression, with
// another word, both in words: the first one after a place, or, without such a place, the only one in a file. Empty: it can't be told.
func (l lines) find(file, after string, words []string) string {
	if len(words) != 2 {
		return ""
	}
	of, from, ok := splitSource(after)
	if ok {
		file = of
	}
	before := `(?:.*[\s"/])?`
	if !isWord.MatchString(words[1]) {
		before = `.*`
	}
	line := regexp.MustCompile(`^\s*` + words[0] + `\s` + before + regexp.QuoteMeta(words[1]) + `(?:[^\w.-]|$)`)
	found := ""
	for i, text := range l.read(file) {
		if i < from || !line.MatchString(remark.ReplaceAllString(text, "")) {
			continue
		}
		here := file + ":" + strconv.Itoa(i+1)
		if ok {
			return here
		}
		if found != "" {
			return ""
		}
		found = here
	}
	return found
}

func (l lines) read(file string) []string {
	text, ok := l[file]
	if !ok {
		doc, err := os.ReadFile(file)
		if err == nil {
			text = strings.Split(string(doc), "\n")
		}
		l[file] = text
	}
	return text
}

func splitSource(source string) (file string, line int, ok bool) {
	at := strings.LastIndexByte(source, ':')
	if at < 0 {
		return "", 0, false
	}
	line, err := strconv.Atoi(source[at+1:])
	return source[:at], line, err == nil && line > 0
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
