package routing

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

const formType = "application/x-www-form-urlencoded"

func TestH4_AModelThatABodyNamesTwiceWithDifferentValuesIsAnError(t *testing.T) {
	p := plan(t, []string{"model", "task"}, nil, false)
	twoParts, kind := parts(t, "model", "a", "file!", "sound", "model", "b")
	empty, emptyKind := parts(t, "model", "", "model", "b")
	far, farKind := parts(t, "model", "a", "file!", string(random(3*memoryBody)), "model", "b")
	for name, c := range map[string]struct{ kind, body string }{
		"JSON, the last other":       {jsonType, `{"model":"a","model":"b"}`},
		"JSON, far apart":            {jsonType, `{"model":"a","x":"` + strings.Repeat("y", 2*memoryBody) + `","model":"b"}`},
		"JSON, escaped":              {jsonType, `{"model":"a","mod\u0065l":"b"}`},
		"JSON, null last":            {jsonType, `{"model":"a","model":null}`},
		"JSON, null first":           {jsonType, `{"model":null,"model":"a"}`},
		"JSON, another type":         {jsonType, `{"model":5,"model":"a"}`},
		"JSON, empty":                {jsonType, `{"model":"","model":"a"}`},
		"JSON, three times":          {jsonType, `{"model":"a","model":"a","model":"b"}`},
		"JSON, two lists":            {jsonType, `{"model":["a"],"model":["b"]}`},
		"JSON, a second field":       {jsonType, `{"model":"a","task":"b","task":"c"}`},
		"JSON that is called a form": {formType, `{"model":"a","model":"b"}`},
		"multipart":                  {kind, twoParts},
		"multipart, far apart":       {farKind, far},
		"multipart, empty":           {emptyKind, empty},
		"form":                       {formType, "model=a&x=1&model=b"},
		"form, escaped":              {formType, "model=a&%6dodel=b"},
		"form, empty":                {formType, "model=&model=b"},
		"form, a semicolon":          {formType, "model=a;model=b"},
		"form, inside another field": {formType, "x=1;model=b&model=a"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := peekAt(t, p, c.kind, c.body)
			var fault *BadBody
			require.ErrorAs(t, err, &fault)
			require.Regexp(t, `"(model|task)"`, err.Error())
		})
	}
}

func TestH4_AModelThatIsNamedTwiceAlikeIsServed(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	multipart, kind := parts(t, "model", "qwen", "model", "qwen")
	for body, kind := range map[string]string{
		`{"model":"qwen","model":"qwen"}`:                                 jsonType,
		`{"model":"q\u0077en","model" : "qwen"}`:                          jsonType,
		multipart:                                                         kind,
		"model=qwen&model=q%77en":                                         formType,
		"x=1;y=2&model=qwen":                                              formType,
		`{"messages":{"model":"b"},"model":"qwen"}`:                       jsonType,
		`{"model ":"b","Model":"b","model":"qwen"}`:                       jsonType, // of a server that does not fold case
		`{"x":[{"model":"b"}],"modell":"b","model":` + "\n\t" + `"qwen"}`: jsonType,
	} {
		facts, rest, err := peekAt(t, p, kind, body)
		require.NoError(t, err, body)
		require.Equal(t, []string{"qwen"}, facts.Names, body)
		require.Empty(t, facts.OtherCase)
		require.Equal(t, body, rest)
	}
}

func TestH4_AKeyInAnotherCaseIsToldWhereAServerFoldsCase(t *testing.T) {
	p := plan(t, []string{"model", "task"}, nil, false)
	p.Fold()
	for body, want := range map[string]string{
		`{"model":"a"}`:                         "",
		`{"Model":"a","model":"a"}`:             "", // whichever the server reads
		`{"MODEL":"\u0061","model":"a"}`:        "",
		`{"Model":"b","model":"a"}`:             "model",
		`{"model":"a","MODEL":"b"}`:             "model",
		`{"mODEL":"a"}`:                         "model",
		`{"M\u006fdel":"b","model":"a"}`:        "model",
		`{"model":"a","Model":null}`:            "model",
		`{"model":"a","taſk":"b"}`:              "task", // U+017F folds to s
		`{"model":"a","tas\u212a":"b"}`:         "task", // the Kelvin sign folds to k
		`{"x":{"Model":"b"},"model":"a"}`:       "",
		`{"mo\u0064el ":"b","model":"a"}`:       "",
		`{"model":"a","modèl":"b","m0del":"c"}`: "",
	} {
		facts, rest, err := peekAt(t, p, jsonType, body)
		require.NoError(t, err, body)
		require.Equal(t, want, facts.OtherCase, body)
		require.Equal(t, body, rest)
	}
	_, _, err := peekAt(t, p, jsonType, `{"Model":"a","MODEL":"b"}`)
	require.ErrorContains(t, err, "twice", "two that a server would read, and the broker would not")
}

