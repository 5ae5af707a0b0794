package broker

import (
	"container/list"
	"strings"
	"time"
)

// Bounds of what is remembered of clients.
const (
	maxClients    = 256 // the one that was seen longest ago goes
	maxClientName = 128 // bytes of a client's id that count
)

// Client is what is known of one client.
type Client struct {
	Client     string  `json:"client"`
	Requests   uint64  `json:"requests"`
	MeanWaitMS float64 `json:"mean_wait_ms"` // for queue and load, of the requests that ran and ended
	MeanRunMS  float64 `json:"mean_run_ms"`
	LastSeen   string  `json:"last_seen"`
}

// clients remembers who has asked, the one that was seen last first. Its zero
// value is ready. For a client that is known nothing is allocated. The broker's mutex guards it.
type clients struct {
	known map[string]*list.Element // by id
	order list.List                // of *client
}

type client struct {
	id             string
	seen           time.Time
	requests, done uint64
	waited, ran    time.Duration // of those that are done
}

// asked counts a request. An empty id is nobody.
func (c *clients) asked(id string, at time.Time) {
	if id == "" {
		return
	}
	e := c.find(id)
	if e == nil {
		e = c.add(id)
	}
	k := e.Value.(*client)
	k.requests++
	k.seen = at
	c.order.MoveToFront(e)
}

// ended counts a request that has run.
func (c *clients) ended(id string, at time.Time, waited, ran time.Duration) {
	if e := c.find(id); e != nil {
		k := e.Value.(*client)
		k.done++
		k.waited += waited
		k.ran += ran
		k.seen = at
		c.order.MoveToFront(e)
	}
}

// list is all of them, the one that was seen last first.
func (c *clients) list() []Client {
	out := []Client{}
	for e := c.order.Front(); e != nil; e = e.Next() {
		k := e.Value.(*client)
		out = append(out, Client{Client: k.id, Requests: k.requests, MeanWaitMS: ms(mean(k.waited, k.done)), MeanRunMS: ms(mean(k.ran, k.done)), LastSeen: stamp(k.seen)})
	}
	return out
}

func (c *clients) find(id string) *list.Element {
	return c.known[id[:min(len(id), maxClientName)]]
}

// add takes in a new client, in the place of the last one if there are many.
func (c *clients) add(id string) *list.Element {
	if c.known == nil {
		c.known = map[string]*list.Element{}
	}
	if len(c.known) >= maxClients {
		delete(c.known, c.order.Remove(c.order.Back()).(*client).id)
	}
	k := &client{id: strings.Clone(id[:min(len(id), maxClientName)])} // what it was cut from may be long
	c.known[k.id] = c.order.PushFront(k)
	return c.known[k.id]
}

func mean(sum time.Duration, n uint64) time.Duration {
	if n == 0 {
		return 0
	}
	return sum / time.Duration(n)
}
