package simulate

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// card16 is a card of 16 GiB with servers of these sizes, named a, b, c …; each loads in 10 s and unloads in 2 s.
func card16(sizes ...gpu.Bytes) *World {
	w := (&mixer{}).world()
	w.GPUs = []gpu.Bytes{16 * gpu.GiB}
	for i, size := range sizes {
		w.Consumers = append(w.Consumers, Consumer{
			Slot: scheduler.SlotConfig{Name: string(rune('a' + i)), GPUs: []int{0}, Claim: size * gpu.GiB, Concurrency: 1, CanLoad: true, CanUnload: true},
			Load: Constant(10 * time.Second), Unload: Constant(2 * time.Second),
		})
	}
	return w
}

// at is a request that runs for 5 s.
func at(second int, consumer string) Request {
	return Request{At: time.Duration(second) * time.Second, Consumer: consumer, Service: 5 * time.Second}
}

func simulated(t *testing.T, w *World, o Options, requests ...Request) *Result {
	t.Helper()
	r, err := Run(context.Background(), w, requests, o)
	require.NoError(t, err)
	return r
}

func (r *Result) of(name string) Group {
	return *find(r.Consumers, func(g *Group) bool { return g.Name == name })
}

func TestAFirstRequestWaitsForTheLoadUnderEveryPolicy(t *testing.T) {
	for _, p := range Policies {
		r := simulated(t, card16(8), Options{Policy: p}, at(0, "a"))
		assert.Equal(t, 1, r.Loads, "%s", p)
		assert.Equal(t, 0, r.Evictions, "%s", p)
		assert.Equal(t, Waits{Mean: 10, P50: 10, P95: 10, P99: 10, Max: 10}, r.All.Wait, "%s", p)
		assert.InDelta(t, 15, r.Seconds, 1e-9, "%s", p)
		assert.InDelta(t, 5./15, r.Busy, 1e-9, "%s", p)
		assert.InDelta(t, 10./15, r.Switching, 1e-9, "%s", p)
	}
}

func TestAServerWithoutALoadRouteLoadsInsideItsFirstRequest(t *testing.T) {
	w := card16(8)
	w.Consumers[0].Slot.CanLoad = false
	r := simulated(t, w, Options{Policy: Bounded}, at(0, "a"), at(20, "a"))
	assert.Equal(t, 1, r.Loads)
	assert.InDelta(t, 10, r.All.Wait.Max, 1e-9)
	assert.InDelta(t, 5, r.All.Wait.Mean, 1e-9, "the second does not wait")
	assert.InDelta(t, 10./25, r.Busy, 1e-9, "a load is no work")
	assert.InDelta(t, 10./25, r.Switching, 1e-9)
}

func TestMemoryIsMadeOnlyWhereItIsNeeded(t *testing.T) {
	for _, p := range Policies {
		r := simulated(t, card16(8, 8), Options{Policy: p}, at(0, "a"), at(30, "b"), at(60, "a"), at(90, "b"))
		assert.Equal(t, 2, r.Loads, "%s: both fit", p)
		r = simulated(t, card16(9, 8), Options{Policy: p}, at(0, "a"), at(30, "b"), at(60, "a"), at(90, "b"))
		assert.Equal(t, 4, r.Loads, "%s: they don't fit", p)
		assert.Equal(t, 3, r.Evictions, "%s", p)
		assert.InDelta(t, 12, r.All.Wait.Max, 1e-9, "%s: an unload and a load", p)
	}
}

func TestConflictingServersAreNeverLoadedTogether(t *testing.T) {
	for _, p := range Policies {
		w := card16(4, 4)
		w.Consumers[1].Slot.Conflicts = []string{"a"}
		r := simulated(t, w, Options{Policy: p}, at(0, "a"), at(30, "b"), at(60, "a"))
		assert.Equal(t, 3, r.Loads, "%s", p)
	}
}

