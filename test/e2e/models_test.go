package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"mime/multipart"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// oneURL is a site whose requests name their model; lines are more of its gpu_broker directive.
// Two servers of 10 GiB, which the GPU can't hold together.
func oneURL(t *testing.T, l layout, lines string) *site {
	t.Helper()
	server := func(name, lines string) consumer {
		return consumer{Options: modelserver.Options{Name: name, VRAM: gib(10)}, Lines: lines}
	}
	l.Consumers = append(l.Consumers, server("llama", "alias qwen2.5:7b llama3.2:latest"), server("whisper", "alias whisper-1"))
	l.Routes += "\nhandle {\ngpu_broker {\n" + lines + "\n}\nreverse_proxy {http.gpu_broker.upstream}\n}"
	return start(t, l)
}

// ask sends a body to the site.
func (s *site) ask(method, path, contentType string, body []byte) answer {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url+path, bytes.NewReader(body))
	require.NoError(s.t, err)
	req.Header.Set("Content-Type", contentType)
	resp, err := s.client.Do(req)
	require.NoError(s.t, err)
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	require.NoError(s.t, err)
	return answer{status: resp.StatusCode, header: resp.Header, body: data}
}

func (s *site) askJSON(path, body string) answer {
	s.t.Helper()
	return s.ask("POST", path, "application/json", []byte(body))
}

// servedBy requires that a consumer has served.
func (a answer) servedBy(t *testing.T, name string) {
	t.Helper()
	require.Equal(t, 200, a.status, "%.500s", a.body)
	require.Equal(t, name, a.header.Get("X-Gpu-Broker-Consumer"))
}

// refused requires an error of the broker, and is its message.
func (a answer) refused(t *testing.T, status int, code string) (message string) {
	t.Helper()
	require.Equal(t, status, a.status, "%.500s", a.body)
	require.Equal(t, code, a.code())
	var doc struct{ Error struct{ Message string } }
	require.NoError(t, json.Unmarshal(a.body, &doc))
	return doc.Error.Message
}

func speech(t *testing.T, size int, model string) (body []byte, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	part, err := w.CreateFormFile("file", "speech.wav")
	require.NoError(t, err)
	_, err = part.Write(every(size))
	require.NoError(t, err)
	require.NoError(t, w.WriteField("model", model))
	require.NoError(t, w.WriteField("response_format", "json"))
	require.NoError(t, w.Close())
	return b.Bytes(), w.FormDataContentType()
}

func TestModelIsFoundAtTheEndOfALargeBody(t *testing.T) {
	t.Parallel()
	imageSize, soundSize := 5<<20, 25<<20 // OpenAI's bound of a recording
	if testing.Short() {
		imageSize, soundSize = 2<<20, 3<<20 // more than is kept in memory, all the same
	}
	overBothVersions(t, func(t *testing.T, https bool) {
		s := oneURL(t, layout{HTTPS: https}, "model_from body")
		image := strings.Repeat("base64+/", imageSize/8)
		body := `{"image":"` + image + `", "options":{"model":"whisper"}, "model":"qwen2.5:7b"}`
		a := s.askJSON("/echo", body)
		a.servedBy(t, "llama")
		require.True(t, body == string(a.body), "the server got other bytes")

		form, kind := speech(t, soundSize, "whisper-1")
		a = s.ask("POST", "/echo", kind, form)
		a.servedBy(t, "whisper")
		require.True(t, bytes.Equal(form, a.body), "the server got other bytes")
	})
}

