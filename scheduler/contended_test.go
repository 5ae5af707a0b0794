package scheduler

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestH6_AJobIsContendedWhileOthersWaitForItsGPU(t *testing.T) {
	cloud := func(c *SlotConfig) { c.Cloud, c.GPUs = true, nil }
	for name, c := range map[string]struct {
		slots  []SlotConfig
		change func(*Config)
		warm   []string
		next   string // the slot that the second job is for; empty: there is none
		want   bool
	}{
		"nobody waits":                      {slots: []SlotConfig{server("a", 8000)}, warm: []string{"a"}},
		"for its memory":                    {slots: []SlotConfig{server("a", 8000), server("b", 12000)}, warm: []string{"a"}, next: "b", want: true},
		"for the lock":                      {slots: []SlotConfig{server("a", 4000), server("b", 4000)}, warm: []string{"a", "b"}, next: "b", want: true},
		"for its place":                     {slots: []SlotConfig{server("a", 8000)}, warm: []string{"a"}, next: "a", want: true},
		"it shares the lock":                {slots: []SlotConfig{server("a", 4000, lockNone), server("b", 4000, lockNone)}, warm: []string{"a", "b"}, next: "b"},
		"for another GPU":                   {slots: []SlotConfig{server("a", 8000), server("c", 4000, on(1)), server("d", 4000, on(1))}, warm: []string{"a", "c", "d"}, next: "c and d"},
		"for another GPU, one lock for all": {slots: []SlotConfig{server("a", 8000), server("c", 4000, on(1))}, change: func(c *Config) { c.LockGlobal = true }, warm: []string{"a", "c"}, next: "c", want: true},
		"it needs no GPU":                   {slots: []SlotConfig{server("a", 0, cloud), server("b", 4000)}, next: "b twice"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := defaults()
			cfg.Slots = c.slots
			if c.change != nil {
				c.change(&cfg)
			}
			f := givenConfig(t, cfg, 16384, 16384)
			for _, slot := range c.slots {
				told := NotTold
				if slot.CanTell {
					told = No
				}
				f.probe(slot.Name, told)
			}
			for _, name := range c.warm {
				f.warm(name, 4000)
			}
			first := f.submit("a")
			f.requireRunning(first)
			switch c.next {
			case "":
			case "c and d":
				f.requireRunning(f.submit("c"))
				f.requireWaiting(f.submit("d"))
			case "b twice":
				f.submit("b")
				f.requireWaiting(f.submit("b"))
			default:
				f.submit(c.next)
			}
			require.Equal(t, c.want, f.s.Contended(first.id))
			require.False(t, f.s.Contended(first.id+1000), "an unknown job")
			if c.want {
				f.release(first)
				require.False(t, f.s.Contended(first.id), "it has ended")
			}
		})
	}
}
