package gpubroker

import "slices"

// ollamaDocument is the error form of Ollama's own API: its clients show
// "error" as it stands, so that it must be a text. The rest is as in OpenAI's form.
type ollamaDocument struct {
	Error string `json:"error"`
	errorBody
}

// ollamaPaths are the routes of Ollama's own API that can be refused.
var ollamaPaths = []string{
	"/api/generate", "/api/chat", "/api/embed", "/api/embeddings", "/api/show", "/api/create", "/api/copy", "/api/delete",
	"/api/pull", "/api/push", "/api/ps", "/api/tags", "/api/version",
}

// inFormOf is an error as clients of a path, as the server would see it, read errors.
func inFormOf(path string, doc errorDocument) any {
	if slices.Contains(ollamaPaths, path) {
		return ollamaDocument{doc.Error.Message, doc.Error}
	}
	return doc
}
