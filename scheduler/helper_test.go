package scheduler

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// defaults is a configuration with the contract's default figures and no slots.
func defaults() Config {
	return Config{
		MaxQueue: 512, MaxEvictions: 5,
		EvictWait: 10 * time.Second, DrainTimeout: 10 * time.Minute, AbandonAfter: 10 * time.Second, OutsiderWait: 10 * time.Second,
		Overtake: 15, Hold: 0.25, OvertakeMin: 30 * time.Second, OvertakeMax: 600 * time.Second, LockOvertake: 20 * time.Second,
	}
}

// server is a slot on GPU 0 whose server has every route: it can be loaded,
// unloaded and probed, and tells whether it is loaded. It may be evicted as soon as it is idle, unless set says more.
func server(name string, claim gpu.Bytes, set ...func(*SlotConfig)) SlotConfig {
	c := SlotConfig{Name: name, GPUs: []int{0}, Claim: claim * gpu.MiB, Concurrency: 1, CanLoad: true, CanUnload: true, CanProbe: true, CanTell: true}
	for _, f := range set {
		f(&c)
	}
	return c
}

// lazyServer loads inside its first job, and tells nothing of its residency (ComfyUI).
func lazyServer(name string, claim gpu.Bytes, set ...func(*SlotConfig)) SlotConfig {
	return server(name, claim, append([]func(*SlotConfig){func(c *SlotConfig) { c.CanLoad, c.CanTell = false, false }}, set...)...)
}

func pinned(c *SlotConfig)      { c.Pin = true }
func noEvict(c *SlotConfig)     { c.NoEvict = true }
func vramManaged(c *SlotConfig) { c.VRAMManaged = true }
func lockNone(c *SlotConfig)    { c.LockNone = true }
func async(c *SlotConfig)       { c.Async, c.CanBusy = true, true }
func asksBusy(c *SlotConfig)    { c.CanBusy = true }
func wide(n int) func(*SlotConfig) {
	return func(c *SlotConfig) { c.Concurrency = n }
}
func keepsWarm(d time.Duration) func(*SlotConfig) {
	return func(c *SlotConfig) { c.KeepAlive = d }
}

// idles is unloaded after so long without use.
func idles(d time.Duration) func(*SlotConfig) {
	return func(c *SlotConfig) { c.IdleTimeout = d }
}
func on(gpus ...int) func(*SlotConfig) { return func(c *SlotConfig) { c.GPUs = gpus } }
func coexists(names ...string) func(*SlotConfig) {
	return func(c *SlotConfig) { c.Coexist = names }
}

// fixture drives a State by hand, with a clock of its own. It wakes the state
// when that asked for it, answers questions whether a server works, and writes
// down what happened. It holds every step to the rules that hold always.
type fixture struct {
	t   *testing.T
	s   *State
	cfg Config
	now time.Time

	cards []Device // what the next sample says
	blind string   // … or why it says nothing

	works map[string]bool // servers that say that they work
	deaf  map[string]bool // servers whose busy route fails
	slow  map[string]bool // servers whose busy route has not answered yet: see tell
	asks  []ask
	asked int // questions to slow servers

	wake      time.Time
	jobs      map[JobID]*handle
	loads     []string
	unloads   []string
	epochs    map[string]uint64
	probes    []string
	renews    []string
	dropped   []string
	decisions []Decision
}

type ask struct {
	slot string
	at   time.Time
}

// handle is a job as its client sees it.
type handle struct {
	id      JobID
	slot    string
	running bool
	refusal *Refusal
}

// given starts a world with one GPU of so many MiB, all free but for what is
// said with free later. Every server answered its first probe: it is not loaded, if it can tell.
func given(t *testing.T, total gpu.Bytes, slots ...SlotConfig) *fixture {
	cfg := defaults()
	cfg.Slots = slots
	f := givenConfig(t, cfg, total)
	for _, c := range slots {
		told := NotTold
		if c.CanTell {
			told = No
		}
		f.probe(c.Name, told)
	}
	return f
}

// givenConfig starts a world in which nothing but the GPUs was seen yet.
func givenConfig(t *testing.T, cfg Config, totals ...gpu.Bytes) *fixture {
	t.Helper()
	f := &fixture{t: t, s: New(), now: time.Unix(1_000_000, 0), works: map[string]bool{}, deaf: map[string]bool{}, slow: map[string]bool{}, jobs: map[JobID]*handle{}, epochs: map[string]uint64{}}
	for i, total := range totals {
		f.cards = append(f.cards, Device{Index: i, UUID: fmt.Sprintf("GPU-%d", i), Total: total * gpu.MiB, Free: total * gpu.MiB, Known: true})
	}
	f.configure(cfg)
	f.sample()
	return f
}

