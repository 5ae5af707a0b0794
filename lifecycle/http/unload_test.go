package httplife_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/lifecycletest"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// goneFor is how long a server that starts anew is away: less than what it takes to be given up.
const goneFor = 300 * time.Millisecond

const unloadConfig = `{"health":{"path":"/health","loaded":"$.loaded"},"unload":{"path":"/unload"}}`

func TestUnloadIsConfirmedOnceTheServerSaysUnloaded(t *testing.T) {
	f := newFake(t)
	f.answer("POST /unload", 200, ``)
	f.handle("GET /health", inTurn(`{"loaded":true}`, `{"loaded":true}`, `{"loaded":false}`))
	confirmed, err := open(t, unloadConfig, f.addr).Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.True(t, confirmed)
	assert.Len(t, f.called("POST /unload"), 1)
	assert.Len(t, f.called("GET /health"), 3)
}

// FC-30: the reply comes before the unload, and nothing but memory can tell.
func TestFC30UnloadWithoutResidencyProbeIsNeverConfirmed(t *testing.T) {
	f := newFake(t)
	f.answer("POST /free", 200, ``)
	confirmed, err := open(t, `{"unload":{"path":"/free","body":"{\"unload_models\":true}"}}`, f.addr).Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.False(t, confirmed)
	assert.Equal(t, `{"unload_models":true}`, f.called("POST /free")[0].body)
}

func TestUnloadThatIsALieIsAnError(t *testing.T) {
	f := newFake(t)
	f.answer("POST /unload", 200, `{"success":true}`)
	f.answer("GET /health", 200, `{"loaded":true}`)
	confirmed, err := open(t, unloadConfig, f.addr, unloadTimeout(200*time.Millisecond)).Unload(t.Context(), lifecycle.Target{})
	assert.False(t, confirmed)
	assert.ErrorContains(t, err, "consumer mvoice: unload: the unload was accepted, but the server still says loaded")
}

func TestUnloadThatCanNotBeConfirmedSaysWhy(t *testing.T) {
	for name, c := range map[string]struct {
		health http.HandlerFunc
		want   string
	}{
		"hangs":       {hangs(nil), "can't be confirmed: health route GET /health did not answer"},
		"wrong":       {says(500, "boom"), "can't be confirmed: health route GET /health answered 500, wanted 2xx: boom"},
		"no such key": {says(200, "{}"), "does not say whether it is loaded: health route GET /health: the answer has no $.loaded"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.answer("POST /unload", 200, ``)
			f.handle("GET /health", c.health)
			confirmed, err := open(t, unloadConfig, f.addr, unloadTimeout(200*time.Millisecond), probeTimeout(50*time.Millisecond)).Unload(t.Context(), lifecycle.Target{})
			assert.False(t, confirmed)
			assert.ErrorContains(t, err, c.want)
		})
	}
}

func TestUnloadFailsWhereItsRouteDoes(t *testing.T) {
	f := newFake(t)
	f.answer("GET /health", 200, `{"loaded":false}`)
	f.answer("POST /unload", 409, `in use`)
	confirmed, err := open(t, unloadConfig, f.addr).Unload(t.Context(), lifecycle.Target{})
	assert.False(t, confirmed)
	assert.EqualError(t, err, "consumer mvoice: unload: unload route POST /unload answered 409, wanted 2xx: in use")
}

func TestUnloadAcceptsTheListedStatuses(t *testing.T) {
	f := newFake(t)
	f.answer("POST /unload", 400, `model is not running`)
	_, err := open(t, `{"unload":{"path":"/unload","accept":[200,400]}}`, f.addr).Unload(t.Context(), lifecycle.Target{})
	assert.NoError(t, err)
}

func TestUnloadTellsRefused(t *testing.T) {
	_, err := open(t, unloadConfig, lifecycletest.FreeAddress(t)).Unload(t.Context(), lifecycle.Target{})
	assert.ErrorIs(t, err, lifecycle.ErrRefused)
	_, err = open(t, ollamaLike, lifecycletest.FreeAddress(t)).Unload(t.Context(), lifecycle.Target{})
	assert.ErrorIs(t, err, lifecycle.ErrRefused)
}

