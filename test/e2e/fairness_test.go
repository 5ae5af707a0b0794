package e2e

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// duel is a site on which hot and cold compete for a card that holds one of
// them, with switch costs that were measured by loading each of them twice.
func duel(t *testing.T, global string, load, unload, run time.Duration) *site {
	hot, cold := plainModel("hot", 9), plainModel("cold", 9)
	for _, c := range []*consumer{&hot, &cold} {
		c.LoadTime, c.UnloadTime, c.RunTime = load, unload, run
	}
	s := start(t, layout{Global: global, Consumers: []consumer{hot, cold}})
	for _, name := range []string{"hot", "cold", "hot", "cold", "hot"} {
		s.serve(name)
	}
	return s
}

// loop sends requests one after the other from so many clients until ctx ends. wait returns when all have their answers.
func (s *site) loop(ctx context.Context, clients int, name string) (wait func()) {
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for ctx.Err() == nil {
				if a := s.post("/"+name+"/echo", "{}"); a.err != nil || a.status != 200 {
					s.t.Errorf("%s: %d %s %v", name, a.status, a.body, a.err)
					return
				}
			}
		})
	}
	return all.Wait
}

func (s *site) switchCost(name string) time.Duration {
	return time.Duration(s.status().Consumers[name].Slots[0].SwitchCostS * float64(time.Second))
}

// C2: four clients that never stop must not starve one request for another model.
func TestAlone_RequestForAColdModelIsServedWithinItsBoundThoughTheWarmOneNeverPauses(t *testing.T) {
	const run, load, unload = 30 * time.Millisecond, 60 * time.Millisecond, 10 * time.Millisecond
	s := duel(t, "hold 0.25\novertake_min 100ms", load, unload, run)
	bound := 15 * s.switchCost("cold")
	require.Greater(t, bound, 15*(load+unload))
	require.Less(t, bound, 30*(load+unload), "its switch cost was measured")

	ctx, end := context.WithCancel(context.Background())
	wait := s.loop(ctx, 4, "hot")
	defer wait()
	defer end()
	s.until("the warm model has a backlog", func() bool { return s.status().Consumers["hot"].Waiting >= 2 })
	a := s.post("/cold/echo", "{}")
	require.Equal(t, 200, a.status)
	t.Logf("bound B %s; served after %s", bound, a.took)
	require.GreaterOrEqual(t, a.took, bound, "the warm model's clients may overtake it for so long")
	// One drain, one unload and load, its own run, and what the machine takes.
	require.Less(t, a.took, bound+run+2*(load+unload)+run+150*time.Millisecond)
}

// C2: rival models with a backlog each share the card without spending it on switches.
func TestAlone_TwoModelsUnderPermanentBacklogKeepTheGPUBusy(t *testing.T) {
	const run, lasts = 60 * time.Millisecond, 8 * time.Second
	s := duel(t, "hold 0.25\novertake_min 100ms", 60*time.Millisecond, 10*time.Millisecond, run)
	ctx, end := context.WithTimeout(context.Background(), lasts)
	defer end()
	worked := func() int { return s.servers["hot"].Stats().Worked + s.servers["cold"].Stats().Worked }
	before, hot, cold := worked(), s.servers["hot"].Stats(), s.servers["cold"].Stats()
	waitHot, waitCold := s.loop(ctx, 4, "hot"), s.loop(ctx, 4, "cold")
	<-ctx.Done()
	busy := float64(time.Duration(worked()-before)*run) / float64(lasts)
	loads := s.servers["hot"].Stats().Loads - hot.Loads + s.servers["cold"].Stats().Loads - cold.Loads
	t.Logf("the GPU was %.0f %% busy, with %d loads in %s", 100*busy, loads, lasts)
	require.GreaterOrEqual(t, busy, .8)
	require.Greater(t, loads, 3, "neither starved")
	waitHot()
	waitCold()
	for name, st := range map[string]int{"hot": hot.Worked, "cold": cold.Worked} {
		require.Greater(t, s.servers[name].Stats().Worked-st, 20, name)
	}
}

// C3: an agent that thinks between its requests keeps its model.
func TestAlone_AgentsModelIsHeldBetweenItsRequests(t *testing.T) {
	const requests, every = 100, 10
	pass := func(hold string) (loads int) {
		s := duel(t, "overtake_min 100ms\nhold "+hold, 120*time.Millisecond, 20*time.Millisecond, 5*time.Millisecond)
		before := s.servers["hot"].Stats().Loads + s.servers["cold"].Stats().Loads
		asks, answered := make(chan struct{}, requests), make(chan struct{})
		go func() { // asks now and then: after each tenth of the agent's requests
			defer close(answered)
			for range asks {
				if a := s.post("/cold/echo", "{}"); a.status != 200 {
					t.Errorf("cold: %d %s %v", a.status, a.body, a.err)
				}
			}
		}()
		for i := range requests {
			require.Equal(t, 200, s.post("/hot/echo", "{}").status)
			if i%every == every-1 {
				asks <- struct{}{}
			}
			time.Sleep(3 * time.Millisecond) // it thinks: the pause is what the test is about
		}
		close(asks)
		<-answered
		return s.servers["hot"].Stats().Loads + s.servers["cold"].Stats().Loads - before
	}
	without, with := pass("0"), pass("0.25")
	t.Logf("loads in a pass of %d requests: %d without a hold, %d with it", requests, without, with)
	require.GreaterOrEqual(t, without, 6)
	require.LessOrEqual(t, 3*with, without)
}