func (f *fixture) configure(cfg Config) {
	f.t.Helper()
	f.cfg = cfg
	f.step(Configure{Config: cfg})
}

// reconfigure changes the configuration as it is.
func (f *fixture) reconfigure(change func(*Config)) {
	f.t.Helper()
	cfg := f.cfg
	cfg.Slots = slices.Clone(cfg.Slots)
	change(&cfg)
	f.configure(cfg)
}

// step takes one event through the state, and what follows from it at once.
func (f *fixture) step(e Event) []Effect {
	f.t.Helper()
	before := f.states()
	effects, wake := f.s.Step(f.now, e)
	effects = slices.Clone(effects)
	f.wake = wake
	for _, x := range effects {
		f.take(x)
	}
	if _, ok := e.(Configure); !ok {
		f.checkEdges(before, e)
	}
	f.answer()
	return effects
}

func (f *fixture) take(e Effect) {
	switch e.Kind {
	case Queued:
		f.jobs[e.Job] = &handle{id: e.Job, slot: e.Slot}
	case Admit:
		if f.jobs[e.Job] == nil {
			f.jobs[e.Job] = &handle{id: e.Job, slot: e.Slot}
		}
		require.False(f.t, f.jobs[e.Job].running || f.jobs[e.Job].refusal != nil, "a job of %s is admitted twice", e.Slot)
		f.jobs[e.Job].running = true
	case Refuse:
		if e.Job != 0 {
			require.False(f.t, f.jobs[e.Job].running || f.jobs[e.Job].refusal != nil, "a job of %s is refused after it was answered", e.Slot)
			f.jobs[e.Job].refusal = e.Refusal
		}
	case Load:
		f.loads, f.epochs[e.Slot] = append(f.loads, e.Slot), e.Epoch
	case StartUnload:
		f.unloads, f.epochs[e.Slot] = append(f.unloads, e.Slot), e.Epoch
		require.Zero(f.t, f.slot(e.Slot).Active, "%s is unloaded with a job running", e.Slot)
	case CheckBusy:
		if f.slow[e.Slot] {
			f.asked++
			return
		}
		f.asks = append(f.asks, ask{slot: e.Slot, at: f.now.Add(e.After)})
	case ProbeNow:
		f.probes = append(f.probes, e.Slot)
	case Renew:
		f.renews = append(f.renews, e.Slot)
		v := f.slot(e.Slot)
		require.Zero(f.t, v.Active+v.Held, "the driver of %s is replaced while it works", e.Slot)
		if f.s.cfg.Mode == Evicting {
			require.Equal(f.t, Idle.String(), v.State.String(), "the driver of %s is replaced while it holds something", e.Slot)
		}
	case Dropped:
		f.dropped = append(f.dropped, e.Slot)
	case Decided:
		f.decisions = append(f.decisions, *e.Decision)
		require.NotEmpty(f.t, e.Decision.Reason, "%s of %s gives no reason", e.Decision.Kind, e.Slot)
		require.NotEqual(f.t, "bug", e.Decision.Kind, e.Decision.Reason)
	}
}

// answer answers the questions that are due.
func (f *fixture) answer() {
	for i := 0; i < len(f.asks); i++ {
		if a := f.asks[i]; !f.now.Before(a.at) {
			f.asks = slices.Delete(f.asks, i, i+1)
			f.step(BusyAnswer{Slot: a.slot, Sent: f.now, Busy: f.works[a.slot] || f.deaf[a.slot], Failed: f.deaf[a.slot]})
			return
		}
	}
}

// tell is the answer of a slow server to a question that was sent then.
func (f *fixture) tell(name string, sent time.Time, busy bool) {
	f.t.Helper()
	f.step(BusyAnswer{Slot: name, Sent: sent, Busy: busy})
}

