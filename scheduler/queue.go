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

	next, prev *job // in its queue level
	heapIndex  int  // in the deadlines; -1: not there
}

type jobState uint8

const (
	jobFree jobState = iota
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

// queue holds the jobs that wait for one slot, by (priority, submitted at).
type queue struct {
	levels []level // ordered by priority, none empty
	count  int
}

type level struct {
	priority    int
	first, last *job
}

func (q *queue) push(j *job) {
	i, found := slices.BinarySearchFunc(q.levels, j.priority, func(l level, p int) int { return l.priority - p })
	if !found {
		q.levels = slices.Insert(q.levels, i, level{priority: j.priority})
	}
	l := &q.levels[i]
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
	q.count++
}

func (q *queue) remove(j *job) {
	i, _ := slices.BinarySearchFunc(q.levels, j.priority, func(l level, p int) int { return l.priority - p })
	l := &q.levels[i]
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
	if l.first == nil {
		q.levels = slices.Delete(q.levels, i, i+1)
	}
	j.prev, j.next = nil, nil
	q.count--
}

// head is the job that is next by (priority, submitted at).
func (q *queue) head() *job {
	if len(q.levels) == 0 {
		return nil
	}
	return q.levels[0].first
}

// oldest is the earliest submission among the jobs that are at least as urgent as priority.
func (q *queue) oldest(priority int) (at time.Time, ok bool) {
	for _, l := range q.levels {
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
