package routing

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	"github.com/stretchr/testify/require"
)

// post reads a body ahead, as a request of this Content-Type brings it.
func post(t testing.TB, contentType string, body []byte) (*http.Request, *Body) {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body))
	r.Header.Set("Content-Type", contentType)
	r.Header.Set("Content-Length", fmt.Sprint(len(body)))
	y, err := NewBuffers(t.TempDir()).Read(r, Limits{Body: total, Total: total})
	require.NoError(t, err)
	t.Cleanup(y.Close)
	return r, y
}

func plan(t testing.TB, fields, metadata []string, trust bool) *Plan {
	t.Helper()
	p, err := NewPlan(fields, metadata, trust)
	require.NoError(t, err)
	return p
}

// peekAt is Peek, and the body that the server would get.
func peekAt(t testing.TB, p *Plan, contentType, body string) (Facts, string, error) {
	t.Helper()
	r, y := post(t, contentType, []byte(body))
	facts, err := y.Peek(r.Context(), r.Header, p)
	if err != nil {
		return facts, "", err
	}
	y.Rewind(r)
	rest, readErr := io.ReadAll(r.Body)
	require.NoError(t, readErr)
	require.EqualValues(t, len(rest), r.ContentLength)
	require.Equal(t, fmt.Sprint(len(rest)), r.Header.Get("Content-Length"))
	again, readErr := r.GetBody()
	require.NoError(t, readErr)
	second, readErr := io.ReadAll(again)
	require.NoError(t, readErr)
	require.Equal(t, string(rest), string(second))
	return facts, string(rest), nil
}

func TestModelIsFoundInJSONWhereverItStands(t *testing.T) {
	large := strings.Repeat("base64+/", 3*memoryBody/8)
	for name, body := range map[string]string{
		"alone":                        `{"model":"qwen"}`,
		"first":                        `{"model":"qwen","messages":[{"role":"user","content":"model"}],"n":1}`,
		"last":                         `{"messages":[{"model":"other"}],"n":-1.5e+3,"stream":true , "model" : "qwen" }`,
		"after 3 MiB":                  `{"image":"` + large + `","model":"qwen"}`,
		"before 3 MiB":                 `{"model":"qwen","image":"` + large + `"}`,
		"twice alike":                  `{"model":"qwen","a":1,"mod\u0065l":"q\u0077en"}`,
		"escaped key":                  `{"mod\u0065l":"qwen"}`,
		"every character escaped":      `{"\u006d\u006f\u0064\u0065\u006C":"\u0071\u0077\u0065\u006e"}`,
		"nested ones are not meant":    `{"options":{"model":"a"},"list":[{"model":"b"}],"model":"qwen","tail":{"model":"c"}}`,
		"in a key's value as text":     `{"a":"\",\"model\":\"b\"","model":"qwen"}`,
		"byte order mark":              "\uFEFF{\"model\":\"qwen\"}",
		"blanks everywhere":            " \r\n\t{ \"a\" : [ ] , \"model\"\n:\t\"qwen\" } \n",
		"empty containers":             `{"a":{},"b":[],"c":[[],{}],"model":"qwen"}`,
		"bytes that are no UTF-8":      "{\"a\":\"\xff\xfe\",\"model\":\"qwen\"}",
		"half of a surrogate pair":     `{"a":"\ud83d","model":"qwen"}`,
		"other keys with other letter": `{"Model":"a","model ":"b","model":"qwen","modelx":"c"}`,
	} {
		t.Run(name, func(t *testing.T) {
			facts, rest, err := peekAt(t, plan(t, []string{"model"}, nil, false), jsonType, body)
			require.NoError(t, err)
			require.Equal(t, []string{"qwen"}, facts.Names)
			require.True(t, body == rest, "the body has changed")
		})
	}
}

