package routing

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// tell puts what the fields hold into facts.
func (m *members) tell(facts *Facts) (err error) {
	for i, name := range m.plan.fields {
		if facts.Names[i], err = m.values[i].string(name, MaxName); err != nil {
			return err
		}
	}
	otherCase := m.values[len(m.plan.fields)+len(ownFields):]
	for i, name := range m.plan.fields {
		if v := otherCase[i]; v.kind != 0 && !v.equals(m.values[i]) {
			facts.OtherCase = name
		}
	}
	if !m.plan.trust { // the others cost somebody else something, too
		return nil
	}
	ours := m.values[len(m.plan.fields):]
	for i, name := range ownFields {
		v := ours[i]
		if v.kind == 0 {
			continue
		}
		switch name {
		case fieldClient:
			facts.Client, err = v.string(name, MaxClient)
		case fieldPriority:
			facts.Priority, facts.HasPriority, err = v.integer(name)
		case fieldKeepAlive:
			facts.KeepAlive, err = v.seconds(name)
		case fieldStayWarm:
			facts.StayWarm, err = v.seconds(name)
		case fieldCooldown:
			facts.Cooldown, err = v.seconds(name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// equals reports whether two values are the same text, however it is escaped, or the same in every byte.
func (v value) equals(other value) bool {
	switch {
	case v.long || other.long || v.kind != other.kind:
		return false
	case v.text == other.text:
		return true
	case v.kind != '"':
		return false
	}
	a, errA := unquote(v.text)
	b, errB := unquote(other.text)
	return errA == nil && errB == nil && a == b
}

// string is the value as text, empty for null.
func (v value) string(field string, longest int) (string, error) {
	switch {
	case v.kind == 0, v.kind == 'n':
		return "", nil
	case v.kind != '"':
		return "", bad("field %q must be a string, it is %s", field, v.what())
	case v.long:
		return "", tooLong(field, longest)
	}
	text, err := unquote(v.text)
	if err != nil {
		return "", bad("field %q: %v", field, err)
	}
	if len(text) > longest {
		return "", tooLong(field, longest)
	}
	return text, nil
}

func tooLong(field string, longest int) error {
	return bad("field %q is longer than %d bytes", field, longest)
}

// number is the value as a number; said is false for null.
func (v value) number(field string) (n float64, said bool, _ error) {
	text := v.text
	switch {
	case v.kind == 'n':
		return 0, false, nil
	case v.long:
		return 0, false, bad("field %q must be a number, it is a text of more than %d bytes", field, maxCapture)
	case v.kind == '"':
		inner, err := unquote(text)
		if err != nil {
			return 0, false, bad("field %q: %v", field, err)
		}
		text = strings.TrimSpace(inner)
		if !isNumber(text) {
			return 0, false, bad("field %q must be a number, it is a string that holds none", field)
		}
	case v.kind != '-' && (v.kind < '0' || v.kind > '9'):
		return 0, false, bad("field %q must be a number, it is %s", field, v.what())
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil && !math.IsInf(n, 0) {
		return 0, false, bad("field %q must be a number", field)
	}
	return n, true, nil
}

// isNumber reports whether text is a number as JSON writes it, so not a word such as NaN, nor one in hexadecimal.
func isNumber(text string) bool {
	return text != "" && (text[0] == '-' || '0' <= text[0] && text[0] <= '9') && json.Valid([]byte(text))
}

// integer is the value as a whole number within ±1,000,000,000; what is beyond counts as that.
func (v value) integer(field string) (n int, said bool, _ error) {
	const most = 1e9
	f, said, err := v.number(field)
	if err != nil || !said {
		return 0, false, err
	}
	if f != math.Trunc(f) {
		return 0, false, bad("field %q must be a whole number", field)
	}
	return int(max(-most, min(most, f))), true, nil
}

// seconds is the value as a time of at most MaxDuration.
func (v value) seconds(field string) (time.Duration, error) {
	f, _, err := v.number(field)
	if err != nil {
		return 0, err
	}
	if f < 0 {
		return 0, bad("field %q must be a number of seconds, it is negative", field)
	}
	return time.Duration(min(f, MaxDuration.Seconds()) * float64(time.Second)), nil
}

// what says what a value is.
func (v value) what() string {
	switch v.kind {
	case '{':
		return "an object"
	case '[':
		return "a list"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}

// unquote decodes a JSON string. A text that stands for itself is not copied.
func unquote[T string | []byte](text T) (string, error) {
	if simple(text) {
		return string(text[1 : len(text)-1]), nil
	}
	var s string // on the heap, so only here
	err := json.Unmarshal([]byte(text), &s)
	return s, err
}

// simple reports whether a JSON string, with its quotes, stands for itself.
func simple[T string | []byte](text T) bool {
	if len(text) < 2 || text[0] != '"' || text[len(text)-1] != '"' {
		return false
	}
	for i := 1; i < len(text)-1; i++ {
		if c := text[i]; !plain[c] || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}
