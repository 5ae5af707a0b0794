package scheduler

import (
	"container/heap"
	"slices"
	"time"
)

// job is one admitted or waiting request. Jobs live in a slab and are used
// again; the generation in their ID tells an old one from a new one.
type job struct {
	id        JobID
	state     jobState
	slot      *slot
	priority  int
	submitted time.Time
	deadline  time.Time
	started   time.Time
	server    string // that of the slot when it was started

	client    string
	keepAlive time.Duration
	stayWarm  time.Duration
	cooldown  time.Duration
	bulk      bool // reserved places are not for it, as of when it was submitted

	// In its queue level: among all, and among those of its client.
	next, prev   *job
	cnext, cprev *job
	turn         *turn
	heapIndex    int // in the deadlines; -1: not there
}

type jobState uint8

const (
	jobFree    jobState = iota
	jobCooling          // waits, but its client has started another too short a time ago
	jobWaiting
	jobRunning
)

// slab holds the jobs. An ID is index | generation << 32.
type slab struct {
	jobs []*job
	free []uint32
}

func (s *slab) get(id JobID) *job {
	i := uint32(id)
	if int(i) >= len(s.jobs) || s.jobs[i].id != id || s.jobs[i].state == jobFree {
		return nil
	}
	return s.jobs[i]
}

func (s *slab) take() *job {
	if n := len(s.free); n > 0 {
		j := s.jobs[s.free[n-1]]
		s.free = s.free[:n-1]
		j.id += 1 << 32
		return j
	}
	j := &job{id: JobID(len(s.jobs)) | 1<<32, heapIndex: -1}
	s.jobs = append(s.jobs, j)
	return j
}

func (s *slab) put(j *job) {
	*j = job{id: j.id, heapIndex: -1}
	s.free = append(s.free, uint32(j.id))
}

// queue holds the jobs that wait for one slot, by priority. Within a priority
// the clients take turns, each in the order in which its jobs were submitted.
type queue struct {
	levels []level // ordered by priority, none empty
	count  int
}

// level is the jobs of one priority.
type level struct {
	priority    int
	first, last *job // all of them, by submission
	next        *turn
	clients     map[string]*turn // nil while only one client waits, which is next
}

// turn is one client's jobs of a level, in a ring of all that wait there.
type turn struct {
	client      string
	first, last *job
	after, back *turn
}

func (q *queue) push(j *job) {
	i, found := slices.BinarySearchFunc(q.levels, j.priority, func(l level, p int) int { return l.priority - p })
	if !found {
		q.levels = slices.Insert(q.levels, i, level{priority: j.priority})
	}
	q.levels[i].push(j)
	q.count++
}

func (l *level) push(j *job) {
	after := l.last // almost always: only a job that is admitted once more is older than the last
	for after != nil && after.submitted.After(j.submitted) {
		after = after.prev
	}
	if after == nil {
		j.prev, j.next, l.first = nil, l.first, j
	} else {
		j.prev, j.next, after.next = after, after.next, j
	}
	if j.next == nil {
		l.last = j
	} else {
		j.next.prev = j
	}

	t := l.turnOf(j.client)
	j.turn = t
	if after == nil { // it was here before them all
		l.next = t
	}
	mine := t.last
	for mine != nil && mine.submitted.After(j.submitted) {
		mine = mine.cprev
	}
	if mine == nil {
		j.cprev, j.cnext, t.first = nil, t.first, j
	} else {
		j.cprev, j.cnext, mine.cnext = mine, mine.cnext, j
	}
	if j.cnext == nil {
		t.last = j
	} else {
		j.cnext.cprev = j
	}
}