func TestFIFOServesInTheOrderOfSubmission(t *testing.T) {
	requests := []Request{at(0, "a"), at(1, "b"), at(2, "a"), at(3, "b")}
	fifo := simulated(t, card16(9, 9), Options{Policy: FIFO}, requests...)
	assert.Equal(t, 4, fifo.Loads, "it switches at each")
	assert.InDelta(t, 15+12+5+12+5+12-3, fifo.of("b").Wait.Max, 1e-9)
	collate := simulated(t, card16(9, 9), Options{Policy: Collate}, requests...)
	assert.Equal(t, 2, collate.Loads)
}

func TestFIFOEvictsTheLeastRecentlyUsedAndNoMoreThanNeeded(t *testing.T) {
	r := simulated(t, card16(4, 4, 8, 8), Options{Policy: FIFO}, at(0, "a"), at(20, "b"), at(40, "c"), at(60, "a"), at(80, "d"), at(120, "a"), at(140, "b"))
	assert.Equal(t, 1, r.of("a").Loads, "a is needed by none: without c alone there is room")
	assert.Equal(t, 1, r.of("b").Loads)
	assert.Equal(t, 1, r.Evictions)
}

func TestFIFOCarriesASwitchThrough(t *testing.T) {
	for name, patience := range map[string]time.Duration{"while what goes drains": 2, "while it is unloaded": 5, "while the load runs": 10} {
		hasty := at(11, "b")
		hasty.Patience = patience * time.Second
		r := simulated(t, card16(9, 9), Options{Policy: FIFO}, at(0, "a"), hasty, at(12, "a"))
		assert.Equal(t, 0, r.of("b").Served, "its client left %s", name)
		assert.Equal(t, 3, r.Loads, "its client left %s", name)
		assert.InDelta(t, 15+2+10+2+10-12, r.of("a").Wait.Max, 1e-9, "its client left %s", name)
	}
}

func TestFIFORefusesWhatNeverFits(t *testing.T) {
	w := card16(17, 9)
	r := simulated(t, w, Options{Policy: FIFO}, at(0, "a"), at(1, "b"))
	assert.Equal(t, 0, r.of("a").Served)
	assert.Equal(t, 1, r.of("b").Served)
	assert.Equal(t, r.All.Served, simulated(t, w, Options{Policy: Bounded}, at(0, "a"), at(1, "b")).All.Served)
}

func TestImpatientClientsLeaveAndComeBack(t *testing.T) {
	for _, p := range Policies {
		hasty := at(0, "a")
		hasty.Patience = 8 * time.Second
		once := simulated(t, card16(8), Options{Policy: p}, hasty)
		assert.Equal(t, 0, once.All.Served, "%s: the load takes 10 s", p)
		again := simulated(t, card16(8), Options{Policy: p, Tries: 2, RetryAfter: 5 * time.Second, RetryChance: 1}, hasty)
		assert.Equal(t, 1, again.All.Served, "%s: the load went on", p)
		assert.Equal(t, 1, again.Loads, "%s", p)
		assert.InDelta(t, 13, again.All.Wait.Max, 1e-9, "%s: from its first submission", p)
		never := simulated(t, card16(8), Options{Policy: p, Tries: 2, RetryAfter: 5 * time.Second, RetryChance: 0}, hasty)
		assert.Equal(t, 0, never.All.Served, "%s", p)
	}
}

func TestBudgetsBoundTheWaitUnderEveryPolicy(t *testing.T) {
	for _, p := range Policies {
		w := card16(8)
		w.Consumers[0].Slot.Budget = 12 * time.Second
		r := simulated(t, w, Options{Policy: p}, at(0, "a"), at(1, "a"), at(1, "a"))
		assert.Equal(t, 1, r.All.Served, "%s: the second would wait for 14 s", p)
	}
}

