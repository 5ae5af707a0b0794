package routing

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"mime"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// jsonSeeds are documents of every kind that the reader tells apart.
var jsonSeeds = []string{
	`{"model":"qwen","messages":[{"role":"user","content":"hi"}],"stream":true}`,
	`{"x_priority":1,"a":1.50,"x_client_id":"me","model":"m","x_cooldown":"3"}`,
	`{ "x_mine" : {"a":[1,{}]} , "x_keep_alive" : 1e3 }`,
	"\uFEFF{\"mod\\u0065l\":\"\\ud83d\\ude00\",\n\"x_stay_warm\":null}",
	`{"model":"a","model":"b","x_priority":1,"x_priority":2.5}`,
	`{"a":{"model":"b","x_priority":1},"model":null}`,
	`{"x_priority":1,"x_mine":2}`, `{"a":1,"x_priority":1,"x_mine":2}`, `{"x_mine":"","b":-0.0e-1,"x_mine":[]}`,
	`[{"model":"a"}]`, `"a"`, ` `, ``, `{}`, `nul`, `{"a":"\u12"}`, `{"a":1,}`, `{"model":5}`, "{\"\xff\":\"\xfe\",\"model\":\"\xff\"}",
	strings.Repeat("[", 1025), `{"a":` + strings.Repeat(`{"a":`, 1023), `{"x_client_id":"` + strings.Repeat("é", 65) + `"}`,
	"{" + strings.Repeat(`"x_mine":1,"a":1,`, 65) + `"b":2}`, `{"model":"` + strings.Repeat("a", 513) + `"}`,
}

// FuzzJSON holds the reader against encoding/json: what is valid, what the
// model is, and what document is left; and the bytes that are left against those that came. The input comes in pieces of any size.
func FuzzJSON(f *testing.F) {
	for i, s := range jsonSeeds {
		f.Add([]byte(s), uint16(i%5))
	}
	p := plan(f, []string{"model"}, []string{"x_mine"}, true)
	require.NoError(f, p.Mark([]string{"a", "b", "c", "d"}))
	f.Fuzz(func(t *testing.T, data []byte, size uint16) {
		y := &Body{memory: data, size: int64(len(data))}
		y.seen.as = asJSON
		facts := Facts{Names: make([]string, 1)}
		err := y.peekJSON(inPieces(data, int(size)+1), p, &facts)

		text := bytes.TrimPrefix(data, []byte("\uFEFF"))
		if !json.Valid(text) {
			require.Error(t, err)
			return
		}
		doc, isObject := decode(text)
		if err != nil {
			var fault *BadBody
			require.ErrorAs(t, err, &fault)
			require.True(t, excuse(text, doc) || bytes.Count(text, []byte{':'}) > 1 && strings.Contains(err.Error(), "twice with different values"), "a valid document is refused: %v", err)
			return
		}
		if !isObject {
			require.Zero(t, y.seen.inside)
			return
		}
		require.Equal(t, textOf(doc["model"]), facts.Names[0])
		y.Change(p, "", nil)
		rest, readErr := io.ReadAll(y.reader())
		require.NoError(t, readErr)
		require.Equal(t, textOf(doc["x_client_id"]), facts.Client)
		for name := range doc {
			if p.names[name]&takeOut != 0 {
				delete(doc, name)
			}
		}
		require.True(t, json.Valid(bytes.TrimPrefix(rest, []byte("\uFEFF"))), "what is left is no JSON: %q", rest)
		left, _ := decode(bytes.TrimPrefix(rest, []byte("\uFEFF")))
		require.Equal(t, doc, left)
		onlyMembersGo(t, p, data, y.edits)
		onlyFieldsChange(t, p, y, doc)
	})
}

// onlyFieldsChange holds a change of a body against the same change of the decoded document.
func onlyFieldsChange(t *testing.T, p *Plan, y *Body, doc map[string]json.RawMessage) {
	t.Helper()
	y.Change(p, "known", &Change{Set: []Field{{"a", "[1]"}}, Default: []Field{{"b", "2"}, {"c", "3"}}, Strip: []string{"d"}})
	rest, err := io.ReadAll(y.reader())
	require.NoError(t, err)
	if textOf(doc["model"]) != "" {
		doc["model"] = json.RawMessage(`"known"`)
	}
	doc["a"] = json.RawMessage("[1]")
	for name, value := range map[string]string{"b": "2", "c": "3"} {
		if was, ok := doc[name]; !ok || string(was) == "null" {
			doc[name] = json.RawMessage(value)
		}
	}
	delete(doc, "d")
	changed, ok := decode(bytes.TrimPrefix(rest, []byte("\uFEFF")))
	require.True(t, ok, "%q", rest)
	require.Equal(t, doc, changed, "%q", rest)
}