func TestUnloadThatHangsEndsAtItsTimeOut(t *testing.T) {
	f := newFake(t)
	f.handle("POST /unload", hangs(nil))
	_, err := open(t, unloadConfig, f.addr, unloadTimeout(50*time.Millisecond)).Unload(t.Context(), lifecycle.Target{})
	assert.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "unload route POST /unload did not answer within")
}

func TestUnloadAfterWhichNothingListensIsLeftToTheMemory(t *testing.T) {
	f := newFake(t)
	f.handle("POST /unload", func(http.ResponseWriter, *http.Request) { _ = f.Listener.Close() })
	confirmed, err := open(t, unloadConfig, f.addr).Unload(t.Context(), lifecycle.Target{})
	assert.NoError(t, err)
	assert.False(t, confirmed)
}

// A server that unloads by starting anew is not there for a moment, and then says so itself.
func TestUnloadIsConfirmedByAServerThatComesBackAfterAMoment(t *testing.T) {
	f := newFake(t)
	back := make(chan struct{})
	var again net.Listener
	f.handle("POST /unload", func(http.ResponseWriter, *http.Request) {
		_ = f.Listener.Close()
		time.AfterFunc(goneFor, func() {
			defer close(back)
			var err error
			if again, err = net.Listen("tcp", f.addr); err != nil {
				return // the test says so
			}
			go func() { _ = http.Serve(again, says(200, `{"loaded":false}`)) }()
		})
	})
	confirmed, err := open(t, unloadConfig, f.addr).Unload(t.Context(), lifecycle.Target{})
	<-back
	require.NotNil(t, again, "its port could not be taken again")
	defer again.Close()
	require.NoError(t, err)
	assert.True(t, confirmed, "it was not away for long enough to be taken for gone")
}

func TestUnloadOfAServerThatStaysAwayEndsLongBeforeItsTimeOut(t *testing.T) {
	f := newFake(t)
	f.handle("POST /unload", func(http.ResponseWriter, *http.Request) { _ = f.Listener.Close() })
	began := time.Now()
	confirmed, err := open(t, unloadConfig, f.addr).Unload(t.Context(), lifecycle.Target{})
	took := time.Since(began)
	assert.NoError(t, err)
	assert.False(t, confirmed)
	assert.GreaterOrEqual(t, took, time.Second, "it may only be starting anew")
	assert.Less(t, took, patience/2)
}

// Each time that it is away counts by itself.
func TestUnloadOfAServerThatGoesAwayTwiceIsWaitedForAnew(t *testing.T) {
	for range 5 { // a crowded machine may bring it back too late
		if second := unloadsAndGoesTwice(t); !second.IsZero() {
			assert.GreaterOrEqual(t, time.Since(second), time.Second, "it may only be starting anew")
			return
		}
	}
	t.Fatal("the server was never back within a second")
}

// unloadsAndGoesTwice unloads a server that is away for a moment, answers once, and goes for good. It returns when; zero: it was given up before that.
func unloadsAndGoesTwice(t *testing.T) (second time.Time) {
	f := newFake(t)
	var mu sync.Mutex
	var again net.Listener
	over := false
	f.handle("POST /unload", func(http.ResponseWriter, *http.Request) {
		_ = f.Listener.Close()
		time.AfterFunc(goneFor, func() {
			mu.Lock()
			defer mu.Unlock()
			var err error
			if again, err = net.Listen("tcp", f.addr); err != nil || over {
				return
			}
			go func(l net.Listener) {
				_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					says(200, `{"loaded":true}`)(w, r)
					mu.Lock()
					defer mu.Unlock()
					if second.IsZero() {
						_ = l.Close()
						second = time.Now()
					}
				}))
			}(again)
		})
	})
	confirmed, err := open(t, unloadConfig, f.addr).Unload(t.Context(), lifecycle.Target{})
	mu.Lock()
	defer mu.Unlock()
	over = true
	if again != nil {
		_ = again.Close()
	}
	assert.NoError(t, err)
	assert.False(t, confirmed)
	return second
}

func TestForEachWhoseListFailsAtOnceIsAskedForOnce(t *testing.T) {
	for name, answer := range map[string]http.HandlerFunc{
		"an error": says(500, "boom"), "nonsense": says(200, "nonsense"), "no list of values": says(200, `{"models":[{"name":{}}]}`),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.handle("GET /api/ps", answer)
			began := time.Now()
			_, err := open(t, ollamaLike, f.addr).Unload(t.Context(), lifecycle.Target{})
			assert.Error(t, err)
			assert.Len(t, f.called("GET /api/ps"), 1)
			assert.Less(t, time.Since(began), patience/2)
		})
	}
}

