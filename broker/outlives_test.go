package broker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestWorkThatOutlivesItsAnswerAtAModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := newModels(t)
		defer w.Close()
		pass(10 * time.Second)
		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "a"})
		require.NoError(t, err)
		told := false
		require.True(t, w.WhenDone("m", time.Now(), func(time.Duration) { told = true }))
		pass(time.Minute)
		require.False(t, told, "it runs")
		l.Release(scheduler.Served)
		require.True(t, told)
	})
}

func TestWorkThatOutlivesItsAnswerWhereModelsHaveTakenItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, nil, server("m", gpu.GiB))
		defer w.Close()
		pass(10 * time.Second)
		l, err := w.Acquire(t.Context(), Request{Consumer: "m"})
		require.NoError(t, err)
		told := false
		require.True(t, w.WhenDone("m", time.Now(), func(time.Duration) { told = true }))
		w.servers["m"].traits.LoadModel, w.servers["m"].traits.UnloadModel = true, true
		c := server("m", gpu.GiB)
		c.Models = []*config.Model{{Name: "a"}}
		next := w.generation(t, nil, c)
		next.Keys["m"] = "another"
		w.reload(t, next)
		pass(time.Minute)
		require.False(t, told, "it runs")
		l.Release(scheduler.Served)
		require.True(t, told)
	})
}
