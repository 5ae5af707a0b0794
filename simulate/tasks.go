package simulate

import (
	"math/rand/v2"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// arrive makes a task of a request, and submits it.
func (r *run) arrive(q Request) {
	r.tasks = append(r.tasks, task{consumer: r.named[q.Consumer], client: q.Client, service: q.Service, priority: q.Priority, patience: q.Patience, then: q.Then})
	r.open++
	r.submit(len(r.tasks) - 1)
}

// submit is one try of a task's client.
func (r *run) submit(i int) {
	t := &r.tasks[i]
	if t.try++; t.try == 1 {
		t.first = r.now
	}
	slot := &r.servers[t.consumer].Slot
	e := scheduler.Submit{Slot: slot.Name, Priority: t.priority, Client: t.client}
	if r.o.IgnorePriorities {
		e.Priority = 0
	}
	patience := t.patience
	if slot.Budget > 0 && r.o.Policy == FIFO { // it knows no budgets
		patience = least(patience, slot.Budget)
	} else if slot.Budget > 0 {
		e.Deadline = r.time().Add(slot.Budget)
	}
	r.submitting = i
	r.step(e)
	if t = &r.tasks[i]; t.state == isWaiting && patience > 0 { // there may be more tasks now, at another place
		r.agenda.add(happening{at: r.now + patience, kind: leaves, who: i, epoch: uint64(t.try)})
	}
}

// least is the lesser of two times, of which 0 stands for none.
func least(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// taskOf is the task that an effect is about: one that was queued, or the one that is being submitted.
func (r *run) taskOf(job scheduler.JobID) int {
	if i, ok := r.jobs[job]; ok {
		return i
	}
	return r.submitting
}

func (r *run) queued(job scheduler.JobID) {
	t := &r.tasks[r.submitting]
	t.job, t.state = job, isWaiting
	r.jobs[job] = r.submitting
}

// begin runs an admitted job. A server without a load route loads inside its first.
func (r *run) begin(f *scheduler.Effect) {
	i := r.taskOf(f.Job)
	t := &r.tasks[i]
	s := r.servers[t.consumer]
	t.job, t.state = f.Job, isRunning
	r.jobs[f.Job] = i
	if !f.Loads || s.loaded {
		r.compute(i)
		return
	}
	s.loads++
	r.take(s)
	r.move(s, 1)
	r.agenda.add(happening{at: r.now + max(0, s.Load(s.loading)), kind: warms, who: i})
}

// warm is the end of the load inside a job.
func (r *run) warm(i int) {
	r.move(r.servers[r.tasks[i].consumer], -1)
	r.compute(i)
}

// compute is the beginning of a job's work proper.
func (r *run) compute(i int) {
	t := &r.tasks[i]
	s := r.servers[t.consumer]
	t.wait = r.now - t.first
	runs := t.service
	if s.Slot.MaxRun > 0 {
		runs = min(runs, s.Slot.MaxRun)
	}
	r.each(s, func(c *card) { c.tally(r.now); c.running++ })
	r.agenda.add(happening{at: r.now + runs, kind: ends, who: i})
}

func (r *run) end(i int) {
	t := &r.tasks[i]
	r.each(r.servers[t.consumer], func(c *card) { c.tally(r.now); c.running-- })
	t.state = isServed
	delete(r.jobs, t.job)
	r.step(scheduler.Release{Job: t.job, Outcome: scheduler.Served})
	r.over(i)
}

func (r *run) refused(f *scheduler.Effect) { r.away(r.taskOf(f.Job)) }

// away is the end of a try that was not served. The client may send the request again.
func (r *run) away(i int) {
	t := &r.tasks[i]
	delete(r.jobs, t.job)
	t.state = isAway
	if t.try < r.o.Tries && r.chance(i, t.try) < r.o.RetryChance {
		r.agenda.add(happening{at: r.now + r.o.RetryAfter, kind: arrives, who: i})
		return
	}
	t.state = isLost
	r.over(i)
}

// over is the end of a task. Its client goes on with the next.
func (r *run) over(i int) {
	r.open--
	t := r.tasks[i]
	if len(t.then) == 0 {
		return
	}
	r.tasks = append(r.tasks, task{consumer: t.consumer, client: t.client, service: t.then[0].Service, priority: t.priority, patience: t.patience, then: t.then[1:]})
	r.open++
	r.agenda.add(happening{at: r.now + t.then[0].Think, kind: arrives, who: len(r.tasks) - 1})
}

// chance is a number from 0 to 1 that depends on the seed, the task and the try only, not on the policy.
func (r *run) chance(task, try int) float64 {
	return rand.New(rand.NewPCG(r.o.Seed, uint64(task)<<8|uint64(try))).Float64()
}

// move notes that a load or unload begins or ends on a server's GPUs.
func (r *run) move(s *server, n int) {
	r.each(s, func(c *card) { c.tally(r.now); c.moving += n })
}

func (r *run) tally() {
	for _, c := range r.cards {
		c.tally(r.now)
	}
}

// tally adds up what the card did until now.
func (c *card) tally(now time.Duration) {
	if c.running > 0 {
		c.busy += now - c.since
	}
	if c.moving > 0 {
		c.switching += now - c.since
	}
	c.since = now
}
