package scheduler

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func at(address string) func(*SlotConfig) { return func(c *SlotConfig) { c.Server = address } }
func of(name string) func(*SlotConfig)    { return func(c *SlotConfig) { c.Consumer = name } }

// A consumer loses its models while one of them works; the consumer as a whole must not be unloaded under it.
func TestAServerIsNotUnloadedUnderTheWorkOfAModelThatItHadBefore(t *testing.T) {
	f := given(t, 16384, server("m/a", 8000, at("x:1"), of("m")), server("b", 10000))
	f.warm("m/a", 8000)
	running := f.submit("m/a")
	f.requireRunning(running)
	f.reconfigure(func(c *Config) { c.Slots = []SlotConfig{server("m", 8000, at("x:1")), c.Slots[1]} })
	f.advance(time.Second)
	f.probe("m", Yes)
	f.requireState("m", Ready)
	h := f.submit("b")
	f.advance(5 * time.Minute)
	f.requireRunning(running)
	f.requireUnloads()
	f.release(running)
	f.advance(time.Minute)
	f.requireUnloads("m")
	f.requireWaiting(h)
}

// The same when its driver is to be replaced
func TestAStaleServerIsNotUnloadedUnderTheWorkOfAModelThatItHadBefore(t *testing.T) {
	f := given(t, 16384, server("m/a", 8000, starts, at("x:1"), of("m")))
	f.warm("m/a", 8000)
	running := f.submit("m/a")
	f.requireRunning(running)
	f.reconfigure(func(c *Config) {
		c.Slots = []SlotConfig{server("m", 8000, starts, at("x:1"), func(c *SlotConfig) { c.Stale = true })}
	})
	f.advance(time.Minute)
	f.requireRunning(running)
	f.requireUnloads()
	f.release(running)
	f.advance(time.Minute)
	f.requireUnloads("m")
}

// Of a server that the driver starts nobody may have said where it listens.
func TestAServerWithAPortOfItsOwnIsNotUnloadedUnderTheModelsThatItGets(t *testing.T) {
	f := given(t, 16384, server("m", 8000, starts))
	f.warm("m", 8000)
	running := f.submit("m")
	f.reconfigure(func(c *Config) { c.Slots = []SlotConfig{server("m/a", 8000, starts, of("m"))} })
	f.advance(time.Second)
	f.probe("m/a", Yes)
	h := f.submit("m/a")
	f.requireWaiting(h)
	f.release(running)
	f.requireRunning(h)
	f.requireUnloads()
}

func TestADeathThatIsToldBeforeTheSchedulerOnlyLocks(t *testing.T) {
	f := given(t, 16384, server("a", 8000, starts))
	f.warm("a", 8000)
	running := f.submit("a")
	f.step(Died{Slot: "a"})
	f.reconfigure(func(c *Config) { c.Mode = Locked })
	f.releaseAs(running, ServerDied)
	f.requireState("a", Ready)
	f.advance(time.Second)
	f.probe("a", Yes)
	h := f.submit("a")
	f.requireRunning(h)
	require.Empty(t, h.refusal)
}
