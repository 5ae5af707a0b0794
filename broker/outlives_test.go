package broker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

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
