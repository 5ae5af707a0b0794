package httplife_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
)

func TestTheModuleIsRegistered(t *testing.T) {
	info, err := caddy.GetModule("gpu_broker.lifecycles.http")
	require.NoError(t, err)
	assert.Implements(t, (*lifecycle.Guest)(nil), info.New())
	assert.Implements(t, (*caddy.Provisioner)(nil), info.New())
}

func TestTheFingerprintTellsValuesOfPlaceholdersApartAndDoesNotShowThem(t *testing.T) {
	of := func(a, b string) string {
		t.Setenv("HTTPLIFE_TEST_A", a)
		t.Setenv("HTTPLIFE_TEST_B", b)
		l, err := provision(t, `{"header":{"X-A":["{env.HTTPLIFE_TEST_A}"]},"unload":{"path":"/u","body":"{\"key\":\"{env.HTTPLIFE_TEST_B}\"}"}}`)
		require.NoError(t, err)
		return l.Fingerprint()
	}
	first := of("secret-one", "secret-two")
	assert.Equal(t, first, of("secret-one", "secret-two"))
	assert.NotEqual(t, first, of("secret-two", "secret-one"), "swapped")
	assert.NotEqual(t, first, of("secret-one", "secret-three"))
	assert.NotContains(t, first, "secret")
}

func TestAllFaultsAreReportedAtOnce(t *testing.T) {
	_, err := provision(t, `{
		"header":{"Bad Name":["x"]},
		"health":{"method":"FETCH","path":"health","accept":[199,200,599,600],"timeout":-1,"loaded":"$.[","busy":"$.x"},
		"residency":{"path":"/r?key=hidden#x","resident_mib":"$.a","resident_bytes":"$.b"},
		"load":{"path":"/l a","loaded":"$.x","for_each":{"path":"/x","values":"$.y"},"body":"{item}"},
		"unload":{"path":"/u","header":{"Content-Type":["application/json"]},"body":"{\"a\":","for_each":{"path":"ps"}},
		"busy":{"path":"/b","header":{"X":["{env.HTTPLIFE_TEST_MISSING}"],"Y":["{nonsense}"]}}
	}`)
	require.Error(t, err)
	for _, want := range []string{
		`header: "Bad Name" is not a header name`,
		`health: method "FETCH" is unknown: use one of GET, HEAD, POST`,
		`health: path "health" does not begin with /`,
		`health: accept 199 is not a status from 200 to 599`,
		`health: accept 600 is not a status from 200 to 599`,
		`health: accept 600 is not`,
		`health: timeout -1ns is negative`,
		`health: loaded "$.[" is not a JSONPath`,
		`health: busy is only for busy`,
		`residency: path "/r" has a #`,
		`residency: resident_mib and resident_bytes are both given`,
		`residency: loaded is missing`,
		`load: path "/l a" is not a valid URL path`,
		`load: loaded is only for health and residency`,
		`load: for_each is only for unload`,
		`load: body has {item}`,
		`unload: body is not JSON, but its Content-Type says so`,
		`unload: for_each: path "ps" does not begin with /`,
		`unload: for_each: values is missing`,
		`unload: for_each is given, but neither path nor body has {item}`,
		`busy: busy is missing`,
		`busy: header X: evaluated placeholder {env.HTTPLIFE_TEST_MISSING} is empty`,
		`busy: header Y: unrecognized placeholder {nonsense}`,
	} {
		assert.ErrorContains(t, err, want)
	}
	assert.Len(t, strings.Split(err.Error(), "\n"), 22)
	assert.NotContains(t, err.Error(), "hidden")
}

func TestAQueryWithoutDollarIsRefused(t *testing.T) {
	_, err := provision(t, `{"health":{"path":"/h","loaded":"loaded"}}`)
	assert.ErrorContains(t, err, "it has no $")
}

func TestUnknownFieldsAreRefused(t *testing.T) {
	assert.Error(t, caddy.StrictUnmarshalJSON([]byte(`{"health":{"path":"/h","load":"x"}}`), new(httplife.Lifecycle)))
}

