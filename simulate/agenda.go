package simulate

import (
	"container/heap"
	"time"
)

// happening is something that will happen at its time.
type happening struct {
	at    time.Duration
	seq   uint64 // equal times in the order in which they were put down
	kind  happeningKind
	who   int    // a task, or a server
	epoch uint64 // of a load or unload; of a client's departure its try
}

type happeningKind uint8

const (
	arrives  happeningKind = iota // a task is submitted
	leaves                        // its client gives up, unless it has begun
	warms                         // the load inside its job is over
	ends                          // its job is done
	loaded                        // a server has its model
	unloaded                      // … and has it no more
)

// agenda is a heap of what will happen.
type agenda struct {
	items happenings
	seq   uint64
}

func (a *agenda) add(h happening) {
	a.seq++
	h.seq = a.seq
	heap.Push(&a.items, h)
}

// next is when the first of them is due; never if there is none.
func (a *agenda) next() time.Duration {
	if len(a.items) == 0 {
		return never
	}
	return a.items[0].at
}

func (a *agenda) take() happening { return heap.Pop(&a.items).(happening) }

type happenings []happening

func (h happenings) Len() int      { return len(h) }
func (h happenings) Swap(i, k int) { h[i], h[k] = h[k], h[i] }
func (h happenings) Less(i, k int) bool {
	if h[i].at != h[k].at {
		return h[i].at < h[k].at
	}
	return h[i].seq < h[k].seq
}
func (h *happenings) Push(x any) { *h = append(*h, x.(happening)) }
func (h *happenings) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}