// turnOf finds a client's turn, or puts it behind all others.
func (l *level) turnOf(client string) *turn {
	switch {
	case l.next == nil:
		l.next = &turn{client: client}
		l.next.after, l.next.back = l.next, l.next
		return l.next
	case l.clients == nil && l.next.client == client:
		return l.next
	case l.clients == nil:
		l.clients = map[string]*turn{l.next.client: l.next}
	}
	t := l.clients[client]
	if t == nil {
		t = &turn{client: client, after: l.next, back: l.next.back}
		t.back.after, l.next.back = t, t
		l.clients[client] = t
	}
	return t
}

func (q *queue) remove(j *job) {
	i, _ := slices.BinarySearchFunc(q.levels, j.priority, func(l level, p int) int { return l.priority - p })
	if q.levels[i].remove(j); q.levels[i].first == nil {
		q.levels = slices.Delete(q.levels, i, i+1)
	}
	q.count--
}

func (l *level) remove(j *job) {
	if j.prev == nil {
		l.first = j.next
	} else {
		j.prev.next = j.next
	}
	if j.next == nil {
		l.last = j.prev
	} else {
		j.next.prev = j.prev
	}

	t := j.turn
	if j.cprev == nil {
		t.first = j.cnext
	} else {
		j.cprev.cnext = j.cnext
	}
	if j.cnext == nil {
		t.last = j.cprev
	} else {
		j.cnext.cprev = j.cprev
	}
	if t.first == nil { // its client waits here no more
		t.back.after, t.after.back = t.after, t.back
		if l.next == t {
			l.next = t.after
		}
		delete(l.clients, t.client)
	}
	j.prev, j.next, j.cprev, j.cnext, j.turn = nil, nil, nil, nil, nil
}

// served puts the client of a job that is about to be admitted behind the others of its priority.
func (q *queue) served(j *job) {
	i, _ := slices.BinarySearchFunc(q.levels, j.priority, func(l level, p int) int { return l.priority - p })
	if l := &q.levels[i]; l.next == j.turn {
		l.next = l.next.after
	}
}

// head is the job that is next: of the most urgent, by the turns of their clients.
func (q *queue) head() *job {
	if len(q.levels) == 0 {
		return nil
	}
	return q.levels[0].next.first
}

// first is the oldest of the most urgent jobs: it stands for the slot where slots are compared.
func (q *queue) first() *job {
	if len(q.levels) == 0 {
		return nil
	}
	return q.levels[0].first
}

// ahead is how many jobs are before a waiting one by (priority, submitted at).
func (q *queue) ahead(j *job) (n int) {
	for i := range q.levels {
		for o := q.levels[i].first; o != nil && o != j && q.levels[i].priority <= j.priority; o = o.next {
			n++
		}
	}
	return n
}

// anyPriority is less urgent than all.
const anyPriority = int(^uint(0) >> 1)

// oldest is the earliest submission among the jobs that are at least as urgent as priority.
func (q *queue) oldest(priority int) (at time.Time, ok bool) {
	for i := range q.levels {
		l := &q.levels[i]
		if l.priority > priority {
			break
		}
		if !ok || l.first.submitted.Before(at) {
			at, ok = l.first.submitted, true
		}
	}
	return at, ok
}

// deadlines is a heap of waiting jobs by the end of their budget.
type deadlines []*job

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, k int) bool { return d[i].deadline.Before(d[k].deadline) }
func (d deadlines) Swap(i, k int) {
	d[i], d[k] = d[k], d[i]
	d[i].heapIndex, d[k].heapIndex = i, k
}
func (d *deadlines) Push(x any) {
	j := x.(*job)
	j.heapIndex = len(*d)
	*d = append(*d, j)
}
func (d *deadlines) Pop() any {
	old := *d
	j := old[len(old)-1]
	old[len(old)-1] = nil
	*d = old[:len(old)-1]
	j.heapIndex = -1
	return j
}

func (d *deadlines) add(j *job) {
	if !j.deadline.IsZero() {
		heap.Push(d, j)
	}
}

func (d *deadlines) drop(j *job) {
	if j.heapIndex >= 0 {
		heap.Remove(d, j.heapIndex)
	}
}