func TestForEachWhoseListFailsLaterIsAskedForAgain(t *testing.T) {
	f := newFake(t)
	m := newModels(f, 0, "a")
	var asked atomic.Int32
	f.handle("GET /api/ps", func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 2 {
			http.Error(w, "boom", http.StatusInternalServerError)
			return
		}
		m.list(w, r)
	})
	confirmed, err := open(t, ollamaLike, f.addr).Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.True(t, confirmed)
	assert.Equal(t, []string{"a"}, m.asked)
}

func TestUnloadEndsWithItsContext(t *testing.T) {
	f := newFake(t)
	arrived := make(chan struct{}, 1)
	f.handle("POST /unload", hangs(arrived))
	d := open(t, unloadConfig, f.addr)
	endsWithContext(t, arrived, func(ctx context.Context) error { _, err := d.Unload(ctx, lifecycle.Target{}); return err })
}

func TestUnloadNotConfigured(t *testing.T) {
	_, err := open(t, `{}`, "127.0.0.1:1").Unload(t.Context(), lifecycle.Target{})
	assert.ErrorContains(t, err, "no unload route")
}

const ollamaLike = `{
	"residency":{"path":"/api/ps","loaded":"$.models"},
	"unload":{"path":"/api/generate","body":"{\"model\":{item},\"keep_alive\":0}","accept":[200,404],
		"for_each":{"path":"/api/ps","values":"$.models[*].name"}}}`

// models is a server with a list of models, from which unloaded ones vanish after some more looks.
type models struct {
	mu       sync.Mutex
	names    []string
	looks    map[string]int // how many more looks a name stays, once unloaded
	after    int
	asked    []string
	deaf     int // how many unloads are answered but not done
	lastLook int
}

func (m *models) list(w http.ResponseWriter, _ *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastLook++
	m.names = slices.DeleteFunc(m.names, func(n string) bool {
		left, dying := m.looks[n]
		m.looks[n] = left - 1
		if !dying {
			delete(m.looks, n)
		}
		return dying && left <= 0
	})
	entries := []map[string]any{}
	for _, n := range m.names {
		entries = append(entries, map[string]any{"name": n, "size_vram": 1 << 30})
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"models": entries})
}

func (m *models) unload(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Model     string `json:"model"`
		KeepAlive *int   `json:"keep_alive"`
	}
	body, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(body, &in); err != nil || in.KeepAlive == nil || *in.KeepAlive != 0 {
		http.Error(w, "bad body: "+string(body), http.StatusBadRequest)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked = append(m.asked, in.Model)
	if m.deaf > 0 {
		m.deaf--
		return
	}
	m.looks[in.Model] = m.after
}

func newModels(f *fake, after int, names ...string) *models {
	m := &models{names: names, looks: map[string]int{}, after: after}
	f.handle("GET /api/ps", m.list)
	f.handle("POST /api/generate", m.unload)
	return m
}