func TestAClientSendsItsNextRequestAfterItsAnswer(t *testing.T) {
	q := at(0, "a")
	q.Then = []FollowUp{{Think: 3 * time.Second, Service: time.Second}, {Think: 4 * time.Second, Service: 2 * time.Second}}
	r := simulated(t, card16(8), Options{Policy: Bounded}, q)
	assert.Equal(t, 3, r.All.Served)
	assert.InDelta(t, 10+5+3+1+4+2, r.Seconds, 1e-9)
	assert.InDelta(t, 10./3, r.All.Wait.Mean, 1e-9)
}

func TestPrioritiesCountUnlessTheyAreIgnored(t *testing.T) {
	requests := []Request{at(0, "a"), at(1, "a"), at(2, "a"), at(3, "a")}
	requests[3].Priority = -1
	r := simulated(t, card16(8), Options{Policy: Bounded}, requests...)
	assert.Equal(t, []int{-1, 0}, []int{r.Priorities[0].Priority, r.Priorities[1].Priority})
	assert.InDelta(t, 7, r.Priorities[0].Wait.Max, 1e-9, "it is the first after the load")
	r = simulated(t, card16(8), Options{Policy: Bounded, IgnorePriorities: true}, requests...)
	assert.InDelta(t, 10+3*5-3, r.Priorities[0].Wait.Max, 1e-9)
}

func TestServersOfDifferentGPUsWorkSideBySide(t *testing.T) {
	for _, p := range []Policy{Bounded, Collate} {
		w := card16(9, 9)
		w.GPUs = append(w.GPUs, 16*gpu.GiB)
		w.Consumers[1].Slot.GPUs = []int{1}
		r := simulated(t, w, Options{Policy: p}, at(0, "a"), at(0, "b"))
		assert.InDelta(t, 15, r.Seconds, 1e-9, "%s", p)
		assert.InDelta(t, 5./15, r.Busy, 1e-9, "%s", p)
	}
}

func TestCloudConsumersNeverWait(t *testing.T) {
	for _, p := range Policies {
		w := card16(9, 1)
		w.Consumers[1].Slot = scheduler.SlotConfig{Name: "b", Cloud: true, LockNone: true, Concurrency: 1}
		r := simulated(t, w, Options{Policy: p}, at(20, "b"), at(20, "b"))
		assert.Zero(t, r.All.Wait.Max, "%s", p)
		assert.Zero(t, r.Loads, "%s", p)
	}
}

func TestEqualSeedsGiveEqualResults(t *testing.T) {
	for _, p := range Policies {
		o := Options{Policy: p, Seed: 5, Tries: 3, RetryAfter: time.Second, RetryChance: .5}
		hasty := func(_ *World, requests []Request) {
			for i := range requests {
				requests[i].Patience = 100 * time.Second
			}
		}
		a, b := runMix(t, "hot", .9, "", hasty, o), runMix(t, "hot", .9, "", hasty, o)
		assert.Equal(t, a, b, "%s", p)
		o.Seed++
		assert.NotEqual(t, a, runMix(t, "hot", .9, "", hasty, o), "%s", p)
	}
}

func TestTheKthLoadTakesTheSameUnderEveryPolicy(t *testing.T) {
	times := map[Policy][]time.Duration{}
	for _, p := range Policies {
		w, requests := mixed(t, "hot", .5, 3, "")
		for i := range w.Consumers {
			load := w.Consumers[i].Load
			if i == 0 {
				w.Consumers[i].Load = func(r *rand.Rand) time.Duration {
					d := load(r)
					times[p] = append(times[p], d)
					return d
				}
			}
		}
		simulated(t, w, Options{Policy: p, Seed: 3}, requests...)
	}
	n := min(len(times[Bounded]), len(times[Collate]), len(times[FIFO]))
	require.Greater(t, n, 20)
	assert.Equal(t, times[Bounded][:n], times[Collate][:n])
	assert.Equal(t, times[Bounded][:n], times[FIFO][:n])
}

