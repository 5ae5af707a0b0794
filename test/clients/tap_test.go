package clients

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// cloudKey is what the cloud stand-in wants of those who ask it.
const cloudKey = "the-cloud's-own-key"

// tap stands before a server and notes the names of models in the requests that pass.
type tap struct {
	*httptest.Server
	mu   sync.Mutex
	seen map[string][]string // names by method and path, each once
}

// newTap puts a tap before a server until the test ends.
func newTap(t *testing.T, server *modelserver.Server) *tap {
	t.Helper()
	p := prepareTap(t, server)
	p.Start()
	return p
}

// newCloud is a tap with TLS and a key. It returns the file of its authority's certificate, too.
func newCloud(t *testing.T, server *modelserver.Server) (p *tap, ca string) {
	t.Helper()
	p = prepareTap(t, server)
	pass := p.Config.Handler
	p.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if got := r.Header.Get("Authorization"); got != "Bearer "+cloudKey {
			assert.Fail(t, "the cloud was asked without its key", "%s %s: %q", r.Method, r.URL, got)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		pass.ServeHTTP(w, r)
	})
	p.StartTLS()
	ca = filepath.Join(t.TempDir(), "cloud.pem")
	require.NoError(t, os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.Certificate().Raw}), 0o600))
	return p, ca
}

func prepareTap(t *testing.T, server *modelserver.Server) *tap {
	t.Helper()
	to, err := url.Parse(server.URL())
	require.NoError(t, err)
	p := &tap{seen: map[string][]string{}}
	transport := &http.Transport{}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport:     transport,
		FlushInterval: -1,
	}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		p.note(r, body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(func() { p.Close(); transport.CloseIdleConnections() })
	return p
}

func (p *tap) addr() string { return p.Listener.Addr().String() }

func (p *tap) note(r *http.Request, body []byte) {
	name := namedIn(r.Header.Get("Content-Type"), body)
	p.mu.Lock()
	defer p.mu.Unlock()
	at := r.Method + " " + r.URL.Path
	if names := p.seen[at]; name != "" && !slices.Contains(names, name) {
		names = append(names, name)
		slices.Sort(names)
		p.seen[at] = names
	}
}

// asked are the names by which a route was asked for models, in order.
func (p *tap) asked(route string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.seen[route])
}

// names are all those that came by any route, in order.
func (p *tap) names() (all []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, names := range p.seen {
		all = append(all, names...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// namedIn is the name of the model that a body holds.
func namedIn(contentType string, body []byte) string {
	if kind, params, _ := mime.ParseMediaType(contentType); kind == "multipart/form-data" {
		form, err := multipart.NewReader(bytes.NewReader(body), params["boundary"]).ReadForm(64 << 20)
		if err != nil {
			return "a form that can't be read: " + err.Error()
		}
		defer func() { _ = form.RemoveAll() }()
		if names := form.Value["model"]; len(names) > 0 {
			return names[0]
		}
		return ""
	}
	var doc struct{ Model string }
	if len(body) > 0 && json.Unmarshal(body, &doc) != nil {
		return "no JSON: " + string(body[:min(len(body), 100)])
	}
	return doc.Model
}
