package routing

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Strings are passed over eight bytes at a time where a piece of a body has as many, and byte by byte at its end: what counts as
// valid, and which model is named, must not depend on where pieces end, nor on where in a string a byte stands.
func TestEveryByteIsReadAlikeWhereverItStandsInAString(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	check := func(text string, sizes ...int) {
		t.Helper()
		var doc map[string]json.RawMessage
		valid := json.Unmarshal([]byte(text), &doc) == nil
		for _, size := range sizes {
			y := &Body{memory: []byte(text), size: int64(len(text))}
			y.seen.as = asJSON
			facts := Facts{Names: make([]string, 1)}
			err := y.peekJSON(inPieces([]byte(text), size), p, &facts)
			if !valid {
				require.Error(t, err, "%q in pieces of %d", text, size)
				continue
			}
			if name := textOf(doc["model"]); len(name) > MaxName {
				require.Error(t, err, "%q in pieces of %d", text, size)
			} else {
				require.NoError(t, err, "%q in pieces of %d", text, size)
				require.Equal(t, name, facts.Names[0], "%q in pieces of %d", text, size)
			}
		}
	}
	for c := range 256 {
		for at := range 24 {
			for _, special := range []string{string([]byte{byte(c)}), "\\" + string([]byte{byte(c)}), "\\u00" + fmt.Sprintf("%02x", c)} {
				s := strings.Repeat("a", at) + special + strings.Repeat("b", 23-at)
				check(`{"model":"`+s+`"}`, 1, 9, 1000)
				check(`{"`+s+`":1,"model":"m"}`, 8, 1000)
			}
		}
	}
	for n := range 300 {
		check(`{"model":"`+strings.Repeat("n", n)+`"}`, 1, 3, 8, 1000)
		check(`{"a":"`+strings.Repeat("n", n)+`","mo\u0064el":"é\ud83d\ude00"}`, 1, 3, 8, 1000)
		check(`{"a":"`+strings.Repeat("n", n)+`\"","model":"m`, 1, 8, 1000)
	}
}