func TestModelMayStandAcrossTheEndOfWhatIsInMemory(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	tail := `","model":"qwen","x_client_id":"a","z":1}`
	for before := range len(tail) + 1 { // how much of the tail is in memory
		body := `{"a":"` + strings.Repeat("b", memoryBody-before-6) + tail
		r, y := post(t, jsonType, []byte(body))
		facts, err := y.Peek(r.Context(), r.Header, p)
		require.NoError(t, err)
		require.Equal(t, []string{"qwen"}, facts.Names)
		y.Rewind(r)
		rest, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.True(t, strings.Replace(body, `"x_client_id":"a",`, "", 1) == string(rest), "%d bytes of the tail are in memory", before)
		y.Close()
	}
}

func TestJSONIsReadWhateverItsContentTypeIsCalled(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	for _, kind := range []string{jsonType, "application/json; charset=utf-8", "Application/JSON", "application/json;", "application/vnd.api+json",
		"", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded" /* curl -d '{…}' */} {
		facts, _, err := peekAt(t, p, kind, ` {"model":"qwen"}`)
		require.NoError(t, err, kind)
		require.Equal(t, []string{"qwen"}, facts.Names, kind)
	}
	for _, kind := range []string{"audio/wav", "application/octet-stream", "multipart/mixed; boundary=a", "text/html", "text/json", "application/x-ndjson", "nonsense", "a/b; c=1; c=2"} {
		facts, rest, err := peekAt(t, p, kind, `{"model":"qwen","x_priority":1}`)
		require.NoError(t, err, kind)
		require.Equal(t, []string{"qwen"}, facts.Names, kind)
		require.Equal(t, `{"model":"qwen"}`, rest, kind)
		_, _, err = peekAt(t, p, kind, `{"model":"qwen","x_priority":1`)
		require.ErrorContains(t, err, "no valid JSON", kind)
		for _, body := range []string{"RIFF{\"model\":\"qwen\"}", "\x00\x00{}", "\xFF\xFE\x00{", "{RIFF", "{\x00\x01\x00", "\x00{\x12\x34"} {
			facts, rest, err = peekAt(t, p, kind, body)
			require.NoError(t, err, kind)
			require.Equal(t, []string{""}, facts.Names, kind)
			require.Equal(t, body, rest)
		}
	}
}

func TestEmptyBodiesSayNothing(t *testing.T) {
	facts, _, err := peekAt(t, plan(t, []string{"model"}, nil, false), jsonType, "")
	require.NoError(t, err)
	require.Equal(t, []string{""}, facts.Names)
}

func TestJSONWithoutANameSaysNothing(t *testing.T) {
	for _, body := range []string{`{}`, ` { } `, `[]`, `[{"model":"a"}]`, `"model"`, `null`, `12`, `{"model":null}`, `{"model":""}`, `{"other":"a"}`} {
		facts, rest, err := peekAt(t, plan(t, []string{"model"}, nil, false), jsonType, body)
		require.NoError(t, err, body)
		require.Equal(t, []string{""}, facts.Names, body)
		require.Equal(t, body, rest)
	}
}