func TestOpenRefusesWhatCanNotWork(t *testing.T) {
	_, err := new(httplife.Lifecycle).Open(lifecycle.Deps{Upstream: "127.0.0.1:1"})
	assert.ErrorContains(t, err, "provisioned")
	l, err := provision(t, `{"load":{"path":"/load"}}`)
	require.NoError(t, err)
	_, err = l.Open(lifecycle.Deps{Consumer: "x"})
	assert.ErrorContains(t, err, "no upstream")
	for _, bad := range []string{"127.0.0.1", "http://127.0.0.1:80", "host:"} {
		_, err = l.Open(lifecycle.Deps{Consumer: "x", Upstream: bad})
		assert.ErrorContains(t, err, "is not host:port")
	}
}

func TestProvisionAndOpenConnectToNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	open(t, ollamaLike, l.Addr().String())
	// A connection that was made waits in the backlog, where Accept finds it.
	require.NoError(t, l.(*net.TCPListener).SetDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = l.Accept()
	assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestPlaceholdersAreReadInHeadersPathsAndBodies(t *testing.T) {
	t.Setenv("HTTPLIFE_TEST_A", `quo"te`)
	file := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(file, []byte("from-file\n"), 0o600))
	f := newFake(t)
	f.answer("POST /load", 200, "")
	d := open(t, `{"load":{"path":"/load?k={file.`+file+`}","header":{"X-Key":["<{env.HTTPLIFE_TEST_A}>"]},
		"body":"{\"a\":\"{env.HTTPLIFE_TEST_A}\",\"nested\":{\"b\":{}},\"c\":\"{not one}\"}"}}`, f.addr)
	require.NoError(t, d.Load(t.Context(), lifecycle.Target{}))
	got := f.called("POST /load")[0]
	assert.Equal(t, "/load?k=from-file", got.uri)
	assert.Equal(t, `<quo"te>`, got.header.Get("X-Key"))
	assert.Equal(t, `{"a":"quo\"te","nested":{"b":{}},"c":"{not one}"}`, got.body)
}

func TestABraceAfterABackslashIsLiteral(t *testing.T) {
	f := newFake(t)
	f.answer("POST /load", 200, "")
	require.NoError(t, open(t, `{"load":{"path":"/load","body":"a \\{env.X\\} b \\{item} c"}}`, f.addr).Load(t.Context(), lifecycle.Target{}))
	assert.Equal(t, "a {env.X} b {item} c", f.called("POST /load")[0].body)
}