func TestARunIsStoppedWhereItIsToldTo(t *testing.T) {
	var requests []Request
	for i := range 100 {
		requests = append(requests, at(i, "a"))
	}
	r := simulated(t, card16(8), Options{Policy: Bounded, StopAfter: 20 * time.Second}, requests...)
	assert.LessOrEqual(t, r.Seconds, 119.)
	assert.Equal(t, 100, r.All.Served+r.Unfinished)
	assert.Greater(t, r.Unfinished, 70)
}

func TestARunEndsWithItsContext(t *testing.T) {
	stop := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(stop)
	_, err := Run(ctx, card16(8), []Request{at(0, "a")}, Options{Policy: Bounded})
	assert.ErrorIs(t, err, stop)
}

func TestAWorldThatIsWrongIsRefused(t *testing.T) {
	run := func(w *World, o Options, q ...Request) string {
		_, err := Run(context.Background(), w, q, o)
		if err == nil {
			return ""
		}
		return err.Error()
	}
	bounded := Options{Policy: Bounded}
	assert.Contains(t, run(card16(8), bounded, at(0, "z")), `consumer "z", which is not there`)
	assert.Contains(t, run(card16(8), Options{Policy: "lifo"}), `unknown policy "lifo": allowed: bounded, collate, fifo`)
	w := card16(8, 8)
	w.Consumers[1].Slot.Name = "a"
	assert.Contains(t, run(w, bounded), `two consumers named "a"`)
	w = card16(8)
	w.Consumers[0].Load = nil
	assert.Contains(t, run(w, bounded), "no load and unload times")
	w = card16(8)
	w.Consumers[0].Slot.GPUs = []int{1}
	assert.Contains(t, run(w, bounded), "on GPU 1, and there are 1")
	w.GPUs = nil
	assert.Contains(t, run(w, bounded), "no GPU")
}

func TestTheLimitIsFound(t *testing.T) {
	var requests []Request
	for i := range 2000 {
		requests = append(requests, at(10*i, "a")) // the GPU works for half of the time
	}
	for _, p := range Policies {
		l, err := FindLimit(context.Background(), card16(8), requests, Options{Policy: p})
		require.NoError(t, err)
		assert.InEpsilon(t, 2, l.Multiple, .08, "%s", p)
		assert.False(t, l.AtLeast)
	}
	for i := range requests { // now they alternate, and each needs a switch under FIFO: 17 s of work every 10 s
		requests[i].Consumer = []string{"a", "b"}[i%2]
	}
	l, err := FindLimit(context.Background(), card16(9, 9), requests, Options{Policy: FIFO})
	require.NoError(t, err)
	assert.InEpsilon(t, 10./17, l.Multiple, .08)
	l, err = FindLimit(context.Background(), card16(9, 9), requests, Options{Policy: Bounded})
	require.NoError(t, err)
	assert.Greater(t, l.Multiple, 1.2)
}

func TestTheSearchForTheLimitEndsWithItsTime(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	l, err := FindLimit(ctx, card16(8), []Request{at(0, "a"), at(10, "a")}, Options{Policy: Bounded})
	require.NoError(t, err)
	assert.Equal(t, Limit{AtLeast: true}, l)
	_, err = Compare(ctx, card16(8), []Request{at(0, "a")}, Policies, Options{}, time.Second)
	assert.ErrorIs(t, err, context.Canceled)
}

func TestPoliciesAreShownSideBySide(t *testing.T) {
	urgent := at(40, "b")
	urgent.Priority = -5
	c, err := Compare(context.Background(), card16(9, 9), []Request{at(0, "a"), at(1, "b"), at(2, "a"), urgent}, Policies, Options{}, time.Second)
	require.NoError(t, err)
	var b strings.Builder
	require.NoError(t, c.Write(&b))
	text := b.String()
	t.Log(text)
	assert.Contains(t, text, "4 requests in 40s on 16GiB; alone they would keep the busiest GPU busy for 50.0 % of the time.")
	assert.Contains(t, text, "a 9GiB, loads in 10.0 s, unloads in 2.00 s;")
	assert.Regexp(t, `(?m)^ +bounded +collate +fifo$`, text)
	assert.Regexp(t, `(?m)^loads +2 +2 +4$`, text)
	assert.Regexp(t, `(?m)^sustains, times the load( +>= 2\.\d+){3}$`, text)
	assert.Regexp(t, `(?m)^all: 4 requests\n  served( +100\.0 %){3}$`, text)
	assert.Contains(t, text, "\nb: 2 requests\n")
	assert.Contains(t, text, "\npriority -5: 1 requests\n")
}

