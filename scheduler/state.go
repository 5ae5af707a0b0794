package scheduler

import (
	"fmt"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// State is all that the scheduler knows. Step alone changes it. It is not safe
// for concurrent use: its driver guards it.
type State struct {
	cfg    Config
	slots  []*slot // in the order of the config; removed ones last
	epochs uint64  // the latest of any slot
	named  map[string]*slot
	gpus   []*card // in the order of their index
	locks  []*lock // of all GPUs that slots were ever on, seen or not

	lending   bool // a GPU is lent
	conflicts bool // some slots may never be resident together

	crowded bool // several compute on a GPU, as an earlier configuration let them: a lock that is given back has another owner

	jobs      slab
	deadlines deadlines
	waiting   int    // jobs in all queues, and those whose client cools down
	bulk      int    // … of them those that reserved places are not for
	resting   rests  // clients that may not start another job yet
	running   int    // admitted jobs, held ones included
	sampled   bool   // a sample, or the news that there is none, has come
	blind     string // why there is no telemetry; empty: there is
	draining  bool   // no more jobs are let in
	ending    bool   // … and never will be: the process ends

	past map[string]Learnt // of slots that are not there: from before a restart, or removed since

	counts Counts

	// What the current step says.
	effects  []Effect
	wake     time.Time
	planning bool // cold targets are being planned
	spare    spare
}

// spare is space that is used again and again, and means nothing from one step to the next.
type spare struct {
	slots        []*slot
	present      []*slot  // while cold targets are planned: the slots that hold or move anything
	targets      []ranked // by their turn
	blanks       []*sheet
	able, chosen []*slot // of the latest choice of victims
}

// Counts are totals since the start.
type Counts struct {
	Jobs           uint64 // submitted
	Ended          uint64 // admitted and ended
	Cancelled      uint64 // left while they waited
	Refused        uint64
	Evictions      uint64 // successful unloads made for room
	ManualUnloads  uint64
	IdleUnloads    uint64
	UnloadFailures uint64
	Loads          uint64
	LoadFailures   uint64
	LastWait       time.Duration
}

// card is one GPU.
type card struct {
	Device
	seenAt time.Time // when the sample was taken that told Free
	doubt  time.Time // a load ended: what it took, and may give back later, no sample from before has seen
	ebbs   time.Time // until then what a server that has gone leaves may become free, which is soon after its death

	reserved *slot // within one planning: an overdue target that no other may be served before

	base  *sheet // within one planning: who holds what
	rooms [2]struct {
		known bool
		gone  []*slot
		room  gpu.Bytes
	} // … and what newcomers may take, as things are and with some unloaded

	lentUntil time.Time // nothing is loaded or run there before; zero: it is not lent
}

// lock is the lock of one GPU. It is there whether the GPU was ever seen or not.
type lock struct {
	gpu   int
	owner *slot // who computes
}

type health uint8

const (
	healthUnknown health = iota // no probe has answered yet
	healthGood
	healthBad
)

// slot is one resident instance: the unit of residency.
type slot struct {
	cfg   SlotConfig
	order int
	gone  bool // not in the config any more: serves who waits, then goes

	state     SlotState
	epoch     uint64    // of the load or unload under way
	since     time.Time // when the last change of state, or the use that casts doubt on older probes, ended
	on        []*holding
	settled   bool      // a job has ended since the load, or the load was not ours
	settledAt time.Time // when; zero: the load was not ours

	health   health
	detail   string // of the last bad probe
	timeouts int    // in a row

	queue      queue
	parked     int // jobs that wait for the rest of their client
	active     int
	bulk       int       // active jobs that reserved places are not for
	held       int       // ended jobs whose work goes on at the server
	heldAt     time.Time // the last of them
	orphans    int       // … of them those that nobody waits for: they end after drain_timeout at the latest
	leftBy     time.Time // … when the last of them was broken off
	first      JobID     // the job inside which a lazy server loads
	warming    bool      // … which counts as a transition until it ends
	firstLeft  bool      // … whose client has left
	started    int       // jobs started since READY
	loadedAt   time.Time // since when it is loaded, unloads that failed or go on included; zero: it is not, as far as was seen
	readyAt    time.Time
	idleAt     time.Time     // later of READY and the last job's end
	leftAt     time.Time     // the last departure of one who waited
	credit     credit        // of those who left before they were served
	keep       time.Time     // until then it is no victim: a job asked for it
	warmFor    time.Duration // idle time that the last job asked for; 0: the slot's own
	lastUse    time.Time     // end of the last real work
	lastPrio   int
	recalled   bool      // its last use, and the priority of that, are known from before a restart
	observed   time.Time // the idleAt for which it was said that it would be unloaded
	draining   bool      // no more jobs are let in
	lent       bool      // one of its GPUs is: nothing is loaded or run there
	pin        *bool     // said by hand; nil: the configuration's word
	restoring  bool      // it is being loaded again since its GPU is idle
	evicted    bool      // it was unloaded for another, and not asked for since
	dead       string    // how its server ended, while jobs that ran there have not ended yet; empty: it lives
	clean      bool      // … and that was no failure
	suspect    time.Time // when a connection to a server that the driver starts broke off or was refused: nothing enters before a later probe tells whether it lives
	refusedAt  time.Time // when its server refused a connection, while jobs that ran there have not ended yet; zero: it did not, or has served one since
	returns    bool      // IDLE: its process ended while it was loaded, and its server can't tell whether the next one is: its memory tells
	loadsUntil time.Time // UNKNOWN after a load that was abandoned and could not be unloaded: it may go on until then, and its server say "not loaded" meanwhile
	deaths     int       // in a row, each soon after it was loaded
	reviving   bool      // it is to be loaded again since its server died
	renewing   bool      // it was said that its driver may be replaced

	gate      gate
	asking    bool      // a CheckBusy is on its way
	muteSince time.Time // since when every CheckBusy failed; zero: the last was answered
	stop      stopping
	unloaded  bool      // its unload route was called since the start
	flushedAt time.Time // … while it was IDLE, and answered
	flushBad  string    // … while it was IDLE, and why that failed the last time; empty: it did not
	retryAt   time.Time // not chosen as victim before: its last unload failed or its drain took too long
	unloadBad int

	loadAt      time.Time
	emptyAt     time.Time // LOADING: since when nobody waits for it
	coolUntil   time.Time
	loadBad     int
	shortBudget time.Duration // the budget of which it was said that a load takes longer
	loadCost    ewma
	stopCost    ewma
	runCost     ewma
	took        footprint // what its loads took
	seenLately  gpu.Bytes // … lately, of each of its GPUs, at most what they can give; 0: no load was seen
	raisedTo    gpu.Bytes // the claim that was announced because it is larger than the configured one; 0: none

	want target
	why  string // why its jobs wait, for people
}

// holding is a slot's part in the account of one GPU.
type holding struct {
	card     int // index of the GPU
	booking  gpu.Bytes
	residue  gpu.Bytes
	base     gpu.Bytes // seen amount when the residue began …
	baseFree gpu.Bytes // … and what was free and foreign then
	baseOut  gpu.Bytes
	foreign  gpu.Bytes // IDLE and lazy: the least that outsiders held since it was last unloaded
	// READY: what was free when its server last answered a probe, and what it had taken then. unseen: others have been loaded or unloaded since.
	aliveFree, aliveTook gpu.Bytes
	kept                 gpu.Bytes // residue before the unload of another began on this GPU
	known                gpu.Bytes // residue after the last unload; -1: never unloaded
	loadFree             gpu.Bytes // free when its load began
	loadOut              gpu.Bytes // … and foreign
	before               gpu.Bytes // its residue when its load began, until it is known whether it was used again
	drop                 gpu.Bytes
	blind                bool // there was no telemetry when its load began: loadFree is not known
	frozen               bool // another transition began since: drop and residue don't follow free memory any more
	guessed              bool // IDLE: the residue may be an outsider's who came during a load that failed
	measured             gpu.Bytes
	hasMeas              bool
	peak                 gpu.Bytes // the most that was measured of it, or that its server reported, since its load
}

// gate is what keeps new jobs out of a READY slot that is to be unloaded.
type gate struct {
	closed   bool
	target   *slot // for whom; nil: by hand, because it was removed, or because it is idle
	idle     bool  // nobody uses it: a job that comes before the unload call goes out opens it again
	restores bool  // … the target is not waited for: it is loaded again since its GPU is idle
	lent     bool  // its GPU is lent: it opens again when that ends
	renews   bool  // its driver is to be replaced: it opens again if that is taken back
	room     bool  // IDLE, and to be flushed for whoever waits for memory
	own      bool  // IDLE, and to be flushed for its own jobs
	since    time.Time
	clear    bool // the server said, after the drain, that it is idle
}

// stopping is an unload under way.
type stopping struct {
	from      SlotState
	target    *slot
	idle      bool // because nobody used it
	began     time.Time
	called    bool // the unload call has returned: the memory is awaited
	confirmed bool
	absent    bool      // nothing of its memory was there any more
	at        time.Time // when it returned
	lastRise  time.Time
	best      gpu.Bytes // the largest rise seen
	seen      []gpu.Bytes
	free      []gpu.Bytes
	used      []gpu.Bytes
	out       []gpu.Bytes
	fresh     []bool // free is from a look at what the slot held when it was loaded
	flush     bool   // a call to an IDLE lazy server that may have been loaded before we came
}

// target is what a slot knows as one that wants to be loaded.
type target struct {
	victim  *slot     // the slot whose gate is closed for it
	blocked time.Time // since when it would not fit, whatever we do
	extra   bool      // one more victim must go, though it would fit: the server ran out of memory
	oom     int       // loads that ran out of memory in a row
	atMost  gpu.Bytes // the claim is no larger, though more was seen: so much can be had; 0: it is what it is
	would   bool      // it was said who would be evicted, were evictions not only observed
	lock    bool      // lazy, and it fits: its first job competes for the lock like those of loaded slots
	hadLock bool      // … as of the last planning
	planned int       // how many victims the first plan had
	tries   []string  // what each unload that didn't bring its memory back gave
}

// ewma is an exponentially weighted mean of durations (policy: weight 0.3).
type ewma struct {
	value time.Duration
	known bool
}

func (e *ewma) add(d time.Duration) {
	if !e.known {
		e.value, e.known = d, true
		return
	}
	e.value += time.Duration(0.3 * float64(d-e.value))
}

// New makes an empty state. It must be configured before anything else.
func New() *State { return &State{named: map[string]*slot{}} }

// Step takes in one event and says what follows. It is the only way in which
// the state changes. The effects are valid until the next Step. wakeAt is when
// Wake is due at the latest; zero means never.
func (s *State) Step(now time.Time, e Event) (effects []Effect, wakeAt time.Time) {
	s.effects = s.effects[:0]
	switch e := e.(type) {
	case Submit:
		s.submit(now, &e)
	case Release:
		s.release(now, &e)
	case Cancel:
		s.cancel(now, e.Job)
	case Configure:
		s.configure(now, e.Config)
	case LoadDone:
		s.loadDone(now, e)
	case UnloadDone:
		s.unloadDone(now, e)
	case BusyAnswer:
		s.busyAnswer(now, e)
	case Probed:
		s.probed(now, e)
	case Sampled:
		s.sample(now, e)
	case Unload:
		s.unloadByHand(now, e.Slot)
	case Drain:
		s.drain(now, e)
	case Recall:
		s.recallAll(e.Learnt)
	case Lend:
		s.lend(now, e)
	case SetPin:
		s.setPin(now, e)
	case Died:
		s.died(now, e)
	case Touch:
		if sl := s.named[e.Slot]; sl != nil && sl.state == Ready {
			sl.idleAt, sl.lastUse = now, now
		}
	case Wake:
		s.pump(now)
	}
	wakeAt = s.wake
	if len(s.deadlines) > 0 {
		wakeAt = earlier(wakeAt, s.deadlines[0].deadline)
	}
	return s.effects, wakeAt
}

// pump does all that has become possible. It is O(slots), never over the jobs.
func (s *State) pump(now time.Time) {
	s.wake = time.Time{}
	s.expire(now)
	s.wakeClients(now)
	s.giveUpOrphans(now)
	s.sweep(now)
	s.clearLent(now)
	s.proceed(now)
	s.admitReady(now)
	for again := true; again; { // planning is dear: only while something has moved since the last
		again = s.plan(now)
		before := len(s.effects) // what moves is put on record, or starts something
		s.proceed(now)
		again = s.admitReady(now) || again || len(s.effects) > before
	}
	s.emptyLent(now)
	s.restore(now)
	s.revive(now)
	s.unloadIdle(now)
	if s.waiting > 0 {
		s.wakeBy(now.Add(recheck))
	}
}

// recheck is how often a waiting queue is looked at though nothing happened (spec §4.3).
const recheck = 5 * time.Second

func (s *State) wakeBy(at time.Time) { s.wake = earlier(s.wake, at) }

// due reports whether at has come; if not, Step will be woken then.
func (s *State) due(now, at time.Time) bool {
	if !now.Before(at) {
		return true
	}
	s.wakeBy(at)
	return false
}

func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// to changes a slot's state. Any edge that is not in accounting §2 is a bug: it
// is put on record, for tests to fail and people to report, and the site goes on.
func (s *State) to(now time.Time, sl *slot, state SlotState) {
	if !legal[[2]SlotState{sl.state, state}] {
		s.decide(Decision{At: now, Kind: "bug", Slot: sl.cfg.Name, GPU: sl.gpu(), Reason: fmt.Sprintf("%s to %s is no legal change of state: please report this", sl.state, state)})
	}
	if sl.state == Loading && state == Ready {
		sl.credit = credit{}
	}
	unloaded := sl.state == Stopping
	sl.state, sl.since = state, now
	if unloaded { // what the others left is told from what this one gave back now, before a load takes it
		s.cards(sl, func(c *card, _ *holding) { s.capResidues(c) })
	}
	s.moves(sl)
	if state != Ready && state != Stopping { // a failed unload leads back
		for _, h := range sl.on {
			h.aliveFree = unseen
		}
	}
	if state == Ready {
		sl.evicted = false
		if sl.loadedAt.IsZero() {
			sl.loadedAt = now
		}
		sl.readyAt, sl.idleAt, sl.started, sl.emptyAt = now, now, 0, time.Time{}
		sl.renewing = false // one that is loaded again, past us, is offered to be replaced anew
	}
	sl.warming, sl.dead, sl.suspect = false, "", time.Time{}
	sl.refusedAt, sl.returns = time.Time{}, false
	if state == Idle { // there is nothing left to be unloaded
		if t := sl.gate.target; t != nil && t.want.victim == sl {
			t.want.victim = nil
		}
		sl.gate = gate{}
		if !sl.loadedAt.IsZero() {
			s.emit(Effect{Kind: Resided, Slot: sl.cfg.Name, Stayed: now.Sub(sl.loadedAt)})
			sl.loadedAt = time.Time{}
		}
		s.place(sl) // the configuration may have moved it while it was loaded
		s.cards(sl, func(c *card, h *holding) {
			h.foreign = unseen
			s.noteForeign(c)
		})
		sl.lent = s.cfg.Mode == Evicting && s.lentOn(now, sl)
	}
}

// decide puts a line into the record.
func (s *State) decide(d Decision) {
	s.effects = append(s.effects, Effect{Kind: Decided, Slot: d.Slot, Decision: &d})
}

func (s *State) emit(e Effect) { s.effects = append(s.effects, e) }

// cards calls f with each GPU that the slot is on and is known. ok is false if one of them isn't.
func (s *State) cards(sl *slot, f func(c *card, h *holding)) (ok bool) {
	ok = true
	for _, h := range sl.on {
		if c := s.card(h.card); c != nil {
			f(c, h)
		} else {
			ok = false
		}
	}
	return ok
}

func (s *State) card(index int) *card {
	var lost *card
	for _, c := range s.gpus {
		switch {
		case c.Index != index:
		case c.Lost:
			lost = c // the driver may have given its index to another
		default:
			return c
		}
	}
	return lost
}

// hold is the slot's part in the account of a GPU; nil if it is not on it.
func (sl *slot) hold(index int) *holding {
	for _, h := range sl.on {
		if h.card == index {
			return h
		}
	}
	return nil
}

// busy reports whether the slot computes, as far as its jobs tell.
func (sl *slot) busy() bool { return sl.active+sl.held > 0 }

// owner is who computes on a GPU: the holder of its lock.
func (s *State) owner(index int) *slot {
	for _, l := range s.locks {
		if l.gpu == index {
			return l.owner
		}
	}
	return nil
}

// transition is the slot that loads or unloads on the GPU, if one does.
func (s *State) transition(index int) *slot {
	for _, sl := range s.around() {
		if (sl.state == Loading || sl.state == Stopping || sl.stop.flush) && sl.hold(index) != nil {
			return sl
		}
	}
	return nil
}

// warmer is the lazy slot whose first job loads it on the GPU, if there is one: a transition too.
func (s *State) warmer(index int) *slot {
	for _, sl := range s.around() {
		if sl.warming && sl.hold(index) != nil {
			return sl
		}
	}
	return nil
}
