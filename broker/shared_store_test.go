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

// One has nothing new to say for hours: what it has learnt stays in the document all the same.
func TestH8_WhatAQuietProcessHasLearntStaysWhileAnotherGoesOnSaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &fakeStore{}
		keep := func(name string) *world {
			w := newWorld(t, nil, server(name, 4*gpu.GiB))
			w.current.Load().Store = store
			w.mu.Lock()
			w.keepLearnt(w.current.Load())
			w.mu.Unlock()
			return w
		}
		serve := func(w *world, name string) {
			l, err := w.Acquire(context.Background(), Request{Consumer: name})
			require.NoError(t, err)
			l.Release(scheduler.Served)
		}
		quiet := keep("quiet")
		defer quiet.Close()
		serve(quiet, "quiet")
		pass(saveEvery)
		synctest.Wait()
		busy := keep("busy")
		defer busy.Close()
		for range 3 {
			serve(busy, "busy")
			pass(saveEvery)
			synctest.Wait()
			doc, _ := store.now()
			learnt, err := decodeLearnt(doc)
			require.NoError(t, err)
			require.Contains(t, learnt, "quiet")
			require.Contains(t, learnt, "busy")
		}
		saves := store.saved()
		pass(10 * saveEvery)
		require.LessOrEqual(t, store.saved(), saves+1, "nothing new is written for nothing")
		busy.Close()
		quiet.Close()
		doc, _ := store.now()
		learnt, err := decodeLearnt(doc)
		require.NoError(t, err)
		require.Contains(t, learnt, "quiet")
		require.Contains(t, learnt, "busy")
	})
}

func TestThatAnotherProcessWritesThereIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &fakeStore{}
		one, logs := keeps(t, store, server("a", 4*gpu.GiB))
		defer one.Close()
		two, _ := keeps(t, store, server("b", 4*gpu.GiB))
		defer two.Close()
		for range 4 {
			one.serves(t, "a")
			two.serves(t, "b")
			pass(saveEvery)
			synctest.Wait()
		}
		require.Equal(t, 1, logs.FilterMessageSnippet("another Caddy").Len())
	})
}
