package broker

import "time"

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
		if b.works(name) {
			continue
		}
		delete(b.outliving, name)
		o.end()
	}
}

// works reports whether anything runs at the server of this name: at slots too that were removed, or whose name another has by now. It holds mu.
func (b *Broker) works(name string) bool {
	c := b.consumers[name]
	for _, sl := range b.slots {
		if sl.consumer.name == name || c != nil && sl.consumer == c.real() {
			if v, _ := b.state.Slot(sl.name); v.Active+v.Held > 0 {
				return true
			}
		}
	}
	return false
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