func TestH4_QueriesAndHeadersThatNameTwoModelsAreErrors(t *testing.T) {
	s, err := NewSources([]config.ModelFrom{{Source: config.FromQuery}, {Source: config.FromHeader, Name: "X-Model"}, {Source: config.FromBody}})
	require.NoError(t, err)
	for target, want := range map[string]string{
		"/?model=a":                     "a",
		"/?model=a&x=1&model=a":         "a",
		"/?model=a&model=b":             "!",
		"/?model=a&mod%65l=b":           "!",
		"/?model=&model=b":              "!",
		"/?model=a;model=b":             "!",
		"/?x=1;model=b":                 "!",
		"/?model=a;x=1":                 "!",
		"/?model=%zz":                   "!",
		"/?x=%zz&model=a":               "a",
		"/?x=;&model=a":                 "a",
		"/?Model=b&model=a&models=c":    "a",
		"/?model=a%3Bb":                 "a;b",
		"/?model=q%C3%A9+1":             "qé 1",
		"/?" + strings.Repeat("&", 999): "",
	} {
		r := httptest.NewRequest("GET", target, nil)
		name, err := s.Find(r, nil)
		if want == "!" {
			var fault *BadBody
			require.ErrorAs(t, err, &fault, target)
			continue
		}
		require.NoError(t, err, target)
		require.Equal(t, want, name, target)
	}
	r := httptest.NewRequest("GET", "/", nil)
	r.Header["X-Model"] = []string{"a", "a"}
	name, err := s.Find(r, nil)
	require.NoError(t, err)
	require.Equal(t, "a", name)
	for _, second := range []string{"b", ""} {
		r.Header["X-Model"] = []string{"a", second}
		_, err = s.Find(r, nil)
		require.ErrorContains(t, err, `the header "X-Model"`)
	}
}

func TestH4_AFormAndAQueryMayNotNameTwoModels(t *testing.T) {
	s, err := NewSources([]config.ModelFrom{{Source: config.FromBody}})
	require.NoError(t, err)
	for target, ok := range map[string]bool{"/": true, "/?model=a": true, "/?models=b": true, "/?model=b": false, "/?model=a&model=b": false, "/?model": false} {
		_, err := s.Find(httptest.NewRequest("POST", target, nil), &Facts{Names: []string{"a"}, Form: true})
		require.Equal(t, ok, err == nil, target)
		_, err = s.Find(httptest.NewRequest("POST", target, nil), &Facts{Names: []string{"a"}})
		require.NoError(t, err, "no server looks into the query for a field of JSON")
	}
}

