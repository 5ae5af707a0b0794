package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// fakeStore holds the document, and counts.
type fakeStore struct {
	mu     sync.Mutex
	doc    []byte
	aside  [][]byte
	loads  int
	saves  []time.Time // tried
	broken error
}

func (s *fakeStore) Load(context.Context) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loads++
	return s.doc, s.broken
}

func (s *fakeStore) Save(ctx context.Context, doc []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.saves = append(s.saves, time.Now())
	if until, bounded := ctx.Deadline(); !bounded || ctx.Err() != nil || time.Until(until).Round(time.Second) != 5*time.Second {
		return errors.New("no time is left, or too much")
	}
	if s.broken == nil {
		s.doc = bytes.Clone(doc)
	}
	return s.broken
}

func (s *fakeStore) SetAside(_ context.Context, doc []byte) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken == nil {
		s.aside, s.doc = append(s.aside, doc), nil
	}
	return "elsewhere", s.broken
}

func (s *fakeStore) set(broken error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = broken
}

// now is what became of it until now.
func (s *fakeStore) now() (doc []byte, saves []time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.doc, slices.Clone(s.saves)
}

func (s *fakeStore) saved() int {
	_, saves := s.now()
	return len(saves)
}

// keeps is a world whose broker keeps what it learns in a store, and its log.
func keeps(t testing.TB, store *fakeStore, consumers ...*config.Consumer) (*world, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.WarnLevel)
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	w.gen = w.generation(t, nil, consumers...)
	w.gen.Store, w.gen.Logger = store, zap.New(core)
	require.NoError(t, w.Push(w.gen))
	return w, logs
}

func TestWhatWasLearntIsSavedAtMostOnceAMinuteAndOnlyIfItChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &fakeStore{}
		w, logs := keeps(t, store, server("a", 4*gpu.GiB))
		defer w.Close()
		pass(10 * time.Minute)
		require.Zero(t, store.saved(), "nothing was learnt")
		w.serves(t, "a")
		pass(10 * time.Minute)
		require.Equal(t, 1, store.saved())
		for range 300 {
			w.serves(t, "a")
			pass(2 * time.Second)
		}
		require.InDelta(t, 11, store.saved(), 1)
		_, saves := store.now()
		for i, at := range saves[1:] {
			require.GreaterOrEqual(t, at.Sub(saves[i]), saveEvery)
		}
		w.serves(t, "a")
		n := store.saved()
		w.Close()
		require.Equal(t, n+1, store.saved(), "once more at the end")
		require.Empty(t, logs.All())
		require.Equal(t, 1+store.saved(), store.loads, "it is looked at before each save, in case another process writes there")

		var doc map[string]any
		require.NoError(t, json.Unmarshal(store.doc, &doc))
		require.EqualValues(t, 1, doc["version"])
		require.Contains(t, doc["consumers"], "a")
	})
}

func TestWhatWasLearntIsThereFromTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &fakeStore{}
		w, _ := keeps(t, store, server("a", 4*gpu.GiB), server("b", 14*gpu.GiB))
		w.servers["a"].load = 1234567891 * time.Nanosecond // no number of any roundness survives a careless way to write it
		w.serves(t, "a")
		pass(3 * time.Second)
		w.serves(t, "b")
		w.Close()
		before := w.Status().Consumers["a"]
		require.NotEmpty(t, before.LastUsed)
		saved := string(store.doc)

		w, logs := keeps(t, store, server("a", 4*gpu.GiB))
		after := w.Status().Consumers["a"]
		require.Equal(t, before.LastUsed, after.LastUsed)
		require.Equal(t, before.Slots[0].SwitchCostS, after.Slots[0].SwitchCostS)
		require.Equal(t, before.Slots[0].Measured, after.Slots[0].Measured)
		pass(10 * time.Minute)
		w.Close()
		require.Equal(t, saved, string(store.doc), "b is not there now, and not forgotten")
		require.Len(t, store.saves, 1, "nothing has changed")
		require.Empty(t, logs.All())
	})
}

func TestADocumentIsReadAsItWasWritten(t *testing.T) {
	in := map[string]scheduler.Learnt{}
	for i := range 2000 {
		d := time.Duration(i*i*i)*time.Microsecond + time.Duration(i*7919)
		in["a"] = scheduler.Learnt{LoadCost: d, UnloadCost: 3*d + 1, LastUse: time.Unix(int64(i)*1e6, int64(i)*7919).UTC(), LastPriority: i, Footprints: []gpu.Bytes{gpu.Bytes(i), 1 << 40}}
		doc, err := encodeLearnt(in)
		require.NoError(t, err)
		out, err := decodeLearnt(doc)
		require.NoError(t, err)
		require.Equal(t, in, out)
	}
}

