package broker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestWhoWaitsForAModelThatWasRemovedIsServedThoughItsServerDied(t *testing.T) {
	for name, dies := range map[string]bool{"it died": true, "an answer broke off": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
				models := func(names ...string) *config.Consumer {
					c := server("m", gpu.GiB)
					for _, n := range names {
						c.Models = append(c.Models, &config.Model{Name: n})
					}
					return c
				}
				w.gen = w.generation(t, nil, models("a", "b"))
				traits := lifecycle.Traits{Load: true, Unload: true, Health: true, Residency: true, LoadModel: true, UnloadModel: true, Starts: true}
				w.servers["m"].traits = traits
				d := &supervised{fakeServer: w.servers["m"]}
				w.gen.Lifecycles["m"] = d
				require.NoError(t, w.Push(w.gen))
				defer w.Close()
				pass(time.Second)
				l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
				require.NoError(t, err)
				served := make(chan error, 1)
				go func() {
					next, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "b"})
					next.Release(scheduler.Served)
					served <- err
				}()
				synctest.Wait()
				next := w.generation(t, nil, models("a"))
				next.Lifecycles["m"] = d
				w.reload(t, next)
				pass(time.Second)
				if dies {
					w.died("m", w.servers["m"], "exit status 1")
				}
				l.Release(scheduler.ServerDied)
				pass(time.Minute)
				select {
				case err := <-served:
					require.NoError(t, err)
				default:
					v, _ := w.slot("m/b")
					t.Errorf("it waits still: %s, %q", v.State, v.Why)
					w.Close()
					require.Error(t, <-served)
				}
			})
		})
	}
}