func TestPartsThatServersReadInDifferentWaysAreRefused(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	field := func(header, value string) string {
		return "--b\r\n" + header + "\r\n\r\n" + value + "\r\n--b--\r\n"
	}
	const name = `Content-Disposition: form-data; name="model"`
	for body, want := range map[string]string{
		field(name, "qwen"): "",
		field(name+"\r\nContent-Transfer-Encoding: 8bit", "qwen"):                        "",
		field(name+"\r\nContent-Transfer-Encoding: quoted-printable", "=61"):             "is encoded",
		field(name+"\r\nContent-Transfer-Encoding: BASE64", "cXdlbg=="):                  "is encoded",
		field(name+"\r\n"+strings.Replace(name, "model", "x", 1), "qwen"):                "2 headers",
		field(name+`; name="x"`, "qwen"):                                                 "can't be read",
		field(`Content-Disposition: form-data; name="x"; name="model"`, "q"):             "can't be read",
		field(name, "a\n--b\r\n"+name+"\r\n\r\nqwen"):                                    "bare line feed",
		field(name, "a\r\n--b x\r\n"+name+"\r\n\r\nqwen"):                                "followed by something else",
		field(name, "a\r\n--bc\r\nd"):                                                    "",
		"--b\n" + name + "\n\nqwen\n--b--\n":                                             "",
		"preamble\r\n" + field(name, "qwen") + "epilogue --b":                            "",
		strings.Replace(field(name, "qwen"), "--b--", "--b", 1):                          "ends too soon",
		"--b\r\nContent-Disposition\r\n\r\nqwen\r\n--b--":                                "no valid multipart",
		"--b\r\nContent-Disposition: form-data;\r\n name=\"model\"\r\n\r\nqwen\r\n--b--": "",
	} {
		facts, rest, err := peekAt(t, p, "multipart/form-data; boundary=b", body)
		if want != "" {
			require.ErrorContains(t, err, want, "%q", body)
			continue
		}
		require.NoError(t, err, "%q", body)
		require.NotEmpty(t, facts.Names[0], "%q", body)
		require.Equal(t, body, rest)
	}
	r, y := post(t, jsonType, []byte(`{"model":"a"}`))
	r.Header.Add("Content-Type", "multipart/form-data; boundary=b")
	_, err := y.Peek(r.Context(), r.Header, p)
	require.ErrorContains(t, err, "different headers Content-Type")
}

func TestBoundsOfAForm(t *testing.T) {
	p := plan(t, []string{"model", strings.Repeat("m", MaxName)}, nil, false)
	long := strings.Repeat("m", MaxName)
	for body, want := range map[string][]string{
		"model=" + strings.Repeat("%61", MaxName):                       {strings.Repeat("a", MaxName), ""},
		strings.Repeat("%6d", MaxName) + "=a":                           {"", "a"},
		long + "m=a":                                                    {"", ""},
		strings.Repeat("%6d", MaxName) + "m=a":                          {"", ""},
		strings.Repeat("x", maxEscaped+1) + "=a&model=b&" + long + "=c": {"b", "c"},
	} {
		facts, _, err := peekAt(t, p, formType, body)
		require.NoError(t, err, "%.40s", body)
		require.Equal(t, want, facts.Names, "%.40s", body)
	}
	for _, value := range []string{strings.Repeat("%61", MaxName) + "a", strings.Repeat("a", MaxName+1), strings.Repeat("%61", MaxName-1) + "aa", strings.Repeat("%61", MaxName) + "%"} {
		_, _, err := peekAt(t, p, formType, "model="+value)
		require.ErrorContains(t, err, fmt.Sprintf("longer than %d bytes", MaxName), "%d", len(value))
	}
}

