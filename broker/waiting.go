package broker

import "github.com/gpu-broker/caddy-gpu-broker/scheduler"

// Place is where a request that waits stands.
type Place struct {
	Consumer string
	Position int  // among all that wait, by (priority, submitted at): 1 is next, from 1000 on it stays 1000. 0: it waits no more
	Loading  bool // its consumer is being loaded
}

// announce tells the caller of Acquire that its request waits, unless it has its answer already.
func (b *Broker) announce(waiting func(place func() Place), job scheduler.JobID, w *waiter) {
	select {
	case <-w.ready:
	default:
		waiting(func() Place { return b.place(job) })
	}
}

func (b *Broker) place(job scheduler.JobID) Place {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.waiters[job]
	if w == nil {
		return Place{}
	}
	slot, _ := b.state.Slot(w.slot.name)
	return Place{Consumer: w.consumer.name, Position: b.state.Position(job), Loading: slot.State == scheduler.Loading}
}