// advance lets time go by, waking the state whenever it asked for it.
func (f *fixture) advance(d time.Duration) {
	f.t.Helper()
	end := f.now.Add(d)
	for range 100_000 {
		next := end
		if !f.wake.IsZero() && f.wake.Before(next) {
			next = f.wake
		}
		for _, a := range f.asks {
			if a.at.Before(next) {
				next = a.at
			}
		}
		if next.After(f.now) {
			f.now = next
		}
		switch {
		case slices.ContainsFunc(f.asks, func(a ask) bool { return !f.now.Before(a.at) }):
			f.answer()
		case !f.wake.IsZero() && !f.now.Before(f.wake):
			at := f.wake
			f.step(Wake{})
			require.True(f.t, f.wake.IsZero() || f.wake.After(at), "woken at the time it asked for, it asks for the same again")
		case !f.now.Before(end):
			return
		}
	}
	f.t.Fatal("the state is woken without end")
}

// sample takes a look at the GPUs as they are.
func (f *fixture) sample() {
	f.t.Helper()
	if f.blind != "" {
		f.step(Sampled{At: f.now, Lost: f.blind})
		return
	}
	f.step(Sampled{At: f.now, Devices: slices.Clone(f.cards)})
}

// free sets what is free on GPU 0, in MiB, and looks at it.
func (f *fixture) free(mib gpu.Bytes) {
	f.t.Helper()
	f.cards[0].Free = mib * gpu.MiB
	f.sample()
}

// use changes what is free on GPU 0 by so much, in MiB, and looks at it.
func (f *fixture) use(mib gpu.Bytes) {
	f.t.Helper()
	f.cards[0].Free -= mib * gpu.MiB
	f.sample()
}

// probe is an answer to a probe that was sent just now.
func (f *fixture) probe(name string, loaded Tri) {
	f.t.Helper()
	f.step(Probed{Slot: name, Sent: f.now, Outcome: ProbeAnswered, Loaded: loaded, Resident: -1})
}

// submit sends a request.
func (f *fixture) submit(name string) *handle {
	f.t.Helper()
	return f.submitJob(Submit{Slot: name, Priority: 100})
}

func (f *fixture) submitJob(e Submit) *handle {
	f.t.Helper()
	first := f.step(e)[0]
	if first.Kind == Refuse {
		return &handle{slot: e.Slot, refusal: first.Refusal}
	}
	return f.jobs[first.Job]
}

func (f *fixture) release(h *handle) { f.t.Helper(); f.releaseAs(h, Served) }

func (f *fixture) releaseAs(h *handle, o Outcome) {
	f.t.Helper()
	require.True(f.t, h.running, "a job of %s is released that does not run", h.slot)
	f.step(Release{Job: h.id, Outcome: o})
	h.running = false
}

func (f *fixture) cancel(h *handle) { f.t.Helper(); f.step(Cancel{Job: h.id}) }

// loaded ends the load under way well.
func (f *fixture) loaded(name string) {
	f.t.Helper()
	f.step(LoadDone{Slot: name, Epoch: f.epochs[name]})
}

func (f *fixture) loadFails(name, why string) {
	f.t.Helper()
	f.step(LoadDone{Slot: name, Epoch: f.epochs[name], Err: why})
}

func (f *fixture) loadRunsOut(name string) {
	f.t.Helper()
	f.step(LoadDone{Slot: name, Epoch: f.epochs[name], Err: "CUDA out of memory", OutOfMemory: true})
}

func (f *fixture) loadPartly(name string) {
	f.t.Helper()
	f.step(LoadDone{Slot: name, Epoch: f.epochs[name], Err: "only 3GiB of the 4GiB came onto the GPU", Partly: true})
}

// unloaded is the end of an unload call, and the server's word that it is unloaded.
func (f *fixture) unloaded(name string) {
	f.t.Helper()
	f.step(UnloadDone{Slot: name, Epoch: f.epochs[name], Confirmed: true})
}

// answered is the end of an unload call that proves nothing.
func (f *fixture) answered(name string) {
	f.t.Helper()
	f.step(UnloadDone{Slot: name, Epoch: f.epochs[name]})
}

func (f *fixture) unloadFails(name string) {
	f.t.Helper()
	f.step(UnloadDone{Slot: name, Epoch: f.epochs[name], Err: "500 Internal Server Error"})
}

// evicted lets an unload end well, and so many MiB come back at once.
func (f *fixture) evicted(name string, mib gpu.Bytes) {
	f.t.Helper()
	f.requireState(name, Stopping)
	f.unloaded(name)
	f.use(-mib)
}

// warm makes a slot READY by serving one job, which takes so many MiB.
func (f *fixture) warm(name string, mib gpu.Bytes) {
	f.t.Helper()
	h := f.submit(name)
	if f.slot(name).State == Loading {
		f.advance(time.Second)
		f.loaded(name)
	}
	require.True(f.t, h.running, "%s does not run: %s", name, f.slot(name).Why)
	f.use(mib)
	f.release(h)
	f.requireState(name, Ready)
}