func TestSchedulersThatLoadNothingAreSimulated(t *testing.T) {
	for _, p := range Policies {
		w := card16(9, 9)
		w.Settings.Mode = scheduler.Locked
		r := simulated(t, w, Options{Policy: p}, at(0, "a"), at(0, "b"))
		assert.Zero(t, r.Loads, "%s", p)
		assert.InDelta(t, 5, r.All.Wait.Max, 1e-9, "%s: one after the other", p)
		w.Settings.Mode = scheduler.Passthrough
		r = simulated(t, w, Options{Policy: p}, at(0, "a"), at(0, "b"))
		assert.Zero(t, r.All.Wait.Max, "%s", p)
	}
}

// Whatever the servers are, a trace comes to an end, and whoever waits long enough is served.
func TestEverybodyIsServedInRandomWorlds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := card16()
		w.GPUs = make([]gpu.Bytes, rapid.IntRange(1, 2).Draw(t, "GPUs"))
		for i := range w.GPUs {
			w.GPUs[i] = 16 * gpu.GiB
		}
		if rapid.Bool().Draw(t, "cushion") {
			w.Settings.Cushion = nil
		}
		n := rapid.IntRange(1, 5).Draw(t, "servers")
		for i := range n {
			c := Consumer{Load: Constant(time.Duration(rapid.IntRange(0, 40).Draw(t, "load")) * time.Second),
				Unload: Constant(time.Duration(rapid.IntRange(0, 5).Draw(t, "unload")) * time.Second)}
			c.Slot = scheduler.SlotConfig{Name: string(rune('a' + i)), GPUs: []int{i % len(w.GPUs)}, Claim: gpu.Bytes(rapid.IntRange(1, 15).Draw(t, "size")) * gpu.GiB,
				Concurrency: rapid.IntRange(1, 3).Draw(t, "concurrency"), CanUnload: true, CanLoad: rapid.Bool().Draw(t, "can load"),
				LockNone: rapid.Bool().Draw(t, "lock none") && rapid.Bool().Draw(t, "really lock none"), KeepAlive: time.Duration(rapid.IntRange(0, 20).Draw(t, "keep-alive")) * time.Second}
			if rapid.Bool().Draw(t, "idles") {
				w.Settings.IdleUnload, c.Slot.IdleTimeout = scheduler.IdleOn, time.Duration(rapid.IntRange(1, 60).Draw(t, "idle"))*time.Second
			}
			if i > 0 && rapid.IntRange(0, 4).Draw(t, "conflicts") == 0 {
				c.Slot.Conflicts = []string{"a"}
			}
			w.Consumers = append(w.Consumers, c)
		}
		var requests []Request
		for range rapid.IntRange(1, 60).Draw(t, "requests") {
			q := at(rapid.IntRange(0, 600).Draw(t, "at"), w.Consumers[rapid.IntRange(0, n-1).Draw(t, "server")].Slot.Name)
			q.Service = time.Duration(rapid.IntRange(0, 30).Draw(t, "service")) * time.Second
			q.Priority = rapid.IntRange(0, 2).Draw(t, "priority")
			requests = append(requests, q)
		}
		for _, p := range Policies {
			r, err := Run(context.Background(), w, requests, Options{Policy: p})
			if err != nil {
				t.Fatal(p, err)
			}
			if r.All.Served != len(requests) || r.Unfinished != 0 {
				t.Fatalf("%s: %d of %d served", p, r.All.Served, len(requests))
			}
		}
	})
}
