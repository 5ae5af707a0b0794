package broker

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestAModelNameOfAClientDoesNotCostWhatWasLearnt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := newModels(t)
		defer w.Close()
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "no such\x07 name"})
		if err == nil {
			l.Release(scheduler.Served)
		}
		w.mu.Lock()
		learnt := w.state.Learnt()
		w.mu.Unlock()
		doc, encErr := encodeLearnt(learnt)
		require.NoError(t, encErr)
		_, decErr := decodeLearnt(doc)
		require.NoError(t, decErr)
		require.Error(t, err)
	})
}

func TestATooLongModelNameIsUnknownNotQueueFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := newModels(t)
		defer w.Close()
		_, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: strings.Repeat("x", 300)})
		var r *Refused
		require.ErrorAs(t, err, &r)
		require.Equal(t, scheduler.UnknownConsumer, r.Code)
	})
}

func TestARemovedConsumerAdoptsNothingAndGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
		require.NoError(t, err)
		pass(10 * time.Second)
		next := w.generation(t, nil, server("other", gpu.GiB))
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		require.Equal(t, []string{"m/b"}, w.SlotNames("m"))
		m.tells(lifecycle.Model{Name: "b", Resident: -1}, lifecycle.Model{Name: "a", Resident: -1}) // somebody came past the broker
		pass(10 * time.Second)
		l.Release(scheduler.Served)
		pass(time.Minute)
		require.False(t, w.Knows("m"))
		require.Equal(t, 1, m.count(&m.closed))
	})
}

func TestARequestAdoptsNothingAtARemovedConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
		require.NoError(t, err)
		next := w.generation(t, nil, server("other", gpu.GiB))
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		_, err = w.Acquire(t.Context(), Request{Consumer: "m", Model: "x"})
		require.Error(t, err)
		l.Release(scheduler.Served)
		pass(time.Minute)
		require.False(t, w.Knows("m"))
		require.Equal(t, 1, m.count(&m.closed))
	})
}

func TestNamesThatCameToNothingMakeWayForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		c := server("m", 2*gpu.GiB)
		c.Models = []*config.Model{{Name: "a"}}
		w.gen = w.generation(t, nil, c)
		w.servers["m"].traits = lifecycle.Traits{Load: true, LoadModel: true, Unload: true, UnloadModel: true, Health: true}
		require.NoError(t, w.Push(w.gen))
		defer w.Close()
		pass(10 * time.Second)
		for i := range maxAdopted + 1 {
			w.servers["m"].mu.Lock()
			w.servers["m"].fail = context.Canceled
			w.servers["m"].mu.Unlock()
			_, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "x" + strings.Repeat("y", i)})
			var r *Refused
			require.ErrorAs(t, err, &r)
			require.Equal(t, scheduler.LoadFailed, r.Code, "%d: %s", i, r.Message)
		}
	})
}

// Drain of a consumer
func TestADrainedConsumersNewModelsAreDrainedToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		pass(10 * time.Second)
		require.NoError(t, w.Drain(t.Context(), "m"))
		require.NoError(t, w.Resume("m/a"))
		c := server("m", 2*gpu.GiB)
		c.Models = []*config.Model{{Name: "a"}, {Name: "b"}, {Name: "new"}}
		next := w.generation(t, nil, c)
		next.Lifecycles["m"] = m
		require.NoError(t, w.Push(next))
		w.Pop(w.gen)
		for _, model := range []string{"b", "new", "nobody-named-it"} {
			_, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: model})
			var r *Refused
			require.ErrorAs(t, err, &r)
			require.Equal(t, scheduler.Draining, r.Code, model)
		}
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "a"})
		require.NoError(t, err)
		l.Release(scheduler.Served)
	})
}

func TestAReloadThatAsksOfAKeptServerWhatItCannotDoIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("a", 4*gpu.GiB)) // it can't unload one of its models
		defer w.Close()
		c := server("a", 4*gpu.GiB)
		c.Models = []*config.Model{{Name: "m", VRAM: gpu.GiB}}
		require.ErrorContains(t, w.Push(w.generation(t, nil, c)), `consumer "a": it has models, but its unload route can't unload one by its name`)
		w.serves(t, "a")
	})
}

func TestRestoreIsRefusedForAServerThatNobodyCanLoad(t *testing.T) {
	cfg := &config.Broker{Restore: []config.Restore{{Consumer: "m"}}}
	require.ErrorContains(t, checkTraits(cfg, server("m", gpu.GiB), lifecycle.Traits{Unload: true}), "restore names it, but it has no load route")
	require.NoError(t, checkTraits(cfg, server("m", gpu.GiB), lifecycle.Traits{Unload: true, Load: true}))
	require.NoError(t, checkTraits(cfg, server("other", gpu.GiB), lifecycle.Traits{Unload: true}))
}

func TestRequireFullGPUIsRefusedWhereNoLoadIsJudged(t *testing.T) {
	whole, one := server("m", gpu.GiB), server("m", gpu.GiB)
	one.Models = []*config.Model{{Name: "a"}}
	started := lifecycle.Traits{Starts: true, Load: true, Unload: true, LoadModel: true, UnloadModel: true, FullGPUModel: true} // ollama, started by the broker
	require.ErrorContains(t, checkTraits(new(config.Broker), whole, started), "require_full_gpu, but its load route can't load it as a whole")
	require.NoError(t, checkTraits(new(config.Broker), one, started))
	all := lifecycle.Traits{Load: true, Unload: true, UnloadModel: true, FullGPU: true} // its models load inside their first requests
	require.NoError(t, checkTraits(new(config.Broker), whole, all))
	require.ErrorContains(t, checkTraits(new(config.Broker), one, all), "require_full_gpu and models, but its load route can't load one by its name")
}