// H4: in a charset that doesn't extend ASCII, what looks like another field may be the model's.
func TestH4_ACharsetInWhichASecondModelMayHideIsAnError(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	part := "--x\r\nContent-Disposition: form-data; name=\"model\"\r\n%s\r\nqwen\r\n--x--\r\n"
	bodies := map[string]string{
		jsonType: `{"model":"qwen"}`, "text/plain": `{"model":"qwen"}`, formType: "model=qwen",
		"multipart/form-data; boundary=x": fmt.Sprintf(part, ""),
	}
	refused := []string{"utf-7", "UTF-7", `"utf-7"`, "utf-16", "utf-16le", "utf-32", "UTF_16", "cp037", "ibm500", "ibm037",
		"iso-2022-jp", "ISO-2022-KR", "hz-gb-2312", "hz", "shift_jis", "cp932", "big5", "gbk", "gb18030", "johab", "unicode-escape",
		"nonsense", `"utf\-7"`, "utf-8; charset=utf-7", "utf-7; charset=utf-8", `"utf-8` + "`", "utf-8, utf-7"}
	for kind, body := range bodies {
		for _, charset := range refused {
			_, _, err := peekAt(t, p, kind+"; charset="+charset, body)
			require.ErrorContains(t, err, "send it in UTF-8", "%s %s", kind, charset)
		}
		for _, parameter := range []string{"charset*=utf-8''utf-7", "charset*0=utf; charset*1=-7", "CharSet = utf-7", "charset",
			"a=b; c; charset=utf-7", "charset=\"utf-7"} {
			_, _, err := peekAt(t, p, kind+"; "+parameter, body)
			require.ErrorContains(t, err, "send it in UTF-8", "%s %s", kind, parameter)
		}
		for _, charset := range []string{"utf-8", "UTF-8", `"utf-8"`, "utf8", "us-ascii", "ASCII", "iso-8859-1",
			"ISO-8859-15", "iso8859-2", "latin1", "windows-1252", "Windows-1251", "cp1252", `""`} {
			facts, rest, err := peekAt(t, p, kind+"; charset="+charset, body)
			require.NoError(t, err, "%s %s", kind, charset)
			require.Equal(t, []string{"qwen"}, facts.Names)
			require.Equal(t, body, rest)
		}
	}
	_, _, err := peekAt(t, p, jsonType+"; charset=", `{"model":"qwen"}`)
	require.NoError(t, err)
	_, _, err = peekAt(t, p, "text/plain; charset=utf-7", `+AHs-"model":"qwen"}`)
	require.ErrorContains(t, err, "send it in UTF-8")
	for _, charset := range []string{"gbk", "big5", "Shift_JIS", "koi8-r", "euc-kr", "'utf-8'"} {
		_, _, err = peekAt(t, p, "text/plain; charset="+charset, "words")
		require.NoError(t, err, "no name is in words, %s", charset)
	}
	_, _, err = peekAt(t, p, "audio/x-wav; charset=binary", "RIFF")
	require.NoError(t, err)
	_, _, err = peekAt(t, p, "text/plain; charset=utf-7", "words")
	require.ErrorContains(t, err, "send it in UTF-8", "they may be JSON there")
	_, _, err = peekAt(t, plan(t, nil, nil, false), "text/plain; charset=utf-16", "words")
	require.NoError(t, err, "no name is read there")

	for header, want := range map[string]string{
		"Content-Type: text/plain; charset=utf-7\r\n":                                  "send it in UTF-8",
		"Content-Type: text/plain\r\nContent-Type: text/plain; charset=\"UTF-16\"\r\n": "send it in UTF-8",
		"Content-Type: text/plain; charset=utf-8\r\n":                                  "",
		"Content-Type: text/plain\r\n":                                                 "",
	} {
		_, _, err := peekAt(t, p, "multipart/form-data; boundary=x", fmt.Sprintf(part, header))
		if want == "" {
			require.NoError(t, err, header)
			continue
		}
		require.ErrorContains(t, err, want, header)
	}
	text := "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"; filename*=utf-8''a.txt\r\n" +
		"Content-Type: text/plain; charset=utf-16\r\n\r\nwords\r\n" + fmt.Sprintf(part, "")
	facts, _, err := peekAt(t, p, "multipart/form-data; boundary=x", text)
	require.NoError(t, err)
	require.Equal(t, []string{"qwen"}, facts.Names, "a file may be in any charset")
}

// H4: some servers read a parameter with an asterisk and others don't, so the part is the model for some alone.
func TestH4_APartWhoseNameIsExtendedIsAnError(t *testing.T) {
	p := plan(t, []string{"model"}, nil, false)
	for _, parameters := range []string{`name*=utf-8''model`, `name*=utf-7''%2BAG0-odel`, `name="model"; name*=utf-8''other`,
		`name="other"; name*=utf-8''model`, `NAME*0="mod"; name*1="el"`, `name="model"; filename*=utf-8''a.wav`} {
		body := "--x\r\nContent-Disposition: form-data; " + parameters + "\r\n\r\nqwen\r\n--x--\r\n"
		_, _, err := peekAt(t, p, "multipart/form-data; boundary=x", body)
		require.ErrorContains(t, err, "asterisk", parameters)
	}
}

// H4: Go's decoder of JSON, and so ollama, stops where the object ends, whatever the Content-Type says.
func TestH4_AFormBehindAJSONObjectIsAnError(t *testing.T) {
	body, kind := parts(t, "model", "a")
	for _, object := range []string{`{"model":"b"}`, "\uFEFF" + `{"model":"b"}`, " {\n}"} {
		_, _, err := peekAt(t, plan(t, []string{"model"}, nil, false), kind, object+"\r\n"+body)
		require.ErrorContains(t, err, "begins as a JSON object", object)
	}
}
