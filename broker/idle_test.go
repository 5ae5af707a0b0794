package broker

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// idleAfter unloads what nobody has used for so long.
func idleAfter(d time.Duration) func(*config.Broker) {
	return func(b *config.Broker) { b.IdleTimeout = new(caddy.Duration(d)) }
}

// job runs one at the fake server, as long as said.
func (w *world) job(t testing.TB, name string, lasts time.Duration) Lease {
	t.Helper()
	l, err := w.Acquire(context.Background(), Request{Consumer: name})
	require.NoError(t, err)
	w.servers[name].begin()
	pass(lasts)
	w.servers[name].end()
	return l
}

// B3: the race of an idle unload and a job that comes at that instant.
func TestAnIdleUnloadNeverMeetsAJob(t *testing.T) {
	const rounds = 10_000
	const timeout = time.Second
	for name, busyRoute := range map[string]bool{"without a busy route": false, "with a busy route": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, idleAfter(timeout), server("a", 4*gpu.GiB))
				defer w.Close()
				s := w.servers["a"]
				s.load, s.unload, s.asked = 5*time.Millisecond, 3*time.Millisecond, time.Millisecond
				s.traits.Busy = busyRoute
				if busyRoute { // its traits are read when it is opened
					next := w.generation(t, idleAfter(timeout), server("a", 4*gpu.GiB))
					next.Keys["a"] = "busy"
					require.NoError(t, w.Push(next))
					w.Pop(w.gen)
				}
				l := w.job(t, "a", 0)
				rng := rand.New(rand.NewPCG(1, 2))
				var late, met int
				for range rounds {
					offset := time.Duration(0) // exactly then
					switch rng.IntN(5) {
					case 0:
						offset = time.Duration(rng.IntN(3) - 1)
					case 1:
						offset = time.Duration(rng.Int64N(int64(10*time.Millisecond))) - 5*time.Millisecond
					case 2: // while the busy route is asked, or the unload call is out
						offset = time.Duration(rng.Int64N(int64(5 * time.Millisecond)))
					}
					// Which of the two comes first at the same instant depends on whose timer was set first.
					now := time.Now()
					early := make(chan struct{})
					ends := now.Add(time.Duration(rng.IntN(1000)) * time.Microsecond)
					timer := time.AfterFunc(ends.Add(timeout+offset).Sub(now), func() { close(early) })
					pass(ends.Sub(now))
					unloads, loads := s.count(&s.unloads), s.count(&s.loads)
					l.Release(scheduler.Served)
					if rng.IntN(2) == 0 {
						timer.Stop()
						pass(timeout + offset - time.Microsecond)
						pass(time.Microsecond) // its timer is set after the broker's
					} else {
						<-early
					}
					l = w.job(t, "a", time.Duration(rng.IntN(2000))*time.Microsecond)
					unloads, loads = s.count(&s.unloads)-unloads, s.count(&s.loads)-loads
					require.Equal(t, unloads, loads, "it is loaded again if, and only if, it was unloaded")
					require.LessOrEqual(t, loads, 1)
					switch {
					case offset < 0:
						require.Zero(t, unloads, "it was unloaded %s early", -offset)
					case offset > time.Millisecond || offset > 0 && !busyRoute:
						require.Equal(t, 1, unloads, "it was not unloaded %s after the time", offset)
					case unloads == 0:
						met++
					default:
						late++
					}
				}
				l.Release(scheduler.Served)
				require.Zero(t, s.count(&s.cut), "jobs met an unload")
				st := w.Status().Scheduler
				require.EqualValues(t, rounds+1, st.TotalJobs)
				require.Zero(t, st.Refused+st.Cancelled+st.Evictions+st.ManualUnloads+st.UnloadFailures)
				require.EqualValues(t, s.count(&s.loads), st.Loads)
				require.EqualValues(t, s.count(&s.unloads), st.IdleUnloads)
				require.EqualValues(t, st.IdleUnloads+1, st.Loads)
				t.Logf("of those that came at the very instant %d found it loaded, %d not", met, late)
				require.Positive(t, met, "no job ever came in time: the race is none")
				require.True(t, busyRoute || late > 0, "no job ever came too late: the race is none")
			})
		})
	}
}

