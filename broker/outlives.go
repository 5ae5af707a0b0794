package broker

import (
	"slices"
	"time"
)

// maxOutliving bounds how many jobs of one consumer are remembered whose work may outlive their answer.
const maxOutliving = 1024

// outliving are jobs of one consumer whose work may go on after their answer. The broker's mutex guards it.
type outliving struct {
	began time.Time // the first of them
	done  []func(service time.Duration)
}

// WhenDone has done called when the work of a job that began then, and is about
// to be released, is over: when its consumer has nothing to do any more. Its
// server does one thing after the other and doesn't tell when each ends, so all that are over then get an equal share of the time. What goes on when the broker is closed is told then, with the time until that.
// It must not block, as it is called with the broker's mutex held. False: it will not be called, there are too many, or the broker ends.
func (b *Broker) WhenDone(consumer string, began time.Time, done func(service time.Duration)) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	o := b.outliving[consumer]
	if b.closed || o != nil && len(o.done) >= maxOutliving {
		return false
	}
	if o == nil {
		o = &outliving{began: began}
		if b.outliving == nil {
			b.outliving = map[string]*outliving{}
		}
		b.outliving[consumer] = o
	}
	o.done = append(o.done, done)
	return true
}

// settle tells of the work that is over. It holds mu.
func (b *Broker) settle() {
	for name, o := range b.outliving {
		c := b.consumers[name]
		if c != nil && slices.ContainsFunc(c.real().slots, func(sl *slot) bool {
			v, _ := b.state.Slot(sl.name)
			return v.Active+v.Held > 0
		}) {
			continue
		}
		delete(b.outliving, name)
		o.end()
	}
}

// end tells each of its share. It holds mu.
func (o *outliving) end() {
	share := time.Since(o.began) / time.Duration(len(o.done))
	for _, done := range o.done {
		done(share)
	}
}

// RequestLog is the file to which the ruling configuration has requests written; empty: none.
func (b *Broker) RequestLog() string {
	if g := b.current.Load(); g != nil {
		return g.Config.RequestLog
	}
	return ""
}