func TestForEachUnloadsEveryListedValueUntilTheListIsEmpty(t *testing.T) {
	f := newFake(t)
	m := newModels(f, 3, "llama3:8b", `odd "name"\`, "hf.co/a/b:Q4", "llama3:8b")
	confirmed, err := open(t, ollamaLike, f.addr).Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.True(t, confirmed)
	assert.Equal(t, []string{"llama3:8b", `odd "name"\`, "hf.co/a/b:Q4"}, m.asked)
	assert.GreaterOrEqual(t, m.lastLook, 5)
}

func TestForEachOfAnEmptyListCallsNothing(t *testing.T) {
	f := newFake(t)
	m := newModels(f, 0)
	confirmed, err := open(t, ollamaLike, f.addr).Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.True(t, confirmed)
	assert.Empty(t, m.asked)
}

func TestForEachAsksAgainForWhatIsStillListed(t *testing.T) {
	f := newFake(t)
	m := newModels(f, 0, "a")
	m.deaf = 1 // as if a request had set the model's timer anew
	confirmed, err := open(t, ollamaLike, f.addr).Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.True(t, confirmed)
	assert.Equal(t, []string{"a", "a"}, m.asked)
}

func TestForEachThatNeverEmptiesIsAnErrorWithNames(t *testing.T) {
	f := newFake(t)
	newModels(f, 1<<30, "a", "b", "c", "d", "e", "f", "g")
	_, err := open(t, ollamaLike, f.addr, unloadTimeout(200*time.Millisecond)).Unload(t.Context(), lifecycle.Target{})
	assert.ErrorContains(t, err, "still lists a, b, c, d, e, and 2 more")
}

func TestForEachTriesTheOthersWhereOneFails(t *testing.T) {
	f := newFake(t)
	newModels(f, 0, "a", "b")
	f.answer("POST /api/generate", 500, "boom")
	_, err := open(t, ollamaLike, f.addr).Unload(t.Context(), lifecycle.Target{})
	assert.ErrorContains(t, err, "a: unload route POST /api/generate answered 500, wanted 200 or 404: boom")
	assert.ErrorContains(t, err, "b: unload route")
	assert.Len(t, f.called("POST /api/generate"), 2)
}

func TestForEachWhoseListIsWrongIsAnError(t *testing.T) {
	for body, want := range map[string]string{
		`{"models":[{"name":{}}]}`: "it holds arrays or objects",
		`nonsense`:                 "unload: for_each route GET /api/ps: the answer is not JSON: nonsense",
	} {
		f := newFake(t)
		f.answer("GET /api/ps", 200, body)
		_, err := open(t, ollamaLike, f.addr).Unload(t.Context(), lifecycle.Target{})
		assert.ErrorContains(t, err, want)
	}
	// An answer without the list is not taken for an empty list.
	f := newFake(t)
	f.answer("GET /api/ps", 200, `{"error":"starting"}`)
	confirmed, err := open(t, ollamaLike, f.addr, unloadTimeout(100*time.Millisecond)).Unload(t.Context(), lifecycle.Target{})
	assert.False(t, confirmed)
	assert.Error(t, err)
}

func TestItemIsEscapedAsItsPlaceNeeds(t *testing.T) {
	const odd = `a/b "c"&d?`
	for name, c := range map[string]struct{ route, uri, body string }{
		"path":         {`"path":"/ps/{item}/x"`, `/ps/a%2Fb%20%22c%22&d%3F/x`, ""},
		"query":        {`"path":"/ps?m={item}"`, `/ps?m=a%2Fb+%22c%22%26d%3F`, ""},
		"JSON value":   {`"path":"/u","body":"{\"m\":{item}}"`, "/u", `{"m":"a/b \"c\"\u0026d?"}`},
		"JSON string":  {`"path":"/u","body":"{\"m\":\"models/{item}\"}"`, "/u", `{"m":"models/a/b \"c\"\u0026d?"}`},
		"JSON escapes": {`"path":"/u","body":"{\"q\\\"\":\"\",\"m\":{item}}"`, "/u", `{"q\"":"","m":"a/b \"c\"\u0026d?"}`},
		"plain":        {`"path":"/u","body":"model: {item}"`, "/u", `model: ` + odd},
		"form":         {`"path":"/u","header":{"content-type":["application/x-www-form-urlencoded"]},"body":"m={item}"`, "/u", `m=a%2Fb+%22c%22%26d%3F`},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.handle("GET /list", inTurn(`{"names":[`+quote(odd)+`]}`, `{"names":null}`))
			_, err := open(t, `{"unload":{`+c.route+`,"accept":[200,404],"for_each":{"path":"/list","values":"$.names"}}}`, f.addr).Unload(t.Context(), lifecycle.Target{})
			require.NoError(t, err)
			f.mu.Lock()
			defer f.mu.Unlock()
			assert.Equal(t, c.uri, f.calls[1].uri)
			assert.Equal(t, c.body, f.calls[1].body)
		})
	}
}

func TestItemsMayBeNumbers(t *testing.T) {
	f := newFake(t)
	f.handle("GET /list", inTurn(`[{"id":7},{"id":12345678901}]`, `[]`))
	f.answer("POST /u/7", 200, "")
	f.answer("POST /u/12345678901", 200, "")
	_, err := open(t, `{"unload":{"path":"/u/{item}","body":"{\"id\":{item}}","for_each":{"path":"/list","values":"$[*].id"}}}`, f.addr).Unload(t.Context(), lifecycle.Target{})
	require.NoError(t, err)
	assert.Equal(t, `{"id":12345678901}`, f.called("POST /u/12345678901")[0].body)
}
