package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestErrorRoutesGetTheHeadersOfARefusalBeforeTheFirstHeartbeat(t *testing.T) {
	t.Parallel()
	a := plainModel("a", 4)
	a.Route = "heartbeat 1h"
	s := start(t, layout{Consumers: []consumer{a, plainModel("b", 4)},
		Routes: "handle_errors {\nrespond \"sorry: {http.gpu_broker.reason}\" {err.status_code}\n}"})
	s.serve("a")
	_, end := s.works("b")
	defer end()
	got := make(chan *http.Response, 1)
	go func() {
		resp, err := s.client.Do(s.asks(t.Context(), "/a/stream?events=3", "", "Origin", "https://app.example"))
		if err != nil {
			s.t.Error(err)
		}
		got <- resp
	}()
	s.waitQueued("a", 1)
	s.adminDo("POST", "/gpu_broker/consumers/a/drain", "", "")
	resp := <-got
	require.NotNil(t, resp)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 503, resp.StatusCode)
	require.Equal(t, "sorry: draining", string(body))
	require.NotEmpty(t, resp.Header.Get("Retry-After"))
	require.Equal(t, "a", resp.Header.Get("X-Gpu-Broker-Consumer"))
	require.Equal(t, "https://app.example", resp.Header.Get("Access-Control-Allow-Origin"))
}

func TestUnknownModelAfterAskingForTheBodyLeavesTheConnectionInUse(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from body")
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	in := bufio.NewReader(conn)
	for _, c := range []struct {
		model  string
		status int
	}{{"nobody", 404}, {"llama", 200}} {
		body := fmt.Sprintf(`{"model":%q}`, c.model)
		_, err = fmt.Fprintf(conn, "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", len(body))
		require.NoError(t, err)
		resp, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusContinue, resp.StatusCode)
		_, err = io.WriteString(conn, body)
		require.NoError(t, err)
		for resp.StatusCode == http.StatusContinue { // the server's own is passed on, too
			resp, err = http.ReadResponse(in, &http.Request{Method: "POST"})
			require.NoError(t, err)
		}
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
		_ = resp.Body.Close()
		require.Equal(t, c.status, resp.StatusCode)
	}
}