func TestSecretsAreNeverShown(t *testing.T) {
	secrets := map[string]string{"TOKEN": "tok/3n&<x>", "KEY": "k3y-in-path", "BODY": `b"ody-secret`}
	for name, value := range secrets {
		t.Setenv("HTTPLIFE_TEST_"+name, value)
	}
	const password = "p4ssw0rd-of-basic"
	basic := base64.StdEncoding.EncodeToString([]byte("user:" + password))
	config := `{
		"header":{"Authorization":["Bearer {env.HTTPLIFE_TEST_TOKEN}"],"X-Literal":["literal-secret"],"Proxy-Authorization":["Basic ` + basic + `"],"Cookie":["session=c00kie-value"]},
		"health":{"path":"/health?key={env.HTTPLIFE_TEST_KEY}&other=query-literal","loaded":"$.loaded"},
		"load":{"path":"/load?key={env.HTTPLIFE_TEST_KEY}","body":"{\"s\":\"{env.HTTPLIFE_TEST_BODY}\"}"},
		"unload":{"path":"/unload/{env.HTTPLIFE_TEST_KEY}/x"},
		"busy":{"path":"/busy?key={env.HTTPLIFE_TEST_KEY}","busy":"$.n"}}`
	hidden := []string{"tok/3n", "tok%2F3n", "k3y-in-path", `b"ody-secret`, `b\"ody-secret`, "literal-secret", basic, password, "c00kie-value", "query-literal"}
	check := func(t *testing.T, where, shown string) {
		t.Helper()
		assert.NotEmpty(t, shown, where)
		for _, secret := range hidden {
			assert.NotContains(t, shown, secret, where)
		}
		assert.NotContains(t, shown, "\n", where)
	}
	// A server that gives everything back which it was sent, in several forms.
	echo := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(500)
		asJSON, _ := json.Marshal(r.Header)
		_, _ = fmt.Fprintf(w, "%s\n%s\n%v\n%s", r.RequestURI, asJSON, r.Header, password)
	}
	f := newFake(t)
	for _, route := range []string{"GET /health", "POST /load", "POST /unload/k3y-in-path/x", "GET /busy"} {
		f.handle(route, echo)
	}
	bodyEcho := func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(500)
		var in map[string]string
		_ = json.NewDecoder(r.Body).Decode(&in)
		_, _ = fmt.Fprintf(w, "you said %s with %s, session %s, password %s", in["s"], r.Header.Get("Authorization"), r.Header.Get("Cookie"), password)
	}

	all := func(t *testing.T, upstream string, limit time.Duration) {
		d := open(t, config, upstream, probeTimeout(limit), unloadTimeout(limit))
		check(t, "probe", d.Probe(t.Context()).Detail)
		check(t, "load", d.Load(shortly(t), lifecycle.Target{}).Error())
		_, err := d.Unload(t.Context(), lifecycle.Target{})
		check(t, "unload", err.Error())
		_, err = d.Busy(t.Context(), lifecycle.Target{})
		check(t, "busy", err.Error())
		for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
			check(t, verb, fmt.Sprintf(verb, d))
		}
	}
	t.Run("echoed", func(t *testing.T) { all(t, f.addr, patience) })
	t.Run("echoed from the body", func(t *testing.T) {
		f.handle("POST /load", bodyEcho)
		err := open(t, config, f.addr).Load(t.Context(), lifecycle.Target{})
		check(t, "load", err.Error())
		assert.ErrorContains(t, err, "you said [redacted] with [redacted], session [redacted], password [redacted]")
	})
	t.Run("refused", func(t *testing.T) { all(t, lifecycletest.FreeAddress(t), patience) })
	t.Run("timed out", func(t *testing.T) {
		f := newFake(t)
		for _, route := range []string{"GET /health", "POST /load", "POST /unload/k3y-in-path/x", "GET /busy"} {
			f.handle(route, hangs(nil))
		}
		all(t, f.addr, 50*time.Millisecond)
	})
	t.Run("not JSON", func(t *testing.T) {
		f := newFake(t)
		f.answer("GET /busy", 200, "hello literal-secret")
		_, err := open(t, config, f.addr).Busy(t.Context(), lifecycle.Target{})
		check(t, "busy", err.Error())
	})
	t.Run("module", func(t *testing.T) {
		l, err := provision(t, config)
		require.NoError(t, err)
		for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
			check(t, verb, fmt.Sprintf(verb, l))
		}
		// What is written back is what was configured, not what it came to.
		out, err := json.Marshal(l)
		require.NoError(t, err)
		assert.Contains(t, string(out), "{env.HTTPLIFE_TEST_TOKEN}")
		assert.NotContains(t, string(out), "tok/3n")
	})
	t.Run("invalid value", func(t *testing.T) {
		t.Setenv("HTTPLIFE_TEST_TOKEN", "bad\nliteral-secret")
		t.Setenv("HTTPLIFE_TEST_KEY", "k3y-in-path with blank")
		_, err := provision(t, config)
		require.ErrorContains(t, err, "header Authorization: its value holds a control character")
		assert.NotContains(t, err.Error(), "literal-secret")
		assert.NotContains(t, err.Error(), "k3y-in-path")
	})
}

func TestAnExcerptIsShortAndOneLine(t *testing.T) {
	f := newFake(t)
	f.answer("POST /load", 500, "first\r\n\tsecond \x00\x1b[31m\xff "+strings.Repeat("ünï ", 500))
	err := open(t, `{"load":{"path":"/load"}}`, f.addr).Load(t.Context(), lifecycle.Target{})
	_, excerpt, found := strings.Cut(err.Error(), "wanted 2xx: ")
	require.True(t, found)
	assert.True(t, strings.HasPrefix(excerpt, "first second [31m? ünï"), excerpt)
	assert.LessOrEqual(t, len(excerpt), 200)
	assert.Greater(t, len(excerpt), 150)
	assert.NotContains(t, excerpt, "\n")
}

