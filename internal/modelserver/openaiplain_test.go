package modelserver

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"image/png"
	"math"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

type completionAnswer struct {
	Object  string
	Model   string
	Choices []struct {
		Message, Delta struct{ Role, Content string }
		Text           string
		FinishReason   *string `json:"finish_reason"`
	}
	Usage *struct {
		CompletionTokens int `json:"completion_tokens"`
	}
}

func TestPlainServerChatsInOpenAIsFormAndSaysWhoAnswers(t *testing.T) {
	s := start(t, Options{Name: "llm", Preloaded: true})
	ctx := bound(t)
	const ask = `{"model":"any","messages":[{"role":"user","content":"first"},{"role":"user","content":[{"type":"text","text":"hello "},{"type":"text","text":"there"}]}]`
	whole := decode[completionAnswer](t, want(t, 200, call(ctx, "POST", s.URL()+"/v1/chat/completions", ask+`}`)).body)
	require.Equal(t, "chat.completion", whole.Object)
	require.Equal(t, "any", whole.Model, "it serves its model by any name")
	require.Equal(t, "llm answers: hello there", whole.Choices[0].Message.Content)
	require.Equal(t, "stop", *whole.Choices[0].FinishReason)

	cut := decode[completionAnswer](t, want(t, 200, call(ctx, "POST", s.URL()+"/v1/chat/completions", ask+`,"max_completion_tokens":2}`)).body)
	require.Equal(t, "llm answers: ", cut.Choices[0].Message.Content)
	require.Equal(t, "length", *cut.Choices[0].FinishReason)

	stream := want(t, 200, call(ctx, "POST", s.URL()+"/v1/chat/completions", ask+`,"stream":true,"stream_options":{"include_usage":true}}`))
	require.Equal(t, "text/event-stream", stream.header.Get("Content-Type"))
	events := strings.Split(strings.TrimSuffix(string(stream.body), "\n\n"), "\n\n")
	require.Equal(t, "data: [DONE]", events[len(events)-1])
	var text string
	var last completionAnswer
	for _, event := range events[:len(events)-1] {
		last = decode[completionAnswer](t, []byte(strings.TrimPrefix(event, "data: ")))
		require.Equal(t, "chat.completion.chunk", last.Object)
		for _, choice := range last.Choices {
			text += choice.Delta.Content
		}
	}
	require.Equal(t, "llm answers: hello there", text)
	require.Equal(t, 4, last.Usage.CompletionTokens)

	old := decode[completionAnswer](t, want(t, 200, call(ctx, "POST", s.URL()+"/v1/completions", `{"prompt":"Once"}`)).body)
	require.Equal(t, "llm answers: Once", old.Choices[0].Text)
}

func TestEmbeddingsAreTheSameInBothEncodings(t *testing.T) {
	plain, llama := start(t, Options{Preloaded: true}), startOllama(t, Options{})
	type list struct {
		Data []struct {
			Index     int
			Embedding any
		}
	}
	for _, url := range []string{plain.URL(), llama.URL()} {
		ask := func(more string) list {
			return decode[list](t, want(t, 200, call(bound(t), "POST", url+"/v1/embeddings", `{"model":"tiny","input":["one","two"]`+more+`}`)).body)
		}
		floats, packed := ask(""), ask(`,"encoding_format":"base64"`)
		require.Len(t, floats.Data, 2)
		require.NotEqual(t, floats.Data[0].Embedding, floats.Data[1].Embedding)
		for i := range floats.Data {
			raw, err := base64.StdEncoding.DecodeString(packed.Data[i].Embedding.(string))
			require.NoError(t, err)
			var unpacked []any
			for at := 0; at < len(raw); at += 4 {
				unpacked = append(unpacked, float64(math.Float32frombits(binary.LittleEndian.Uint32(raw[at:]))))
			}
			require.Equal(t, floats.Data[i].Embedding, unpacked)
			require.Equal(t, i, floats.Data[i].Index)
		}
	}
	tokens := want(t, 200, call(bound(t), "POST", plain.URL()+"/v1/embeddings", `{"input":[1,2,3]}`))
	require.Len(t, decode[list](t, tokens.body).Data, 1, "tokens are one text")
	older := want(t, 200, call(bound(t), "POST", llama.URL()+"/api/embeddings", `{"model":"tiny","prompt":"one"}`))
	require.Contains(t, decode[map[string]any](t, older.body), "embedding")
}

