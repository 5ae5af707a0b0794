package broker

import (
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
	known       map[string]*client
	first, last *client
}

type client struct {
	id             string
	seen           time.Time
	requests, done uint64
	waited, ran    time.Duration // of those that are done
	next, prev     *client
}

// asked counts a request. An empty id is nobody.
func (c *clients) asked(id string, at time.Time) {
	if id == "" {
		return
	}
	k := c.find(id)
	if k == nil {
		k = c.add(id)
	}
	k.requests++
	k.seen = at
	c.toFront(k)
}

// ended counts a request that has run.
func (c *clients) ended(id string, at time.Time, waited, ran time.Duration) {
	if k := c.find(id); k != nil {
		k.done++
		k.waited += waited
		k.ran += ran
		k.seen = at
		c.toFront(k)
	}
}

// list is all of them, the one that was seen last first.
func (c *clients) list() []Client {
	out := []Client{}
	for k := c.first; k != nil; k = k.next {
		out = append(out, Client{Client: k.id, Requests: k.requests, MeanWaitMS: ms(mean(k.waited, k.done)), MeanRunMS: ms(mean(k.ran, k.done)), LastSeen: stamp(k.seen)})
	}
	return out
}

func (c *clients) find(id string) *client {
	if id == "" {
		return nil
	}
	return c.known[id[:min(len(id), maxClientName)]]
}

// add takes in a new client, in the place of the last one if there are many.
func (c *clients) add(id string) *client {
	if c.known == nil {
		c.known = map[string]*client{}
	}
	k := new(client)
	if len(c.known) >= maxClients {
		k = c.last
		c.unlink(k)
		delete(c.known, k.id)
	}
	*k = client{id: strings.Clone(id[:min(len(id), maxClientName)])} // what it was cut from may be long
	c.known[k.id] = k
	c.link(k)
	return k
}

func (c *clients) toFront(k *client) {
	if c.first != k {
		c.unlink(k)
		c.link(k)
	}
}

func (c *clients) link(k *client) {
	k.prev, k.next = nil, c.first
	if c.first == nil {
		c.last = k
	} else {
		c.first.prev = k
	}
	c.first = k
}

func (c *clients) unlink(k *client) {
	if k.prev == nil {
		c.first = k.next
	} else {
		k.prev.next = k.next
	}
	if k.next == nil {
		c.last = k.prev
	} else {
		k.next.prev = k.prev
	}
}

func mean(sum time.Duration, n uint64) time.Duration {
	if n == 0 {
		return 0
	}
	return sum / time.Duration(n)
}