func TestModelIsFoundByNameAndAliasInEachPlace(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from header X-Model\nmodel_from path /models/*/infer\nmodel_from query\nmodel_from body\nmodel_from body model_id")
	for _, c := range []struct{ path, header, kind, body, want string }{
		{"/", "", "application/json", `{"model":"llama"}`, "llama"},
		{"/", "", "application/json", `{"model":"qwen2.5:7b"}`, "llama"},
		{"/", "", "application/json", `{"model":"llama3.2"}`, "llama"},
		{"/", "", "application/json", `{"model":"whisper:latest"}`, "whisper"},
		{"/", "", "application/json", `{"mod\u0065l":"whisper-1"}`, "whisper"},
		{"/", "", "application/json", `{"model_id":"whisper-1"}`, "whisper"},
		{"/", "", "application/x-www-form-urlencoded", `{"model":"whisper-1"}`, "whisper"},
		{"/", "", "application/x-www-form-urlencoded", "prompt=a&model=qwen2.5%3A7b", "llama"},
		{"/?model=whisper", "", "application/json", `{"model":"llama"}`, "whisper"},
		{"/models/qwen2.5%3A7b/infer?model=whisper", "", "text/plain", "x", "llama"},
		{"/models/llama/infer", "whisper-1", "text/plain", "x", "whisper"},
	} {
		req, err := http.NewRequest("POST", s.url+c.path, strings.NewReader(c.body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", c.kind)
		req.Header.Set("X-Model", c.header)
		resp, err := s.client.Do(req)
		require.NoError(t, err)
		got, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		answer{status: resp.StatusCode, header: resp.Header, body: got}.servedBy(t, c.want)
		require.Equal(t, c.body, string(got))
	}
	require.Equal(t, 11, s.servers["llama"].Stats().Worked+s.servers["whisper"].Stats().Worked)
}

func TestMetadataIsTakenOutOfJSONAndEveryOtherByteReachesTheServer(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("a", 3<<20)
	bodies := []struct{ sent, want string }{
		{`{"x_priority":1,"model":"llama"}`, `{"model":"llama"}`},
		{`{"model":"llama","x_client_id":"me","x_keep_alive":"5","x_stay_warm":6.5,"x_cooldown":0}`, `{"model":"llama"}`},
		{"{\r\n\t\"a\" : 1.0e1 , \"x_mine\" : {\"x\":[1]} ,\"é\":\"\\u00e9\", \"model\":\"llama\" }\n", "{\r\n\t\"a\" : 1.0e1 , \"é\":\"\\u00e9\", \"model\":\"llama\" }\n"},
		{`{"x_speed":1,"a":{"x_priority":1},"model":"llama"}`, `{"x_speed":1,"a":{"x_priority":1},"model":"llama"}`},
		{`{"x_priority":1,"image":"` + large + `","x_mine":"` + large + `","model":"llama"}`, `{"image":"` + large + `","model":"llama"}`},
	}
	for name, route := range map[string]string{
		"by model":       "gpu_broker {\nmodel_from body\nmetadata x_mine\n}",
		"one consumer":   "gpu_broker llama {\nmetadata x_mine\n}",
		"what it trusts": "gpu_broker llama {\ntrust_body\nmetadata x_mine\n}",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rec := newRecorder(t)
			s := oneURL(t, layout{Routes: "handle /rec/* {\n" + route + "\nreverse_proxy " + rec.addr + "\n}"}, "model_from query")
			for _, b := range bodies {
				for _, chunked := range []bool{false, true} {
					var body io.Reader = strings.NewReader(b.sent)
					if chunked {
						body = unknownLength{body}
					}
					req, err := http.NewRequest("POST", s.url+"/rec/", body)
					require.NoError(t, err)
					req.Header.Set("Content-Type", "application/json")
					resp, err := s.client.Do(req)
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
					require.Equal(t, 200, resp.StatusCode)
					got := rec.next(t)
					require.True(t, b.want == string(got.body), "%.100s became %.100s", b.sent, got.body)
					require.EqualValues(t, len(b.want), got.length)
					require.Equal(t, strconv.Itoa(len(b.want)), got.header.Get("Content-Length"))
					require.False(t, got.chunked)
				}
			}
		})
	}
}

func TestMetadataStaysOnRoutesThatDoNotReadBodies(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from query")
	for _, path := range []string{"/llama/echo", "/echo?model=llama"} {
		a := s.askJSON(path, `{"x_priority":1,`)
		a.servedBy(t, "llama")
		require.Equal(t, `{"x_priority":1,`, string(a.body))
	}
}

// old is a server with an alias; with enabled off it is not probed, so sites start with it on.
func old() consumer {
	return consumer{Options: modelserver.Options{Name: "old", VRAM: gib(1)}, Lines: "alias whisper-0"}
}

func switchOff(c string) string {
	return strings.Replace(c, "alias whisper-0", "alias whisper-0\nenabled off", 1)
}

func TestListsOfModelsAreAnsweredByTheBroker(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{Consumers: []consumer{old()}}, "model_from body\nmodel_from header X-Model\ndefault llama")
	s.reloaded(switchOff)
	var list struct {
		Object string
		Data   []struct {
			ID, Object string
			Created    int64
			OwnedBy    string `json:"owned_by"`
		}
	}
	s.json("/v1/models", &list)
	var ids []string
	for _, m := range list.Data {
		ids = append(ids, m.ID)
		require.Equal(t, "model", m.Object)
		require.Positive(t, m.Created)
		require.NotEmpty(t, m.OwnedBy)
	}
	require.Equal(t, "list", list.Object)
	require.Equal(t, []string{"llama", "qwen2.5:7b", "llama3.2:latest", "whisper", "whisper-1"}, ids, "none that is switched off")

	var tags struct {
		Models []struct{ Name, Model string }
	}
	s.json("/api/tags", &tags)
	require.Len(t, tags.Models, 5)
	require.Equal(t, "qwen2.5:7b", tags.Models[1].Name)

	var one struct{ ID string }
	s.json("/v1/models/qwen2.5%3A7b", &one)
	require.Equal(t, "qwen2.5:7b", one.ID)
	s.json("/v1/models/llama3.2", &one)
	require.Equal(t, "llama3.2:latest", one.ID)
	require.Contains(t, s.get("/v1/models/qwen2.5:70b").refused(t, 404, "unknown_model"), `"qwen2.5:7b"`)
	s.get("/v1/models/whisper-0").refused(t, 404, "unknown_model")

	head := s.do(context.Background(), "HEAD", "/v1/models", nil)
	require.Equal(t, 200, head.status)
	require.Equal(t, "application/json", head.header.Get("Content-Type"))
	require.Empty(t, head.body)
	for name, srv := range s.servers {
		require.Zero(t, srv.Stats().Requests["/v1/models"], name)
	}

	req, err := http.NewRequest("GET", s.url+"/v1/models", nil)
	require.NoError(t, err)
	req.Header.Set("X-Model", "whisper")
	resp, err := s.client.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 1, s.servers["whisper"].Stats().Requests["/v1/models"], "the request names the server that it asks")
}

// What is refused for what it says has no effect on what is loaded.
func TestARequestThatNamesNoKnownModelEvictsNothing(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from body\nmodel_from query\ntrust_body")
	s.askJSON("/echo", `{"model":"llama"}`).servedBy(t, "llama")
	before := s.status().Scheduler
	form, kind := speech(t, 2<<20, "whisper-1")
	const jsonType = "application/json"
	for _, c := range []struct {
		path, kind, body string
		status           int
		code, says       string
	}{
		{"/", jsonType, `{"model":"whisper-2"}`, 404, "unknown_model", `there is no model "whisper-2": did you mean "whisper-1", "whisper"?`},
		{"/", jsonType, `{"model":"Whisper"}`, 404, "unknown_model", `"whisper"`},
		{"/", jsonType, `{"model":"zzzzzzzz"}`, 404, "unknown_model", `there is no model "zzzzzzzz": GET /v1/models lists all`},
		{"/?model=none-such", "text/plain", `x`, 404, "unknown_model", `"none-such"`},
		{"/", jsonType, `{"model":"whisper"`, 400, "bad_request", "at byte 18"},
		{"/", jsonType, `{"model":"whisper","a":[1,]}`, 400, "bad_request", "at byte 26"},
		{"/?model=whisper", jsonType, `{"a":`, 400, "bad_request", "it ends at byte 5"},
		{"/", jsonType, `{"model":"whisper"} {}`, 400, "bad_request", "at byte 20"},
		{"/", jsonType, `{"image":"` + strings.Repeat("a", 2<<20) + `","model":"whisper"`, 400, "bad_request", "it ends at byte"},
		{"/", jsonType, `{"model":7}`, 400, "bad_request", `field "model" must be a string, it is a number`},
		{"/", jsonType, `{"model":["whisper"]}`, 400, "bad_request", "a list"},
		{"/", jsonType, `{"model":"` + strings.Repeat("w", 513) + `"}`, 400, "bad_request", "longer than 512 bytes"},
		{"/", jsonType, `{"model":"whisper","x_priority":"soon"}`, 400, "bad_request", `field "x_priority" must be a number`},
		{"/", jsonType, `{"model":"whisper","x_keep_alive":-1}`, 400, "bad_request", `field "x_keep_alive"`},
		{"/", jsonType, `{}`, 400, "bad_request", `this request names no model: name it in the field "model" of the body, or in the parameter "model" of the query`},
		{"/", jsonType, `{"model":null}`, 400, "bad_request", "names no model"},
		{"/", jsonType, ``, 400, "bad_request", "names no model"},
		{"/", "audio/wav", `RIFF{"model":"whisper"}`, 400, "bad_request", "names no model"},
		{"/", kind, string(form[:len(form)-200]), 400, "bad_request", "it ends too soon"},
		{"/", "multipart/form-data", string(form), 400, "bad_request", "without a boundary"},
	} {
		message := s.ask("POST", c.path, c.kind, []byte(c.body)).refused(t, c.status, c.code)
		require.Contains(t, message, c.says, "%.80s", c.body)
	}
	after := s.status()
	require.Equal(t, before.TotalJobs, after.Scheduler.TotalJobs)
	require.Zero(t, after.Scheduler.Evictions)
	require.Equal(t, "READY", after.Consumers["llama"].Slots[0].State)
	whisper := s.servers["whisper"].Stats()
	require.Zero(t, whisper.LoadsStarted)
	require.Zero(t, whisper.Requests["/"])
	require.Zero(t, s.servers["llama"].Stats().UnloadCalls)
	s.ask("POST", "/echo", kind, form).servedBy(t, "whisper")
}

func TestRequestsThatNeedNoGPUWithoutAKnownConsumerAre404(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from query\nbypass GET /audio/*\ntouch /health /healthy")
	for _, c := range []struct{ method, path string }{{"OPTIONS", "/v1/chat/completions"}, {"HEAD", "/x"}, {"GET", "/audio/big"}, {"GET", "/healthy"}} {
		a := s.do(context.Background(), c.method, c.path, nil)
		require.Equal(t, 404, a.status, c.path)
		if c.method != "HEAD" {
			require.Contains(t, a.refused(t, 404, "unknown_model"), "names no model")
		}
	}
	s.do(context.Background(), "GET", "/x", nil).refused(t, 404, "unknown_model")
	s.do(context.Background(), "POST", "/x", strings.NewReader("{}")).refused(t, 400, "bad_request")
	a := s.do(context.Background(), "OPTIONS", "/x?model=whisper", nil)
	require.Equal(t, 204, a.status, "it names a model")
	require.Equal(t, 200, s.get("/audio/big?bytes=10&model=llama").status)
	require.Equal(t, 200, s.get("/health?model=llama").status)
	st := s.status()
	require.Zero(t, st.Scheduler.TotalJobs, "none of them is a job")
	require.Zero(t, s.servers["llama"].Stats().LoadsStarted)
}

func TestRequestsThatNameNoModelGoToTheDefault(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from body\ndefault whisper")
	s.askJSON("/echo", `{"prompt":"a"}`).servedBy(t, "whisper")
	s.ask("POST", "/echo", "audio/wav", every(100_000)).servedBy(t, "whisper")
	s.get("/echo").servedBy(t, "whisper")
	require.Equal(t, 204, s.do(context.Background(), "OPTIONS", "/echo", nil).status)
	s.askJSON("/echo", `{"model":"llama"}`).servedBy(t, "llama")
	s.askJSON("/echo", `{"model":"gemma"}`).refused(t, 404, "unknown_model")
	s.askJSON("/echo", `{"prompt":`).refused(t, 400, "bad_request")
}

func TestAModelWhoseConsumerIsSwitchedOffIsRefusedAsSuch(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{Consumers: []consumer{old()}}, "model_from body")
	s.askJSON("/echo", `{"model":"whisper-0"}`).servedBy(t, "old")
	s.reloaded(switchOff)
	byName := s.askJSON("/echo", `{"model":"whisper-0"}`)
	direct := s.post("/old/echo", "x")
	require.Equal(t, direct.status, byName.status)
	require.Equal(t, direct.code(), byName.code())
	require.Equal(t, 503, byName.status)
	require.Equal(t, "old", byName.header.Get("X-Gpu-Broker-Consumer"))
}

func TestPriorityAndClientComeFromTheRouteAndFromTrustedBodies(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{Routes: `
		handle /trusted/* {
			gpu_broker whisper {
				trust_body
				priority {header.X-Priority}
				priority_range 10 200
				client_id {header.X-Client}
			}
			reverse_proxy {http.gpu_broker.upstream}
		}
		handle /fixed/* {
			gpu_broker whisper {
				metadata x_mine
				priority 50
			}
			reverse_proxy {http.gpu_broker.upstream}
		}`}, "model_from body")
	release := s.hold("llama")
	queue := func() []broker.Waiter { return s.status().Queue }
	for i, c := range []struct {
		path, priority, client, body string
		want                         broker.Waiter
	}{
		{"/trusted/", "", "", `{}`, broker.Waiter{Priority: 100}},
		{"/trusted/", "20", "ann", `{}`, broker.Waiter{Priority: 20, Client: "ann"}},
		{"/trusted/", "soon", "ann", `{}`, broker.Waiter{Priority: 100, Client: "ann"}},
		{"/trusted/", "-5", "ann", `{}`, broker.Waiter{Priority: 10, Client: "ann"}},
		{"/trusted/", "20", "ann", `{"x_priority":"30","x_client_id":"bob"}`, broker.Waiter{Priority: 30, Client: "bob"}},
		{"/trusted/", "20", "ann", `{"x_priority":1e9}`, broker.Waiter{Priority: 200, Client: "ann"}},
		{"/fixed/", "20", "ann", `{"x_priority":1,"x_client_id":"bob"}`, broker.Waiter{Priority: 50, Client: "127.0.0.1"}},
		{"/", "20", "ann", `{"x_priority":1,"x_client_id":"bob","model":"whisper"}`, broker.Waiter{Priority: 100, Client: "127.0.0.1"}},
	} {
		ctx, leave := context.WithCancel(context.Background())
		req, err := http.NewRequestWithContext(ctx, "POST", s.url+c.path, strings.NewReader(c.body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Priority", c.priority)
		req.Header.Set("X-Client", c.client)
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			if resp, err := s.client.Do(req); err == nil {
				_ = resp.Body.Close()
			}
		}()
		s.until("it waits", func() bool { return len(queue()) == 1 })
		got := queue()[0]
		if got.Client == "::1" { // localhost
			got.Client = "127.0.0.1"
		}
		require.Equal(t, c.want.Priority, got.Priority, "case %d", i)
		require.Equal(t, c.want.Client, got.Client, "case %d", i)
		leave()
		<-gone
		s.until("it waits no more", func() bool { return len(queue()) == 0 })
	}
	require.Equal(t, 200, release().status)
}

func TestRoutesThatNameNoConsumerNorModelAreRefusedByTheConfiguration(t *testing.T) {
	t.Parallel()
	s := oneURL(t, layout{}, "model_from body")
	for edit, want := range map[string]string{
		"model_from body":                     "model_from",
		"model_from body\ndefault lama":       "did you mean llama?",
		"model_from body\nstream_body":        "stream_body",
		"model_from path /models/infer":       "hold a *",
		"model_from cookie a":                 "cookie",
		"model_from body\nfallback none-such": "none-such",
	} {
		replaced := edit
		if edit == "model_from body" {
			replaced = ""
		}
		a := s.reload(func(c string) string {
			return strings.Replace(c, "gpu_broker {\nmodel_from body\n", "gpu_broker {\n"+replaced+"\n", 1)
		})
		require.Equal(t, 400, a.status, edit)
		require.Contains(t, string(a.body), want, edit)
	}
}
