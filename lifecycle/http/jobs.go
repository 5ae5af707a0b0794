package httplife

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"
)

const (
	// maxJobs bounds the jobs of one server that are followed: the oldest is forgotten for one more.
	maxJobs = 1024
	// jobsAtOnce bounds how many are asked for in one answer of Busy.
	jobsAtOnce = 16
)

// jobs are those that answers have named and that are not known to be over.
type jobs struct {
	mu  sync.Mutex
	ids []any // oldest first
}

func (j *jobs) add(id any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if slices.Contains(j.ids, id) {
		return
	}
	if len(j.ids) == maxJobs {
		j.ids = slices.Delete(j.ids, 0, 1)
	}
	j.ids = append(j.ids, id)
}

func (j *jobs) drop(id any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ids = slices.DeleteFunc(j.ids, func(other any) bool { return other == id })
}

func (j *jobs) oldest() []any {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.ids[:min(len(j.ids), jobsAtOnce)])
}

// Track takes an answer that names a job.
func (d *driver) Track(body []byte) bool {
	if d.plan.jobs == nil {
		return false
	}
	answer, err := parseAnswer(body)
	if err != nil {
		return false
	}
	id, err := d.plan.jobs.values.find(context.Background(), answer)
	if err != nil {
		return false
	}
	switch id.(type) {
	case string, float64:
		d.jobs.add(id)
		return true
	default:
		return false
	}
}

// working asks for the jobs, the oldest first, until it finds one that is not over.
func (d *driver) working(ctx context.Context) (bool, error) {
	r := d.plan.jobs
	for _, id := range d.jobs.oldest() {
		answer, err := d.ask(ctx, r, id, limit(r, time.Now().Add(d.deps.Limits.Probe())))
		var f *failure
		switch {
		case errors.As(err, &f) && (f.status == http.StatusNotFound || f.status == http.StatusGone):
			d.jobs.drop(id) // over for so long that it is forgotten
			continue
		case err != nil:
			return false, d.wrap("busy", err)
		}
		over, err := r.loaded.find(ctx, answer)
		if err != nil {
			return false, d.wrap("busy", fmt.Errorf("%s: %w", r.name, err))
		}
		if !truth(over) {
			return true, nil
		}
		d.jobs.drop(id)
	}
	return len(d.jobs.oldest()) > 0, nil
}