func (f *fixture) slot(name string) SlotView {
	f.t.Helper()
	for _, v := range f.s.Snapshot(f.now).Slots {
		if v.Name == name {
			return v
		}
	}
	f.t.Fatalf("there is no slot %s", name)
	return SlotView{}
}

// booking is what a slot is booked for on its first GPU, in MiB.
func (f *fixture) booking(name string) int64 { return f.slot(name).Holds[0].Booking.MiB() }

func (f *fixture) states() map[string]SlotState {
	m := map[string]SlotState{}
	for _, v := range f.s.Snapshot(f.now).Slots {
		m[v.Name] = v.State
	}
	return m
}

func (f *fixture) requireState(name string, want SlotState) {
	f.t.Helper()
	v := f.slot(name)
	require.Equal(f.t, want.String(), v.State.String(), "state of %s, whose jobs wait because: %s", name, v.Why)
}

func (f *fixture) requireRunning(hs ...*handle) {
	f.t.Helper()
	for _, h := range hs {
		require.Nil(f.t, h.refusal, "a job of %s was refused", h.slot)
		require.True(f.t, h.running, "a job of %s does not run: %s", h.slot, f.slot(h.slot).Why)
	}
}

func (f *fixture) requireWaiting(hs ...*handle) {
	f.t.Helper()
	for _, h := range hs {
		require.Nil(f.t, h.refusal, "a job of %s was refused", h.slot)
		require.False(f.t, h.running, "a job of %s runs", h.slot)
	}
}

func (f *fixture) requireRefused(h *handle, code Code) *Refusal {
	f.t.Helper()
	if h.refusal == nil {
		require.Fail(f.t, "not refused", "a job of %s waits because: %s", h.slot, f.slot(h.slot).Why)
	}
	require.Equal(f.t, code, h.refusal.Code, h.refusal.Message)
	return h.refusal
}

func (f *fixture) requireUnloads(names ...string) {
	f.t.Helper()
	require.Equal(f.t, append([]string{}, names...), append([]string{}, f.unloads...), "unloads")
}

func (f *fixture) requireLoads(names ...string) {
	f.t.Helper()
	require.Equal(f.t, append([]string{}, names...), append([]string{}, f.loads...), "loads")
}

// decided is the last line of the record of that kind about that slot.
func (f *fixture) decided(kind, slot string) Decision {
	f.t.Helper()
	for _, d := range slices.Backward(f.decisions) {
		if d.Kind == kind && d.Slot == slot {
			return d
		}
	}
	f.t.Fatalf("no %q of %q is in the record", kind, slot)
	return Decision{}
}

// through are edges that show only as the two that they consist of: a slot can
// leave the state between them in the step in which it came there.
var through = map[[2]SlotState]SlotState{
	{Stopping, Loading}: Idle, // its memory is back, and its own jobs wait
	{Ready, Loading}:    Idle, // it is seen to be gone, and its jobs wait
}

// checkEdges is the recorder: whatever a test does, a slot moves along edges of accounting §2 only.
func (f *fixture) checkEdges(before map[string]SlotState, e Event) {
	f.t.Helper()
	for name, after := range f.states() {
		was, known := before[name]
		edge := [2]SlotState{was, after}
		if !known || was == after || edges[edge] {
			continue
		}
		between, ok := through[edge]
		require.True(f.t, ok && edges[[2]SlotState{was, between}] && edges[[2]SlotState{between, after}],
			"%T takes %s from %s to %s", e, name, was, after)
	}
}

// lastJob is the newest running job of a slot.
func (f *fixture) lastJob(name string) (last *handle) {
	f.t.Helper()
	for _, h := range f.jobs {
		if h.slot == name && h.running && (last == nil || h.id > last.id) {
			last = h
		}
	}
	require.NotNil(f.t, last, "no job of %s runs", name)
	return last
}

// look lets time go by with a look at the GPUs every 50 ms, as NVML does in a hand-over.
func (f *fixture) look(d time.Duration) {
	f.t.Helper()
	for end := f.now.Add(d); f.now.Before(end); {
		f.advance(min(50*time.Millisecond, end.Sub(f.now)))
		f.sample()
	}
}

// outsiders is what programs that are none of ours hold of GPU 0, in MiB.
func (f *fixture) outsiders() int64 { return f.s.Snapshot(f.now).GPUs[0].Outsiders.MiB() }
