package broker

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Each has learnt of its own model; both write every minute.
func TestH8_TwoProcessesWithOneDataFolderKeepWhatBothHaveLearnt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &fakeStore{}
		var worlds []*world
		for _, name := range []string{"a", "b"} {
			w := newWorld(t, nil, server(name, 4*gpu.GiB))
			defer w.Close()
			w.current.Load().Store = store
			w.mu.Lock()
			w.keepLearnt(w.current.Load())
			w.mu.Unlock()
			l, err := w.Acquire(context.Background(), Request{Consumer: name})
			require.NoError(t, err)
			l.Release(scheduler.Served)
			worlds = append(worlds, w)
		}
		for range 3 {
			pass(saveEvery)
			synctest.Wait()
			for i, name := range []string{"a", "b"} {
				l, err := worlds[i].Acquire(context.Background(), Request{Consumer: name})
				require.NoError(t, err)
				l.Release(scheduler.Served)
			}
		}
		doc, _ := store.now()
		learnt, err := decodeLearnt(doc)
		require.NoError(t, err)
		require.Contains(t, learnt, "a")
		require.Contains(t, learnt, "b")
	})
}