// onlyMembersGo checks each part that is cut out: members that are to go, with commas and blanks, and nothing else.
func onlyMembersGo(t *testing.T, p *Plan, data []byte, edits []edit) {
	t.Helper()
	last := int64(0)
	for _, c := range edits {
		require.True(t, last <= c.from && c.from < c.to && c.to <= int64(len(data)), "%v", edits)
		last = c.to
		part := strings.Trim(string(data[c.from:c.to]), " \t\r\n,")
		doc, ok := decode([]byte("{" + part + "}"))
		require.True(t, ok, "%q is cut out", part)
		require.NotEmpty(t, doc)
		for name := range doc {
			require.NotZero(t, p.names[name]&takeOut, "%q is cut out", part)
		}
	}
}

// decode decodes an object with encoding/json, its values as they stand.
func decode(text []byte) (doc map[string]json.RawMessage, ok bool) {
	if trimmed := bytes.TrimLeft(text, " \t\r\n"); len(trimmed) == 0 || trimmed[0] != '{' {
		return nil, false
	}
	return doc, json.Unmarshal(text, &doc) == nil
}

func textOf(raw json.RawMessage) (s string) {
	_ = json.Unmarshal(raw, &s) // null leaves it empty
	return s
}

// excuse reports whether a valid document may be refused: it is too deep, cut at too many places, or a field is not what it should be.
func excuse(text []byte, doc map[string]json.RawMessage) bool {
	depth, deepest := 0, 0
	decoder := json.NewDecoder(bytes.NewReader(text))
	for {
		token, err := decoder.Token()
		if err != nil {
			break
		}
		switch token {
		case json.Delim('{'), json.Delim('['):
			depth++
			deepest = max(deepest, depth)
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
	if deepest > maxDepth || bytes.Count(text, []byte{','}) > maxPlaces {
		return true
	}
	for name, raw := range doc {
		var v any
		if json.Unmarshal(raw, &v) != nil { // such as 1e999
			return true
		}
		text, isText := v.(string)
		n, isNumber := v.(float64)
		if isText && !strings.HasPrefix(strings.TrimSpace(text), "+") {
			if n2, err := strconv.ParseFloat(strings.TrimSpace(text), 64); err == nil && json.Valid([]byte(strings.TrimSpace(text))) {
				n, isNumber = n2, true
			}
		}
		isNumber = isNumber && len(raw) <= maxCapture
		switch {
		case v == nil:
		case name == "model" && (!isText || len(text) > MaxName || len(raw) > maxCapture),
			name == fieldClient && (!isText || len(text) > MaxClient || len(raw) > maxCapture),
			name == fieldPriority && (!isNumber || n != math.Trunc(n)),
			(name == fieldKeepAlive || name == fieldStayWarm || name == fieldCooldown) && (!isNumber || n < 0):
			return true
		}
	}
	return false
}

// inPieces hands data out in pieces of a size, each in the same memory as the one before.
func inPieces(data []byte, size int) func() ([]byte, error) {
	piece := make([]byte, size)
	return func() ([]byte, error) {
		if len(data) == 0 {
			return nil, io.EOF
		}
		n := copy(piece, data)
		data = data[n:]
		return piece[:n], nil
	}
}

// FuzzMultipart holds the reader against a second walk over the parts: mime/multipart with each part in memory.
func FuzzMultipart(f *testing.F) {
	body, kind := parts(f, "file!", "sound", "model", "whisper")
	_, boundary, _ := strings.Cut(kind, "boundary=")
	f.Add([]byte(body), boundary)
	body, kind = parts(f, "model", "", "model", "a", "model", "b")
	_, boundary, _ = strings.Cut(kind, "boundary=")
	f.Add([]byte(body), boundary)
	f.Add([]byte("--a\r\nContent-Disposition: form-data; name=model\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n=61=0\r\n--a--"), "a")
	f.Add([]byte("--a\r\n\r\n--a\r\n"), "a")
	f.Add([]byte("--a\nContent-Disposition: form-data; name=\"model\"\n\nx\n--a--\n"), "a")
	p := plan(f, []string{"model"}, nil, true)
	f.Fuzz(func(t *testing.T, data []byte, boundary string) {
		kind := mime.FormatMediaType("multipart/form-data", map[string]string{"boundary": boundary})
		if _, params, err := mime.ParseMediaType(kind); err != nil || params["boundary"] != boundary || boundary == "" || len(data) == 0 {
			return
		}
		y := &Body{memory: data, size: int64(len(data))}
		facts, err := y.Peek(t.Context(), http.Header{"Content-Type": {kind}}, p)
		require.Empty(t, y.edits)
		want, wantErr := modelOfParts(data, boundary)
		if wantErr != nil {
			var fault *BadBody
			require.ErrorAs(t, err, &fault)
			return
		}
		if err != nil {
			require.Regexp(t, "twice with different|ends too soon|bare line feed|followed by something else|more than 6|Content-Disposition|is encoded|its boundary has", err.Error())
			return
		}
		require.Equal(t, want, facts.Names[0])
	})
}

func modelOfParts(data []byte, boundary string) (found string, _ error) {
	r := multipart.NewReader(bytes.NewReader(data), boundary)
	for {
		part, err := r.NextPart()
		if err == io.EOF {
			return found, nil
		}
		if err != nil {
			return "", err
		}
		text, err := io.ReadAll(part)
		isModel := part.FormName() == "model" && part.FileName() == ""
		switch {
		case isModel && len(text) > MaxName:
			return "", errors.New("too long")
		case err != nil:
			return "", err
		case isModel && found == "":
			found = string(text)
		}
	}
}

// FuzzForm holds the reader against net/url.
func FuzzForm(f *testing.F) {
	for _, s := range []string{"model=a", "a=b&model=q%3A7b+x&model=c", "m%6fdel=%zz", "&=&model=&model=b", "model", strings.Repeat("m", 2000) + "=1"} {
		f.Add([]byte(s), uint16(3))
	}
	f.Fuzz(func(t *testing.T, data []byte, size uint16) {
		names := make([]string, 1)
		y := &Body{memory: data, size: int64(len(data))}
		y.seen.as = asForm
		err := y.readForm(inPieces(data, int(size)+1), []string{"model"}, names)
		want, found := "", false
		for pair := range strings.SplitSeq(string(data), "&") {
			key, value, _ := strings.Cut(pair, "=")
			if strings.Contains(pair, ";") && strings.Contains(pair, "m") {
				return // it may be refused
			}
			if name, keyErr := url.QueryUnescape(key); keyErr != nil || name != "model" {
				continue
			}
			text, valueErr := url.QueryUnescape(value)
			if valueErr != nil || len(text) > MaxName {
				require.Error(t, err)
				return
			}
			if found && want != text {
				require.ErrorContains(t, err, "twice")
				return
			}
			want, found = text, true
		}
		if len(y.seen.places) == maxPlaces {
			return
		}
		require.NoError(t, err)
		require.Equal(t, want, names[0])
		y.Change(nil, "a b", nil)
		rest, err := io.ReadAll(y.reader())
		require.NoError(t, err)
		changed, _ := url.ParseQuery(strings.ReplaceAll(string(rest), ";", ""))
		if want != "" {
			require.Equal(t, "a b", changed.Get("model"), "%q", rest)
		}
	})
}

// FuzzPeek gives any body under any Content-Type: nothing panics, nothing but JSON changes, and what is served is as long as is said.
func FuzzPeek(f *testing.F) {
	for _, s := range jsonSeeds {
		f.Add([]byte(s), jsonType)
	}
	f.Add([]byte(`{"x_priority":1}`), "")
	f.Add([]byte("model=a"), "application/x-www-form-urlencoded")
	f.Add([]byte("--a"), "multipart/form-data; boundary=a")
	f.Add([]byte("--a\r\n\r\nb\r\n--a\r\nContent-Disposition: form-data; name=model\r\n\r\nqwen\r\n--a--\r\n"), "multipart/form-data; boundary=a")
	p := plan(f, []string{"model", "file"}, nil, true)
	f.Fuzz(func(t *testing.T, data []byte, contentType string) {
		r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(data))
		r.Header.Set("Content-Type", contentType)
		y, err := NewBuffers(t.TempDir()).Read(r, Limits{Body: total, Total: total})
		require.NoError(t, err)
		defer y.Close()
		if _, err := y.Peek(r.Context(), r.Header, p); err != nil {
			var fault *BadBody
			require.ErrorAs(t, err, &fault)
			return
		}
		y.Rewind(r)
		rest, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.EqualValues(t, len(rest), r.ContentLength)
		if len(y.edits) == 0 {
			require.True(t, bytes.Equal(data, rest))
		}
		onlyMembersGo(t, p, data, y.edits)
	})
}