func TestADocumentThatCannotBeReadIsSetAside(t *testing.T) {
	for name, doc := range map[string]string{
		"damaged":                   `{"version":1,"consumers":{"a":{"load_sec`,
		"empty":                     ``,
		"of another kind":           `[1,2]`,
		"of a newer version":        `{"version":2,"consumers":{}}`,
		"of no version":             `{"consumers":{}}`,
		"too large":                 `{"version":1,"consumers":{}}` + strings.Repeat(" ", learntMax),
		"with something behind it":  `{"version":1,"consumers":{}} {}`,
		"with a name that is none":  `{"version":1,"consumers":{"a b":{}}}`,
		"with a model that is none": `{"version":1,"consumers":{"a/b\u0001":{}}}`,
		"with a model without name": `{"version":1,"consumers":{"a/":{}}}`,
		"with a negative time":      `{"version":1,"consumers":{"a":{"load_seconds":-1}}}`,
		"with a time out of bounds": `{"version":1,"consumers":{"a":{"unload_seconds":1e300}}}`,
		"with a negative size":      `{"version":1,"consumers":{"a":{"footprints":[-1]}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := &fakeStore{doc: []byte(doc)}
				w, logs := keeps(t, store, server("a", 4*gpu.GiB))
				defer w.Close()
				require.Equal(t, [][]byte{[]byte(doc)}, store.aside)
				require.Len(t, logs.All(), 1)
				require.Contains(t, logs.All()[0].Message, "set aside")
				require.Equal(t, "elsewhere", logs.All()[0].ContextMap()["moved_to"])
				require.Empty(t, w.Status().Consumers["a"].LastUsed)
				w.serves(t, "a")
				w.Close()
				_, err := decodeLearnt(store.doc)
				require.NoError(t, err)
				require.Equal(t, 1+store.saved(), store.loads)
			})
		})
	}
}

func TestTroubleWithTheStoreCostsNothingElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &fakeStore{}
		w, logs := keeps(t, store, server("a", 4*gpu.GiB))
		defer w.Close()
		require.Empty(t, logs.TakeAll())
		store.set(errors.New("the network is down"))
		w.serves(t, "a")
		pass(3*time.Minute + time.Second)
		require.Equal(t, 3, store.saved(), "it is tried again")
		require.Len(t, logs.TakeAll(), 3)
		w.serves(t, "a")
		store.set(nil)
		pass(time.Minute)
		doc, _ := store.now()
		require.NotEmpty(t, doc)
		require.Empty(t, logs.All())
	})
}

func TestADocumentThatCannotBeReadIsNotWrittenOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &fakeStore{doc: []byte("good"), broken: errors.New("the network is down")}
		w, logs := keeps(t, store, server("a", 4*gpu.GiB))
		require.Len(t, logs.TakeAll(), 1)
		require.Empty(t, store.aside)
		store.set(nil)
		w.serves(t, "a")
		pass(3 * time.Minute)
		w.Close()
		doc, saves := store.now()
		require.Equal(t, "good", string(doc))
		require.Empty(t, saves)
	})
}

func TestADamagedDocumentThatCannotBeSetAsideIsSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &stubborn{fakeStore{doc: []byte("{")}}
		core, logs := observer.New(zapcore.WarnLevel)
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		defer w.Close()
		w.gen = w.generation(t, nil, server("a", 4*gpu.GiB))
		w.gen.Store, w.gen.Logger = store, zap.New(core)
		require.NoError(t, w.Push(w.gen))
		require.Equal(t, "read only", logs.All()[0].ContextMap()["error"])
		w.serves(t, "a")
		w.Close()
		require.Equal(t, "{", string(store.doc), "it is not written over")
	})
}

// stubborn is a store that can be read, and no more.
type stubborn struct{ fakeStore }

func (*stubborn) SetAside(context.Context, []byte) (string, error) {
	return "", errors.New("read only")
}

func TestWithoutAConfigurationTheStoreIsNotTouched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New()
		pass(10 * time.Minute)
		b.Close()

		store := &fakeStore{}
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		w.gen = w.generation(t, nil, server("a", 4*gpu.GiB))
		w.gen.Store = store // as for `caddy validate`
		pass(10 * time.Minute)
		w.Close()
		require.Zero(t, store.loads+len(store.saves))
	})
}

func TestTheDocumentIsReadOnceAndTheRulingConfigurationsStoreIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := &fakeStore{}, &fakeStore{}
		w, _ := keeps(t, first, server("a", 4*gpu.GiB))
		defer w.Close()
		w.serves(t, "a")
		next := w.generation(t, nil, server("a", 4*gpu.GiB))
		next.Store = second
		require.NoError(t, w.Push(next))
		pass(time.Minute + time.Second)
		require.Equal(t, 1, first.saved())
		w.Pop(w.gen)
		w.serves(t, "a")
		pass(time.Minute)
		require.Equal(t, 1, first.saved())
		require.Equal(t, 1, second.saved())
		require.Equal(t, 1, second.loads, "only to see whether another process writes there")
	})
}