func TestWhatTellsThatTheServerWorksIsGivenOnce(t *testing.T) {
	_, err := provision(t, `{"busy":{"path":"/b","busy":"$.n","busy_metrics":["x"]}}`)
	require.ErrorContains(t, err, "busy: busy and busy_metrics are both given: keep one")
	for _, one := range []string{`"busy":"$.n"`, `"busy_metrics":["x"]`} {
		_, err := provision(t, `{"busy":{"path":"/b",`+one+`}}`)
		require.NoError(t, err, one)
	}
}

func TestEachRouteSaysOnlyWhatIsAskedOfIt(t *testing.T) {
	for config, want := range map[string]string{
		`{"health":{"path":"/h","loaded":"$.a","unloaded_on":[503]}}`:                                    "",
		`{"residency":{"path":"/r","loaded":"$.a","unloaded_on":[503,404]}}`:                             "",
		`{"health":{"path":"/h","unloaded_on":[199]}}`:                                                   "health: unloaded_on 199 is not a status",
		`{"load":{"path":"/l","unloaded_on":[503]}}`:                                                     "load: unloaded_on is only for health and residency",
		`{"health":{"path":"/h","busy_metrics":["x"]}}`:                                                  "health: busy_metrics is only for busy",
		`{"residency":{"path":"/r","names":"$.a","full_sizes_bytes":"$.b"}}`:                             "residency: full sizes without sizes",
		`{"residency":{"path":"/r","loaded":"$.a","sizes_mib":"$.b"}}`:                                   "residency: sizes without names",
		`{"residency":{"path":"/r","loaded":"$.a","loading":"$.b"}}`:                                     "residency: digests or loading without names",
		`{"health":{"path":"/h","success":"$.a"}}`:                                                       "health: success is only for load and unload",
		`{"jobs":{"path":"/jobs/{item}","id":"$.a","done":"$.b"}}`:                                       "",
		`{"jobs":{"path":"/jobs","id":"$.a","done":"$.b"}}`:                                              "jobs: path has no {item}",
		`{"jobs":{"path":"/jobs/{item}","id":"a","done":"$.b"}}`:                                         `jobs: id "a" is not a JSONPath`,
		`{"jobs":{"path":"/jobs/{item}","id":"$.a","done":"b"}}`:                                         `jobs: done "b" is not a JSONPath`,
		`{"model_prefix":"/library/"}`:                                                                   `model_prefix "/library/" must end with a slash, and not begin with one`,
		`{"model_prefix":"library/"}`:                                                                    "",
		`{"unload":{"path":"/u","body":"{}","for_each":{"path":"/l","values":"$.a"}}}`:                   "neither path nor body has {item}",
		`{"unload":{"path":"/u/{item}","for_each":{"path":"/l","values":"$.a"}}}`:                        "",
		`{"unload":{"path":"/u","body":"{\"m\":{item}}","for_each":{"path":"/l","values":"$.a"}}}`:       "",
		`{"unload":{"path":"/u/{model}","for_each":{"path":"/l","values":"$.a"}}}`:                       "",
		`{"unload":{"path":"/u/{item}","for_each":{"path":"/l","values":"a"}}}`:                          `unload: for_each: values "a" is not a JSONPath`,
		`{"unload":{"path":"/u/{item}","for_each":{"path":"/l","method":"FETCH","values":"$.a"}}}`:       `unload: for_each: method "FETCH" is unknown`,
		`{"unload":{"path":"/u/{item}","for_each":{"path":"/l","values":"$.a","header":{"b d":["x"]}}}}`: `unload: for_each: header: "b d" is not a header name`,
	} {
		_, err := provision(t, config)
		if want == "" {
			require.NoError(t, err, config)
			continue
		}
		require.ErrorContains(t, err, want, config)
		require.NotContains(t, err.Error(), "\n", "and that is all")
	}
}

func TestWhatWasAskedLastIsRememberedOnlyOfWhatCanBeAskedBothWays(t *testing.T) {
	const load, unload = `,"load":{"path":"/l"}`, `,"unload":{"path":"/u"}`
	for routes, ok := range map[string]bool{load + unload: true, load: false, unload: false, "": false} {
		_, err := provision(t, `{"health":{"path":"/h"},"remember":true`+routes+`}`)
		if ok {
			require.NoError(t, err, routes)
		} else {
			require.ErrorContains(t, err, "remember needs load and unload", routes)
		}
	}
}
