package routing

import (
	"bytes"
	"fmt"
	"mime"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// parts writes a multipart body. A part whose name ends in a ! is a file.
func parts(t testing.TB, pairs ...string) (body, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i < len(pairs); i += 2 {
		name, isFile := strings.CutSuffix(pairs[i], "!")
		if !isFile {
			require.NoError(t, w.WriteField(name, pairs[i+1]))
			continue
		}
		part, err := w.CreateFormFile(name, "speech.wav")
		require.NoError(t, err)
		_, err = part.Write([]byte(pairs[i+1]))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return b.String(), w.FormDataContentType()
}

func TestModelIsFoundInMultipartWhereverItStands(t *testing.T) {
	file := string(random(25 << 20))
	for name, pairs := range map[string][]string{
		"first":                           {"model", "whisper", "file!", file},
		"after 25 MiB":                    {"file!", file, "language", "en", "model", "whisper"},
		"alone":                           {"model", "whisper"},
		"twice alike":                     {"model", "whisper", "file!", file, "model", "whisper"},
		"a file of that name is no field": {"model!", "other", "model", "whisper"},
	} {
		t.Run(name, func(t *testing.T) {
			body, kind := parts(t, pairs...)
			facts, rest, err := peekAt(t, plan(t, []string{"model"}, nil, false), kind, body)
			require.NoError(t, err)
			require.Equal(t, []string{"whisper"}, facts.Names)
			require.True(t, body == rest, "the body has changed")
		})
	}
}

func TestMetadataStaysInMultipart(t *testing.T) {
	body, kind := parts(t, "x_priority", "1", "model", "whisper")
	facts, rest, err := peekAt(t, plan(t, []string{"model"}, nil, true), kind, body)
	require.NoError(t, err)
	require.False(t, facts.HasPriority)
	require.Equal(t, body, rest)
}

func TestMultipartWithoutTheFieldSaysNothing(t *testing.T) {
	body, kind := parts(t, "file!", "model", "other", "model")
	facts, _, err := peekAt(t, plan(t, []string{"model"}, nil, false), kind, body)
	require.NoError(t, err)
	require.Equal(t, []string{""}, facts.Names)

	_, params, err := mime.ParseMediaType(kind)
	require.NoError(t, err)
	last := "--" + params["boundary"] + "--\r\n"
	for _, body := range []string{last, last + "Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n" + last} {
		facts, _, err := peekAt(t, plan(t, []string{"model"}, nil, false), kind, body)
		require.NoError(t, err, body)
		require.Equal(t, []string{""}, facts.Names, "what follows the last delimiter is no part")
	}
}

func TestMalformedMultipartIsAnError(t *testing.T) {
	whole, kind := parts(t, "file!", "sound", "model", "whisper")
	p := plan(t, []string{"model"}, nil, false)
	for name, c := range map[string]struct{ kind, body, want string }{
		"no boundary":     {"multipart/form-data", whole, "without a boundary"},
		"two boundaries":  {kind + "; boundary=other", whole, "without a boundary"},
		"bare boundary":   {"Multipart/Form-Data; boundary=--=_Part/1", whole, "must stand in quotes"},
		"no form-data":    {kind, strings.Replace(whole, `form-data; name="model"`, `attachment; name="model"`, 1), `Content-Disposition "attachment"`},
		"ends in a file":  {kind, whole[:strings.Index(whole, "sound")+2], "it ends too soon"},
		"ends in a field": {kind, whole[:strings.Index(whole, "whisper")+2], "it ends too soon"},
		"other boundary":  {"multipart/form-data; boundary=other", whole, "no valid multipart/form-data"},
		"name too long":   {kind, strings.Replace(whole, "whisper", strings.Repeat("a", 513), 1), `field "model" is longer than 512 bytes`},
		"header too long": {kind, strings.Replace(whole, "Content-Type:", "Content-Type: "+strings.Repeat("a", maxPartHeader), 1), "a header of more than 65536 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := peekAt(t, p, c.kind, c.body)
			var fault *BadBody
			require.ErrorAs(t, err, &fault)
			require.ErrorContains(t, err, c.want)
		})
	}
	body, kind := parts(t, "model", strings.Repeat("a", 512))
	facts, _, err := peekAt(t, p, kind, body)
	require.NoError(t, err)
	require.Len(t, facts.Names[0], 512)
}

func TestModelIsFoundInAForm(t *testing.T) {
	const kind = "application/x-www-form-urlencoded"
	p := plan(t, []string{"model", "model_id"}, nil, false)
	for body, want := range map[string]string{
		"model=qwen":                "qwen",
		"a=b&model=qwen&model=qwen": "qwen",
		"m%6Fdel=qwen2.5%3A7b+q4":   "qwen2.5:7b q4",
		"&&model=qwen=1&":           "qwen=1",
		"xmodel=other&models=other": "",
		"model":                     "",
		"%zz=1&model=qwen":          "qwen",
		"a=" + strings.Repeat("b", 2*memoryBody) + "&model=qwen": "qwen",
		strings.Repeat("b", 2*memoryBody) + "&model=qwen":        "qwen",
	} {
		facts, rest, err := peekAt(t, p, kind, body)
		require.NoError(t, err, "%.40s", body)
		require.Equal(t, want, facts.Names[0], "%.40s", body)
		require.True(t, body == rest)
	}
	facts, _, err := peekAt(t, p, kind, "model_id=b&x=1&model=a")
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, facts.Names)
	facts, _, err = peekAt(t, p, kind+"; charset=utf-8; charset=latin1", "model=a")
	require.NoError(t, err)
	require.Equal(t, "a", facts.Names[0], "malformed parameters")
	for _, body := range []string{"model=" + strings.Repeat("a", 513), "model=" + strings.Repeat("a", 9999), "model=%zz"} {
		_, _, err := peekAt(t, p, kind, body)
		var fault *BadBody
		require.ErrorAs(t, err, &fault, fmt.Sprintf("%.40s", body))
		require.ErrorContains(t, err, `field "model"`)
	}
}
