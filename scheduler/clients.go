package scheduler

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
)

// credit is the age of those who left a cold slot's queue before they were
// served: without it, clients that give up early starve a rare model (policy rule 6).
type credit struct {
	from time.Time // the oldest submission among them; zero: none
	last time.Time // the last departure
}

// left notes the departure of one who waited since then.
func (c *credit) left(now, since time.Time) {
	c.from, c.last = earlier(c.from, since), now
}

// lapse ends a credit that nobody has come back for.
func (c *credit) lapse(now time.Time, after time.Duration) {
	if !c.from.IsZero() && now.Sub(c.last) > after {
		*c = credit{}
	}
}

// creditFor is how long the age of departed clients stands.
func (s *State) creditFor(sl *slot) time.Duration {
	if s.cfg.Credit != nil {
		return *s.cfg.Credit
	}
	return max(time.Minute, 2*s.bound(sl))
}

// rests are the clients that have started a job at a consumer and may not start the next there yet,
// with their jobs that wait for that.
type rests struct {
	until  map[restKey]time.Time
	parked map[restKey][]*job // by submission
	pruned time.Time
}

// restKey is a client at a consumer: what it may start at others is not affected.
type restKey struct{ client, consumer string }

func (j *job) restKey() restKey {
	return restKey{j.client, orElse(j.slot.cfg.Consumer, j.slot.cfg.Name)}
}

func (a restKey) compare(b restKey) int {
	return cmp.Or(strings.Compare(a.client, b.client), strings.Compare(a.consumer, b.consumer))
}

// coolingReason is why a job waits whose client rests.
const coolingReason = "it waits for its client's cooldown"

// maxRests bounds the clients that rest at a time.
const maxRests = 1024

// clientRests reports whether a client may not start a job at a consumer now.
func (s *State) clientRests(now time.Time, r restKey) bool {
	return len(s.resting.until) > 0 && s.cfg.Mode != Passthrough && now.Before(s.resting.until[r])
}

// rests reports whether a job has to wait for the rest of its client. What runs elsewhere never waits.
func (s *State) rests(now time.Time, j *job) bool {
	return !j.slot.cfg.Cloud && s.clientRests(now, j.restKey())
}

// rest notes that a client has started a job.
func (s *State) rest(now time.Time, j *job) {
	d := max(s.cfg.ClientCooldown, j.cooldown)
	if d <= 0 || j.client == "" || j.slot.cfg.Cloud || s.cfg.Mode == Passthrough {
		return
	}
	if s.resting.until == nil {
		s.resting.until = map[restKey]time.Time{}
	}
	key := j.restKey()
	if _, known := s.resting.until[key]; !known && len(s.resting.until) >= maxRests && !s.resting.prune(now) {
		return // so many rest already that one more makes no difference
	}
	s.resting.until[key] = now.Add(d)
}

// chill takes those from the head of a slot's queue whose client has started another job meanwhile.
func (s *State) chill(now time.Time, sl *slot) {
	if len(s.resting.until) == 0 {
		return
	}
	for j := sl.queue.head(); j != nil && s.rests(now, j); j = sl.queue.head() {
		s.leaveQueue(now, j)
		s.resting.park(j)
		s.wakeBy(s.resting.until[j.restKey()])
	}
}

// wakeClients puts the jobs of those who have rested into their queues.
func (s *State) wakeClients(now time.Time) {
	for _, client := range s.resting.clients() {
		if s.clientRests(now, client) {
			s.wakeBy(s.resting.until[client])
			continue
		}
		jobs := s.resting.parked[client]
		delete(s.resting.parked, client)
		delete(s.resting.until, client)
		for _, j := range jobs {
			j.slot.parked--
			s.queueUp(now, j)
		}
	}
}

// clients are those with parked jobs, in an order that is always the same.
func (r *rests) clients() []restKey {
	if len(r.parked) == 0 {
		return nil
	}
	return slices.SortedFunc(maps.Keys(r.parked), restKey.compare)
}

// prune forgets those that have rested, once a second at most, and reports whether there is room for another.
func (r *rests) prune(now time.Time) bool {
	if now.Sub(r.pruned) < time.Second {
		return false
	}
	r.pruned = now
	for client, at := range r.until {
		if !now.Before(at) && len(r.parked[client]) == 0 {
			delete(r.until, client)
		}
	}
	return len(r.until) < maxRests
}

func (r *rests) park(j *job) {
	if r.parked == nil {
		r.parked = map[restKey][]*job{}
	}
	j.state = jobCooling
	j.slot.parked++
	key := j.restKey()
	r.parked[key] = append(r.parked[key], j)
}

func (r *rests) take(j *job) {
	j.slot.parked--
	key := j.restKey()
	if r.parked[key] = slices.DeleteFunc(r.parked[key], func(o *job) bool { return o == j }); len(r.parked[key]) == 0 {
		delete(r.parked, key)
	}
}
