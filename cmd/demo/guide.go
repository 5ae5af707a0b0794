//go:build unix

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"text/template"
)

// guide is what the demo tells its user.
type guide struct {
	Site  string // the URL
	CA    string // the certificate for curl, quoted for a shell
	Sound string // a recording to send, quoted for a shell
	Model string
	Dir   string
}

// newGuide puts the files that the guide's lines use into dir.
func newGuide(dir string, v *visitor) (*guide, error) {
	root, err := os.ReadFile(v.root)
	if err != nil {
		return nil, fmt.Errorf("reading the certificate of Caddy's local authority: %w", err)
	}
	ca, sound := filepath.Join(dir, "root.crt"), filepath.Join(dir, "hello.wav")
	if err := os.WriteFile(ca, root, 0o644); err != nil {
		return nil, fmt.Errorf("copying the certificate: %w", err)
	}
	if err := os.WriteFile(sound, tone(), 0o644); err != nil {
		return nil, fmt.Errorf("making a recording: %w", err)
	}
	return &guide{Site: v.site, CA: quote(ca), Sound: quote(sound), Model: chatModel, Dir: dir}, nil
}

func (g *guide) print(out io.Writer) error { return text.Execute(out, g) }

var text = template.Must(template.New("guide").Funcs(template.FuncMap{"curl": func(g *guide) string {
	return "curl -sS --cacert " + g.CA
}}).Parse(`
Four model servers share one simulated GPU of 16 GiB behind {{.Site}}
(mvoice 2.8 GiB, whisper 3 GiB, ollama 6 GiB, comfyui 13 GiB; they only pretend).
In another terminal:

Speech: mvoice is loaded first. The headers tell how long that took, and a second time is quick.
    {{curl .}} -o /dev/null -D - {{.Site}}/v1/tts -d 'Hello, GPU.'

A transcript: whisper fits beside mvoice, so nothing is unloaded.
    {{curl .}} -F file=@{{.Sound}} {{.Site}}/v1/stt

A chat, streamed word by word: ollama fits too.
    {{curl .}} -N {{.Site}}/v1/llm -H 'Content-Type: application/json' -d '{"model":"{{.Model}}","stream":true,"messages":[{"role":"user","content":"Hello"}]}'

An image: comfyui needs 13 GiB, so all three make way. It answers at once and computes for 4 s.
    {{curl .}} {{.Site}}/v1/image -H 'Content-Type: application/json' -d '{"prompt":{"1":{"class_type":"KSampler","inputs":{}}}}'

Speech again: it waits until the image is done, then comfyui is unloaded and mvoice loaded.
    {{curl .}} -o /dev/null -D - {{.Site}}/v1/tts -d 'Hello again.'

A download waits for nobody, whoever computes.
    {{curl .}} -o /dev/null -w '%{size_download} bytes in %{time_total} s\n' '{{.Site}}/audio/big?bytes=10000000'

Who holds what, who waits and why (while requests run, watch "queue"); and what was decided, with reasons.
    {{curl .}} {{.Site}}/v1/status
    {{curl .}} {{.Site}}/v1/decisions

ComfyUI's page is {{.Site}}/v1/image/, an OpenAI SDK's base URL {{.Site}}/v1/llm/v1.
Logs are in {{.Dir}}. Ctrl-C stops everything.

What the broker decides:
`))

// quote makes a word of a shell's command line. Plain words stay as they are.
func quote(word string) string {
	if !strings.ContainsFunc(word, func(r rune) bool {
		return !strings.ContainsRune("/._-+=:@%", r) && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// tone is a WAV file with half a second of 440 Hz.
func tone() []byte {
	const rate, samples = 16000, 8000
	var b bytes.Buffer
	b.WriteString("RIFF")
	header := []any{
		uint32(36 + 2*samples), []byte("WAVEfmt "), uint32(16), uint16(1), uint16(1),
		uint32(rate), uint32(2 * rate), uint16(2), uint16(16), []byte("data"), uint32(2 * samples),
	}
	for _, field := range header {
		_ = binary.Write(&b, binary.LittleEndian, field) // a buffer takes it all
	}
	for i := range samples {
		value := int16(8000 * math.Sin(2*math.Pi*440*float64(i)/rate))
		_ = binary.Write(&b, binary.LittleEndian, value)
	}
	return b.Bytes()
}