func TestAnIdleServerIsUnloadedOnTimeThoughEverybodyLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, idleAfter(time.Minute), server("a", 4*gpu.GiB))
		defer w.Close()
		w.job(t, "a", time.Second).Release(scheduler.Served)
		ended := time.Now()
		require.Equal(t, stamp(ended.Add(time.Minute)), w.Status().Consumers["a"].UnloadAt)
		for range 59 {
			pass(time.Second)
			w.Status()
			w.Names()
			w.Decisions()
		}
		pass(time.Second - 1)
		synctest.Wait()
		require.Equal(t, "READY", w.Status().Consumers["a"].Slots[0].State)
		pass(time.Nanosecond)
		synctest.Wait()
		require.Equal(t, "STOPPING", w.Status().Consumers["a"].Slots[0].State)
		require.Empty(t, w.Status().Consumers["a"].UnloadAt)
		pass(2 * time.Second)
		require.EqualValues(t, 1, w.Status().Scheduler.IdleUnloads)
		require.Equal(t, "IDLE", w.Status().Consumers["a"].Slots[0].State)
	})
}

func TestAnIdleUnloadThatFailsIsTriedUntilItWorks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, idleAfter(time.Minute), server("a", 4*gpu.GiB))
		defer w.Close()
		s := w.servers["a"]
		s.unload, s.refuse = 0, errors.New("500 Internal Server Error")
		w.job(t, "a", time.Second).Release(scheduler.Served)
		pass(time.Minute + 7*time.Second + time.Millisecond) // after 0, 1, 3 and 7 s
		synctest.Wait()
		require.Equal(t, 4, s.count(&s.unloads))
		require.EqualValues(t, 4, w.Status().Scheduler.UnloadFailures)
		s.mu.Lock()
		s.refuse = nil
		s.mu.Unlock()
		pass(10 * time.Second)
		require.EqualValues(t, 1, w.Status().Scheduler.IdleUnloads)
	})
}

func TestAnUnloadByHandOfWhatIsIdleUnloadedJustNowIsDoneWithIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, idleAfter(time.Minute), server("a", 4*gpu.GiB))
		defer w.Close()
		w.job(t, "a", time.Second).Release(scheduler.Served)
		pass(time.Minute + time.Millisecond)
		require.NoError(t, w.UnloadByHand(context.Background(), "a", false))
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].unloads))
	})
}

func TestATouchIsUseOfEveryModelWithoutARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := newModels(t)
		defer w.Close()
		m.tells(lifecycle.Model{Name: "a", Resident: gpu.GiB}, lifecycle.Model{Name: "b", Resident: gpu.GiB})
		pass(10 * time.Second)
		require.Empty(t, w.Status().Consumers["m"].LastUsed)
		before := w.Status().Scheduler.TotalJobs
		w.Touch("m")
		w.Touch("nobody")
		for _, slot := range []string{"m/a", "m/b"} {
			v, _ := w.slot(slot)
			require.Equal(t, time.Now(), v.LastUse, slot)
		}
		require.Equal(t, stamp(time.Now()), w.Status().Consumers["m"].LastUsed)
		require.Equal(t, before, w.Status().Scheduler.TotalJobs)
	})
}

func TestAnUnloadByHandAsksAServerThatMayBeLoadedUnknownToUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
		defer w.Close()
		w.servers["a"] = newServer(w.gpu, 4*gpu.GiB)
		w.servers["a"].traits = lifecycle.Traits{Unload: true, Health: true} // it loads inside its first request, and does not tell
		w.gen = w.generation(t, nil, server("a", 4*gpu.GiB))
		require.NoError(t, w.Push(w.gen))
		pass(10 * time.Second)
		require.Equal(t, "IDLE", w.stateOf(t, "a"))
		require.NoError(t, w.UnloadByHand(t.Context(), "a", false))
		pass(10 * time.Second)
		require.Equal(t, 1, w.servers["a"].count(&w.servers["a"].unloads))
	})
}