func TestMalformedJSONIsAnErrorThatNamesThePlace(t *testing.T) {
	deep := strings.Repeat("[", maxDepth)
	for body, want := range map[string]string{
		`{"model":"a"`:             "it ends at byte 12, where a comma or a brace should be",
		`{"model":"a"}x`:           "at byte 13 is 'x', where its end should be",
		`{"model":"a"} {}`:         "at byte 14",
		`{"model":"a",}`:           "at byte 13 is '}', where a key in quotes should be",
		`{"model":"a" "b":1}`:      "at byte 13",
		`{model:"a"}`:              "at byte 1",
		`{'model':'a'}`:            "at byte 1",
		`{"model"}`:                "at byte 8",
		"{\"mo\x01del\":1}":        "at byte 4 is '\\x01', where no control character should be",
		`{"mod`:                    "it ends at byte 5, where a quote should be",
		`{"model":}`:               "at byte 9",
		`{"a":[1,2,],"model":"a"}`: "at byte 10",
		`{"a":[1 2]}`:              "at byte 8",
		`{"a":[}`:                  "at byte 6",
		`{"a":{]}`:                 "at byte 6",
		`{"a":[1}`:                 "at byte 7",
		`{"a":{"b":1]}`:            "at byte 11",
		`{"a":{"b"}}`:              "at byte 9",
		`{"a":{"b":1,}}`:           "at byte 12",
		`{"a":01}`:                 "at byte 6",
		`{"a":+1}`:                 "at byte 5",
		`{"a":1.}`:                 "at byte 7",
		`{"a":.5}`:                 "at byte 5",
		`{"a":1e}`:                 "at byte 7",
		`{"a":1e+}`:                "at byte 8",
		`{"a":-}`:                  "at byte 6",
		`{"a":NaN}`:                "at byte 5",
		`{"a":nul}`:                "at byte 8",
		`{"a":True}`:               "at byte 5",
		`{"a":"` + "\n" + `"}`:     "no control character",
		`{"a":"\x"}`:               "at byte 7",
		`{"a":"\u12G4"}`:           "a hexadecimal digit",
		`{"a":"\`:                  "it ends at byte 7",
		`{"a":"b`:                  "where a quote should be",
		`{`:                        "it ends at byte 1",
		` `:                        "it ends at byte 1",
		"\xEF\xBB":                 "it ends at byte 2",
		"\uFEFF\uFEFF{}":           "at byte 3",
		`{"a":1}` + "\x00":         "at byte 7",
		`{"a":` + deep + strings.Repeat("]", 1024): "nested deeper than 1024",
		`[` + deep: "nested deeper than 1024",
		`{"a":"` + strings.Repeat("b", 2*memoryBody): fmt.Sprintf("it ends at byte %d", 2*memoryBody+6),
	} {
		_, _, err := peekAt(t, plan(t, []string{"model"}, nil, false), jsonType, body)
		var fault *BadBody
		require.ErrorAs(t, err, &fault, "%.40s", body)
		require.ErrorContains(t, err, want, "%.40s", body)
		require.ErrorContains(t, err, "the request body can't be read: ")
	}
}

func TestModelThatIsNoNameIsAnErrorThatNamesTheField(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	for body, want := range map[string]string{
		`{"model":5}`:            `field "model" must be a string, it is a number`,
		`{"model":-5}`:           "a number",
		`{"model":true}`:         "a boolean",
		`{"model":["a"]}`:        "a list",
		`{"model":{"name":"a"}}`: "an object",
		`{"model":["` + strings.Repeat("a", 1<<20) + `"]}`:                                              "a list",
		`{"model":"` + strings.Repeat("a", 513) + `"}`:                                                  "longer than 512 bytes",
		`{"model":"` + strings.Repeat("a", 1<<20) + `"}`:                                                "longer than 512 bytes",
		`{"model":"` + strings.Repeat(`\u00e9`, 257) + `"}`:                                             "longer than 512 bytes",
		`{"a":"` + strings.Repeat("a", memoryBody-10) + `","model":"` + strings.Repeat("a", 513) + `"}`: "longer than 512 bytes",
	} {
		_, _, err := peekAt(t, p, jsonType, body)
		require.ErrorContains(t, err, want, "%.40s", body)
	}
	for _, longest := range []string{strings.Repeat("a", 512), strings.Repeat("é", 256), strings.Repeat(`\u0061`, 512)} {
		facts, _, err := peekAt(t, p, jsonType, `{"model":"`+longest+`"}`)
		require.NoError(t, err)
		require.Len(t, facts.Names[0], 512)
	}
}

func TestMetadataIsTakenOutAndEveryOtherByteStays(t *testing.T) {
	p := plan(t, []string{"model"}, []string{"x_mine", "größe"}, false)
	for _, c := range []struct{ body, want string }{
		{`{"x_priority":1}`, `{}`},
		{`{ "x_priority" : 1 }`, `{  }`},
		{`{"x_priority":1,"x_client_id":"a"}`, `{}`},
		{`{"x_priority":1,"model":"m"}`, `{"model":"m"}`},
		{`{"model":"m","x_priority":1}`, `{"model":"m"}`},
		{`{"a":1,"x_priority":1,"model":"m"}`, `{"a":1,"model":"m"}`},
		{`{"a":1,"x_priority":1,"x_cooldown":2,"x_mine":{"a":[1,{}]},"b":2}`, `{"a":1,"b":2}`},
		{`{"x_priority":1,"a":1,"x_cooldown":2,"b":2,"x_mine":3}`, `{"a":1,"b":2}`},
		{`{"x_priority":1,"x_cooldown":2,"b":2,"x_mine":3,"x_stay_warm":4}`, `{"b":2}`},
		{"{\n  \"a\": 1.0,\n  \"x_priority\": 1,\n  \"b\": \"\\u00e9\"\n}\n", "{\n  \"a\": 1.0,\n  \"b\": \"\\u00e9\"\n}\n"},
		{"{\n  \"x_priority\": 1,\n  \"b\": 2\n}\n", "{\n  \"b\": 2\n}\n"},
		{"{\n  \"a\": 1,\n  \"x_priority\": 1\n}\n", "{\n  \"a\": 1\n}\n"},
		{"{\r\n\t\"a\" : 1 , \"x_priority\" : 1 , \"b\" : 2 }", "{\r\n\t\"a\" : 1 , \"b\" : 2 }"},
		{`{"x_pr\u0069ority":1,"a":"x_priority"}`, `{"a":"x_priority"}`},
		{`{"gr\u00f6\u00dfe":1,"größe":2,"a":3}`, `{"a":3}`},
		{`{"x_priority":1,"x_priority":2,"a":1,"x_priority":3}`, `{"a":1}`},
		{`{"a":{"x_priority":1,"b":[{"x_mine":1}]},"x_mine":2}`, `{"a":{"x_priority":1,"b":[{"x_mine":1}]}}`},
		{`{"x_speed":1,"x_":2,"X_priority":3,"x_priority ":4}`, `{"x_speed":1,"x_":2,"X_priority":3,"x_priority ":4}`},
		{"\uFEFF{\"x_priority\":1,\"a\":1}", "\uFEFF{\"a\":1}"},
		{`[{"x_priority":1}]`, `[{"x_priority":1}]`},
		{`{"x_mine":"` + strings.Repeat("z", 3*memoryBody) + `","a":"` + strings.Repeat("y", memoryBody) + `","x_mine":1}`, `{"a":"` + strings.Repeat("y", memoryBody) + `"}`},
	} {
		_, rest, err := peekAt(t, p, jsonType, c.body)
		require.NoError(t, err, "%.80s", c.body)
		require.True(t, c.want == rest, "%.80s became %.80s", c.body, rest)
	}
	for _, kind := range []string{"text/html", "application/octet-stream"} {
		_, rest, err := peekAt(t, p, kind, ` x{"x_priority":1}`)
		require.NoError(t, err)
		require.Equal(t, ` x{"x_priority":1}`, rest)
	}
}

func TestMetadataAtTooManyPlacesIsAnError(t *testing.T) {
	body := func(n int) string { return "{" + strings.Repeat(`"x_priority":1,"a":2,`, n) + `"b":3}` }
	_, rest, err := peekAt(t, plan(t, nil, nil, false), jsonType, body(maxPlaces))
	require.NoError(t, err)
	require.Equal(t, "{"+strings.Repeat(`"a":2,`, maxPlaces)+`"b":3}`, rest)
	_, _, err = peekAt(t, plan(t, nil, nil, false), jsonType, body(maxPlaces+1))
	require.ErrorContains(t, err, "more than 64 places")
}

func TestMetadataIsTyped(t *testing.T) {
	trusted, plain := plan(t, nil, nil, true), plan(t, nil, nil, false)
	facts, _, err := peekAt(t, trusted, jsonType, `{"x_client_id":"J\u00f6","x_priority":7,"x_keep_alive":1.5,"x_stay_warm":"90","x_cooldown":" 2e1 "}`)
	require.NoError(t, err)
	require.Equal(t, Facts{Names: []string{}, Client: "Jö", Priority: 7, HasPriority: true,
		KeepAlive: 1500 * time.Millisecond, StayWarm: 90 * time.Second, Cooldown: 20 * time.Second}, facts)

	facts, rest, err := peekAt(t, plain, jsonType, `{"x_client_id":5,"x_priority":"soon","x_keep_alive":60,"x_stay_warm":-1,"x_cooldown":"86400"}`)
	require.NoError(t, err, "what is not trusted is not read either")
	require.Equal(t, Facts{Names: []string{}}, facts)
	require.Equal(t, `{}`, rest)

	facts, _, err = peekAt(t, trusted, jsonType, `{"x_client_id":null,"x_priority":null,"x_keep_alive":null,"x_stay_warm":null,"x_cooldown":null}`)
	require.NoError(t, err)
	require.Equal(t, Facts{Names: []string{}}, facts)

	for text, want := range map[string]int{"0": 0, "-5": -5, `"12"`: 12, "1e2": 100, "3.0": 3, "1e400": 1e9, "-1e400": -1e9, "4000000000": 1e9} {
		facts, _, err = peekAt(t, trusted, jsonType, `{"x_priority":`+text+`}`)
		require.NoError(t, err, text)
		require.True(t, facts.HasPriority)
		require.Equal(t, want, facts.Priority, text)
	}
	for text, want := range map[string]time.Duration{"0": 0, "86400": 24 * time.Hour, "86401": 24 * time.Hour, "1e400": MaxDuration, `"1e9"`: MaxDuration, "0.001": time.Millisecond} {
		facts, _, err = peekAt(t, trusted, jsonType, `{"x_stay_warm":`+text+`}`)
		require.NoError(t, err, text)
		require.Equal(t, want, facts.StayWarm, text)
	}
	for body, want := range map[string]string{
		`{"x_priority":1.5}`:                                        `field "x_priority" must be a whole number`,
		`{"x_priority":"soon"}`:                                     `field "x_priority" must be a number, it is a string that holds none`,
		`{"x_priority":""}`:                                         `field "x_priority" must be a number`,
		`{"x_priority":"0x10"}`:                                     `field "x_priority"`,
		`{"x_priority":"1_000"}`:                                    `field "x_priority"`,
		`{"x_priority":true}`:                                       `field "x_priority" must be a number, it is a boolean`,
		`{"x_client_id":5}`:                                         `field "x_client_id" must be a string, it is a number`,
		`{"x_client_id":["a"]}`:                                     `field "x_client_id" must be a string, it is a list`,
		`{"x_keep_alive":"5m"}`:                                     `field "x_keep_alive" must be a number`,
		`{"x_keep_alive":-1}`:                                       `field "x_keep_alive" must be a number of seconds, it is negative`,
		`{"x_stay_warm":{}}`:                                        `field "x_stay_warm" must be a number, it is an object`,
		`{"x_cooldown":"NaN"}`:                                      `field "x_cooldown"`,
		`{"x_cooldown":"Inf"}`:                                      `field "x_cooldown"`,
		`{"x_cooldown":1` + strings.Repeat("0", 5000) + `}`:         `field "x_cooldown" must be a number`,
		`{"x_client_id":"` + strings.Repeat("a", 129) + `"}`:        `field "x_client_id" is longer than 128 bytes`,
		`{"x_client_id":"` + strings.Repeat("a", memoryBody) + `"}`: `field "x_client_id" is longer than 128 bytes`,
	} {
		_, _, err := peekAt(t, trusted, jsonType, body)
		var fault *BadBody
		require.ErrorAs(t, err, &fault, "%.40s", body)
		require.ErrorContains(t, err, want, "%.40s", body)
	}
}

func TestSeveralFieldsMayNameTheModel(t *testing.T) {
	p := plan(t, []string{"model", "model_id", "x_priority"}, []string{"model_id"}, true)
	facts, rest, err := peekAt(t, p, jsonType, `{"model_id":"b","model":"a","x_priority":"c"}`)
	require.NoError(t, err)
	require.Equal(t, Facts{Names: []string{"a", "b", "c"}}, facts)
	require.Equal(t, `{"model":"a"}`, rest)
}

func TestPlanRefusesFieldsThatCantBeRead(t *testing.T) {
	for _, name := range []string{"", strings.Repeat("a", 513), "\xff"} {
		_, err := NewPlan([]string{name}, nil, false)
		require.Error(t, err)
		_, err = NewPlan(nil, []string{name}, false)
		require.Error(t, err)
	}
	_, err := NewPlan(nil, make([]string, 101), false)
	require.ErrorContains(t, err, "at most 100")
}

// K4: a server may take JSON in UTF-16, or refuse it; the default of a route must not get it.
func TestK4_JSONInUTF16IsAnErrorWhateverItsContentTypeIsCalled(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	for _, order := range []binary.AppendByteOrder{binary.LittleEndian, binary.BigEndian} {
		for _, mark := range []string{"", "\uFEFF", "\uFEFF \n", "\r\n", "\uFEFF" + strings.Repeat(" ", 200)} {
			var body []byte
			for _, unit := range utf16.Encode([]rune(mark + "{" + strings.TrimPrefix(mark, "\uFEFF") + `"model":"qwen"}`)) {
				body = order.AppendUint16(body, unit)
			}
			for _, kind := range []string{"", jsonType, "text/plain", "application/octet-stream"} {
				_, _, err := peekAt(t, p, kind, string(body))
				require.ErrorContains(t, err, "no valid JSON", "%q as %q", body, kind)
			}
		}
	}
}

// K4: Python reads JSON in UTF-32, too.
func TestK4_JSONInUTF32IsAnErrorWhateverItsContentTypeIsCalled(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	for _, order := range []binary.AppendByteOrder{binary.LittleEndian, binary.BigEndian} {
		for _, mark := range []string{"", "\uFEFF", "\uFEFF \n"} {
			var body []byte
			for _, c := range mark + `{ "model":"qwen"}` {
				body = order.AppendUint32(body, uint32(c))
			}
			for _, kind := range []string{"", jsonType, "application/octet-stream"} {
				_, _, err := peekAt(t, p, kind, string(body))
				require.ErrorContains(t, err, "no valid JSON", "%q as %q", body, kind)
			}
		}
	}
}

// K4: what lies in the file isn't looked at; a JSON object may begin there.
func TestK4_ABodyThatHidesItsBeginningBehindBlanksIsAnError(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	var wide []byte
	for _, unit := range utf16.Encode([]rune("\uFEFF" + strings.Repeat(" ", memoryBody) + `{"model":"qwen"}`)) {
		wide = binary.LittleEndian.AppendUint16(wide, unit)
	}
	for name, prefix := range map[string]string{
		"blanks":                       strings.Repeat(" \r\n\t", memoryBody/4),
		"a byte order mark, and then":  "\uFEFF" + strings.Repeat(" ", memoryBody),
		"blanks of C and Python alone": strings.Repeat("\v\f", memoryBody),
		"in UTF-16":                    string(wide),
	} {
		for _, kind := range []string{"", "text/plain", "application/octet-stream", formType, "nonsense", "multipart/form-data; boundary=x"} {
			_, _, err := peekAt(t, p, kind, prefix+`{"model":"qwen"}`)
			require.ErrorContains(t, err, "bytes of blanks", "%s as %q", name, kind)
		}
	}
	for _, kind := range []string{jsonType, "application/x+json; charset=UTF-8"} {
		facts, _, err := peekAt(t, p, kind, "\uFEFF"+strings.Repeat(" ", memoryBody)+`{"model":"qwen"}`)
		require.NoError(t, err)
		require.Equal(t, []string{"qwen"}, facts.Names)
	}
	silence := strings.Repeat("\x00", 2*memoryBody)
	for _, body := range []string{silence, strings.Repeat(" ", memoryBody/2), strings.Repeat(" ", memoryBody-1) + "RIFF" + silence} {
		facts, rest, err := peekAt(t, p, "application/octet-stream", body)
		require.NoError(t, err, "%.9q", body)
		require.Equal(t, []string{""}, facts.Names)
		require.True(t, body == rest, "the body has changed")
	}
}
