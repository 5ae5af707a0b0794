package routing

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// Listed is a model as lists show it.
type Listed struct {
	Name  string    // by which requests ask for it
	Size  int64     // in bytes
	Since time.Time // when it came to be, as far as anybody knows

	Unlisted bool // only a request for it by its name shows it
}

// Lists are the answers to requests for the lists of models, made once for a configuration.
type Lists struct {
	openAI, ollama []byte
	each           map[string][]byte // by name, in OpenAI's form
}

// openAIModel is a model as OpenAI shows it. All four fields are required in its SDKs' types.
type openAIModel struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"` // in seconds since 1970
	OwnedBy string `json:"owned_by"`
}

// ollamaModel is a model as Ollama shows it. Clients read a time, a size and
// a digest, and some a list of families; what is not known is empty.
type ollamaModel struct {
	Name     string        `json:"name"`
	Model    string        `json:"model"`
	Modified string        `json:"modified_at"`
	Size     int64         `json:"size"`
	Digest   string        `json:"digest"`
	Details  ollamaDetails `json:"details"`
}

type ollamaDetails struct {
	Parent       string   `json:"parent_model"`
	Format       string   `json:"format"`
	Family       string   `json:"family"`
	Families     []string `json:"families"`
	Parameters   string   `json:"parameter_size"`
	Quantization string   `json:"quantization_level"`
}

// NewLists makes Lists of models in their order.
func NewLists(models []Listed) *Lists {
	l := &Lists{each: map[string][]byte{}}
	openAI := struct {
		Object string        `json:"object"`
		Data   []openAIModel `json:"data"`
	}{"list", []openAIModel{}}
	ollama := struct {
		Models []ollamaModel `json:"models"`
	}{[]ollamaModel{}}
	for _, m := range models {
		one := openAIModel{ID: m.Name, Object: "model", Created: m.Since.Unix(), OwnedBy: "gpu_broker"}
		l.each[m.Name] = encode(one)
		if m.Unlisted {
			continue
		}
		openAI.Data = append(openAI.Data, one)
		ollama.Models = append(ollama.Models, inOllamasForm(m))
	}
	l.openAI, l.ollama = encode(openAI), encode(ollama)
	return l
}

// encode can't fail for what is encoded here.
func encode(v any) []byte {
	out, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return out
}

// Paths of the lists, as OpenAI and Ollama have them.
const (
	openAIPath = "/v1/models"
	ollamaPath = "/api/tags"
)

// OllamaVersion is the version of Ollama's API that the broker's own answers have the form of.
const OllamaVersion = "0.33.0"

// ollamaLoaded is a loaded model as Ollama shows it.
type ollamaLoaded struct {
	ollamaModel
	SizeVRAM int64  `json:"size_vram"`
	Expires  string `json:"expires_at"`
}

// LoadedList is the answer to a request for the models that are loaded, in Ollama's form. When each is unloaded is not known.
func LoadedList(models []Listed) []byte {
	out := struct {
		Models []ollamaLoaded `json:"models"`
	}{[]ollamaLoaded{}}
	for _, m := range models {
		out.Models = append(out.Models, ollamaLoaded{ollamaModel: inOllamasForm(m), SizeVRAM: m.Size, Expires: "9999-01-01T00:00:00Z"})
	}
	return encode(out)
}

// inOllamasForm is a model as Ollama shows it.
func inOllamasForm(m Listed) ollamaModel {
	digest := sha256.Sum256([]byte(m.Name))
	return ollamaModel{Name: m.Name, Model: m.Name, Modified: m.Since.UTC().Format(time.RFC3339),
		Size: m.Size, Digest: hex.EncodeToString(digest[:]), Details: ollamaDetails{Families: []string{}}}
}

// IsShortList reports whether a request asks for the list of models at a path that model servers have beside those of
// OpenAI and Ollama.
func IsShortList(r *http.Request) bool {
	return (r.Method == http.MethodGet || r.Method == http.MethodHead) && !config.IsTunnel(r) && strings.TrimRight(r.URL.Path, "/") == "/models"
}

// IsList reports whether a request asks for a list of models, or for one of a list, in whatever form its server takes the path.
func IsList(r *http.Request) bool {
	if r.Method != http.MethodGet && r.Method != http.MethodHead || config.IsTunnel(r) {
		return false
	}
	path := config.PathMatch(0).Read(r.Method, r.URL)
	return !slices.ContainsFunc(path.Forms(), func(form string) bool { return !isListPath(form) })
}

func isListPath(path string) bool {
	return path == openAIPath || strings.TrimRight(path, "/") == ollamaPath || strings.HasPrefix(path, openAIPath+"/")
}

// Entry is the answer to a request for the model that is listed by this name; nil: there is none.
func (l *Lists) Entry(name string) []byte { return l.each[name] }

// Answer is the answer, in JSON, to a request that IsList; nil: it asks for the model of that name, and there is none.
func (l *Lists) Answer(r *http.Request) (body []byte, name string) {
	switch path := r.URL.Path; strings.TrimRight(path, "/") {
	case openAIPath, "/models":
		return l.openAI, ""
	case ollamaPath:
		return l.ollama, ""
	default:
		name = strings.TrimPrefix(path, openAIPath+"/")
		if body = l.each[name]; body == nil {
			body = l.each[sameModel(name)]
		}
		return body, name
	}
}