func TestTranscriptionHearsTheFileOfAForm(t *testing.T) {
	s := start(t, Options{Name: "whisper", Preloaded: true})
	sound := AudioBytes(100_003)
	post := func(fields ...string) answer {
		var body bytes.Buffer
		form := multipart.NewWriter(&body)
		for i := 0; i+1 < len(fields); i += 2 {
			if fields[i] != "file" {
				require.NoError(t, form.WriteField(fields[i], fields[i+1]))
				continue
			}
			part, err := form.CreateFormFile("file", fields[i+1])
			require.NoError(t, err)
			_, err = part.Write(sound)
			require.NoError(t, err)
		}
		require.NoError(t, form.Close())
		return callAs(bound(t), form.FormDataContentType(), "POST", s.URL()+"/v1/audio/transcriptions", body.String())
	}
	heard := Transcript("whisper", sound)
	require.Contains(t, heard, "whisper heard 100003 bytes of sound")
	require.Equal(t, map[string]string{"text": heard}, decode[map[string]string](t, want(t, 200, post("file", "a.wav", "model", "whisper-1")).body))
	require.Equal(t, heard+"\n", string(want(t, 200, post("model", "whisper-1", "response_format", "text", "file", "a.wav")).body))
	require.Contains(t, string(want(t, 400, post("model", "whisper-1")).body), "no part named file")
	raw := want(t, 200, callAs(bound(t), "audio/wav", "POST", s.URL()+"/inference", string(sound)))
	require.Equal(t, heard, decode[map[string]string](t, raw.body)["text"])
}

func TestImagesAreRealAndOfTheSizeAskedFor(t *testing.T) {
	s := start(t, Options{Name: "sdxl", Preloaded: true})
	got := want(t, 200, call(bound(t), "POST", s.URL()+"/v1/images/generations", `{"prompt":"a boat","n":2,"size":"512x256"}`))
	list := decode[struct {
		Data []struct {
			Image  []byte `json:"b64_json"`
			Prompt string `json:"revised_prompt"`
		}
	}](t, got.body)
	require.Len(t, list.Data, 2)
	for _, entry := range list.Data {
		drawn, err := png.Decode(bytes.NewReader(entry.Image))
		require.NoError(t, err)
		require.Equal(t, 512, drawn.Bounds().Dx())
		require.Equal(t, 256, drawn.Bounds().Dy())
		require.Equal(t, "sdxl drew: a boat", entry.Prompt)
	}
	require.NotEqual(t, list.Data[0].Image, list.Data[1].Image)
	for _, size := range []string{"big", "0x8", "4096x1", "8x"} {
		want(t, 400, call(bound(t), "POST", s.URL()+"/v1/images/generations", `{"prompt":"x","size":"`+size+`"}`))
	}
}

func TestOpenAIsRoutesTellErrorsInOpenAIsForm(t *testing.T) {
	type document struct {
		Error struct{ Message, Type string }
	}
	plain, llama := start(t, Options{VRAM: gpu.GiB}), startOllama(t, Options{})
	for url, part := range map[string]string{
		plain.URL() + "/v1/chat/completions": "not loaded",
		llama.URL() + "/v1/chat/completions": "not found",
	} {
		got := call(bound(t), "POST", url, `{"model":"nope"}`)
		require.GreaterOrEqual(t, got.status, 400)
		doc := decode[document](t, got.body)
		require.Contains(t, doc.Error.Message, part)
		require.NotEmpty(t, doc.Error.Type)
	}
	native := call(bound(t), "POST", llama.URL()+"/api/chat", `{"model":"nope"}`)
	require.Contains(t, decode[struct{ Error string }](t, want(t, 404, native).body).Error, "not found")
	models := want(t, 200, call(bound(t), "GET", plain.URL()+"/v1/models", ""))
	require.Contains(t, string(models.body), `"mvoice"`)
	require.Zero(t, plain.Stats().LoadsStarted, "the list needs no model")
}
