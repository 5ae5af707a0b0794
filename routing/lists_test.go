package routing

import (
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestH3_AListOfModelsIsOneInEveryFormOfItsPath(t *testing.T) {
	for target, want := range map[string]bool{
		"/v1/models": true, "/v1/models/": true, "/v1/models/org/name": true, "/v1/models/org%2fname": true, "/v1/models/Llama%203%208B": true, "/api/tags/": true,
		"/v1/models/../generate": false, "/v1/models/%2e%2e/generate": false, "/v1/models/..%2fgenerate": false, "/v1/models/%252e%252e/generate": false, `/v1/models/..%5cgenerate`: false, "/v1/models/..;x/generate": false,
	} {
		u, err := url.ParseRequestURI(target)
		require.NoError(t, err)
		require.Equal(t, want, IsList(&http.Request{Method: http.MethodGet, URL: u}), target)
	}
	tunnel := &http.Request{Method: http.MethodGet, URL: &url.URL{Path: "/v1/models"}, Header: http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}}}
	require.False(t, IsList(tunnel), "a WebSocket gets no list")
}
