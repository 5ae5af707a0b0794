package broker

import (
	"context"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

const (
	// catalogRest is the least time between two questions for the catalog of one server, answered or not.
	catalogRest = 3 * time.Second
	// missingFor is how long a model counts as missing after its server has answered a load with 404.
	missingFor = 5 * time.Minute
	// maxMissing bounds the missing models of one consumer; above it the one that is forgotten first makes way.
	maxMissing = 256
)

// catalog is what a server has said of the models that it could load. The broker's mutex guards it.
type catalog struct {
	at      time.Time                  // of the latest answer, a failure too; zero: none yet
	told    bool                       // … which was none
	fault   string                     // why it was none; for people
	failed  time.Time                  // when the latest load failed before the server had told any; zero: none has
	models  []lifecycle.Model          // in the server's order, as it told them last
	byKey   map[string]lifecycle.Model // by lifecycle.Names.Key
	missing map[string]time.Time       // by key: models that the server does not have, until then
	asking  chan struct{}              // closed once the question under way is over; nil: none is
}

// Offer is what is known of a model that the configuration does not name.
type Offer struct {
	// Known reports whether its server has it; Unknown: that can't be told.
	Known lifecycle.Tri
	// Silent is why a server that has a list of its models does not tell it now; empty: it has none, or has told it.
	Silent string
	// Starts reports that a load is needed to know more: the broker starts the server, which does not run yet and has never told its list.
	// Known is Unknown then.
	Starts bool
	// Failed is when the latest load that was to find out has failed; zero: none has. It is set where Starts is.
	Failed time.Time
	// As is the model's name at the consumer; empty unless Known is Yes.
	As string
	// Listed are the names that the server lists; unset unless Known is No.
	Listed []string
	// Elsewhere reports that the server does not list it and may serve it all the same, from elsewhere: it needs no load. Known is
	// Unknown then.
	Elsewhere bool
}

// Offer reports whether the server of a consumer has a model. It asks the server if what it said last is out of date, and waits
// for at most one answer. A model that is loaded, or is being asked for, is never asked about.
func (b *Broker) Offer(ctx context.Context, consumer, model string) Offer {
	offer, stale := b.offered(consumer, model)
	if !stale {
		return offer
	}
	if !wait(ctx, b.ask(consumer)) {
		return Offer{}
	}
	offer, _ = b.offered(consumer, model)
	return offer
}

// Offers is Offer of several consumers, up to the first whose server has the model. Where one is known to have it no server is
// asked; else all are at once, so that one that doesn't answer delays the others by no more than its own time-out.
func (b *Broker) Offers(ctx context.Context, consumers []string, model string) []Offer {
	offers := make([]Offer, len(consumers))
	for i, consumer := range consumers {
		if offers[i], _ = b.offered(consumer, model); offers[i].Known == lifecycle.Yes {
			return offers[:i+1]
		}
	}
	for _, consumer := range consumers {
		b.ask(consumer)
	}
	for i, consumer := range consumers {
		if offers[i] = b.Offer(ctx, consumer, model); offers[i].Known == lifecycle.Yes {
			return offers[:i+1]
		}
	}
	return offers
}

// offered is Offer as far as is known without asking. stale reports that asking would tell more.
func (b *Broker) offered(consumer, model string) (_ Offer, stale bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.consumers[consumer]
	if c == nil {
		return Offer{}, false
	}
	c = c.real()
	if sl := c.known(model); sl != nil && !(sl.adopted && (c.misses(time.Now(), model) || b.isUnused(sl))) {
		return Offer{Known: lifecycle.Yes, As: sl.model}, false
	}
	cat := &c.catalog
	if m, ok := cat.byKey[c.traits.Names.Key(model)]; ok { // also while it does not answer: the scheduler knows what to do then
		if sl := c.holds(m); sl != nil { // by its digest
			return Offer{Known: lifecycle.Yes, As: sl.model}, false
		}
		return Offer{Known: lifecycle.Yes, As: m.Name}, false
	}
	if c.misses(time.Now(), model) {
		return Offer{Known: lifecycle.No}, false
	}
	asker, can := c.driver.(lifecycle.Cataloguer)
	stopped := c.traits.Starts && !c.runs() && !b.moves(c) // its last list holds
	switch {
	case !c.traits.Catalog || !can:
		return Offer{}, false
	case time.Since(cat.at) >= catalogRest:
		return Offer{}, true
	case !cat.told && cat.byKey == nil && c.traits.Starts && (!c.runs() || b.moves(c)):
		return Offer{Starts: true, Failed: cat.failed}, false
	case !cat.told && (cat.byKey == nil || !stopped):
		return Offer{Silent: cat.fault}, false
	case asker.Elsewhere(model):
		return Offer{Elsewhere: true}, false
	}
	offer := Offer{Known: lifecycle.No}
	for _, m := range cat.models {
		offer.Listed = append(offer.Listed, m.Name)
	}
	return offer, false
}

// Catalogs returns for each of several consumers the models that its server could load, as it said at most a few seconds ago, or
// last if it does not answer now; nil: it never has. It asks all servers at once.
func (b *Broker) Catalogs(ctx context.Context, consumers []string) [][]lifecycle.Model {
	answers := make([]<-chan struct{}, len(consumers))
	for i, consumer := range consumers {
		answers[i] = b.ask(consumer)
	}
	catalogs := make([][]lifecycle.Model, len(consumers))
	for i, consumer := range consumers {
		wait(ctx, answers[i])
		b.mu.Lock()
		if c := b.consumers[consumer]; c != nil {
			catalogs[i] = slices.Clone(c.real().catalog.models)
		}
		b.mu.Unlock()
	}
	return catalogs
}

// answeredLately is what ask returns where there is nothing to wait for.
var answeredLately = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// ask asks a server for its catalog unless that was done a moment ago. One question is under way at a time, whoever waits
// for it. What it returns is closed once that is answered; nil: there is nobody to be asked.
func (b *Broker) ask(consumer string) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.consumers[consumer]
	if c == nil || b.closed {
		return nil
	}
	c = c.real()
	asker, can := c.driver.(lifecycle.Cataloguer)
	switch {
	case !can || !c.traits.Catalog:
		return nil
	case c.catalog.asking != nil:
	case time.Since(c.catalog.at) < catalogRest:
		return answeredLately
	default:
		asking := make(chan struct{})
		c.catalog.asking = asking
		b.tasks.Go(func() { b.askCatalog(c, asker, c.probeTimeout, asking) })
	}
	return c.catalog.asking
}

// wait waits until a question is answered. It reports false if nobody is asked, or ctx has ended before.
func wait(ctx context.Context, answered <-chan struct{}) bool {
	if answered == nil {
		return false
	}
	select {
	case <-answered:
		return true
	case <-ctx.Done():
		return false
	}
}

// askCatalog asks once, and closes answered. The question does not end with the request that made it: others wait for it.
func (b *Broker) askCatalog(c *consumer, asker lifecycle.Cataloguer, timeout time.Duration, answered chan struct{}) {
	ctx, cancel := context.WithTimeout(b.ctx, timeout)
	defer cancel()
	models, err := asker.Catalog(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	defer close(answered)
	if c.catalog.asking != answered { // its driver was replaced meanwhile
		return
	}
	c.catalog.asking, c.catalog.at, c.catalog.told = nil, time.Now(), err == nil
	if err != nil {
		c.catalog.fault = err.Error()
		if models == nil {
			return
		}
	}
	c.catalog.models = slices.DeleteFunc(models, func(m lifecycle.Model) bool { return config.CheckModelName(m.Name) != nil })
	c.catalog.byKey = make(map[string]lifecycle.Model, len(c.catalog.models))
	for _, m := range c.catalog.models {
		key := c.traits.Names.Key(m.Name)
		c.catalog.byKey[key] = m
		delete(c.catalog.missing, key) // it has come meanwhile
	}
}

// misses reports whether the server has said lately that it does not have a model. It holds mu.
func (c *consumer) misses(now time.Time, model string) bool {
	return len(c.catalog.missing) > 0 && now.Before(c.catalog.missing[c.traits.Names.Key(model)])
}

// miss notes that the server does not have a model. It holds mu.
func (c *consumer) miss(now time.Time, model string) {
	missing := c.catalog.missing
	if missing == nil {
		missing = map[string]time.Time{}
		c.catalog.missing = missing
	}
	key := c.traits.Names.Key(model)
	delete(c.catalog.byKey, key) // its last list is out of date
	if _, known := missing[key]; !known && len(missing) >= maxMissing {
		first := ""
		for other, until := range missing {
			if first == "" || until.Before(missing[first]) {
				first = other
			}
		}
		delete(missing, first)
	}
	missing[key] = now.Add(missingFor)
}

// digestOf returns the digest of a model as the catalog has it; empty: it is not known. It holds mu.
func (c *consumer) digestOf(model string) string {
	if len(c.catalog.byKey) == 0 || model == "" {
		return ""
	}
	return c.catalog.byKey[c.traits.Names.Key(model)].Digest
}

// holds returns the slot of a model that the server lists, by any of its names or by its digest; nil: it has none. It holds mu.
func (c *consumer) holds(m lifecycle.Model) *slot {
	if sl := c.known(m.Name); sl != nil || m.Digest == "" {
		return sl
	}
	i := slices.IndexFunc(c.slots, func(sl *slot) bool { return c.digestOf(sl.model) == m.Digest })
	if i < 0 {
		return nil
	}
	return c.slots[i]
}

// strange reports whether a server lists a model as loaded that only its catalog can tell to be one of ours. It takes mu.
func (b *Broker) strange(consumer string, loaded []lifecycle.Model) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.withServer(consumer)
	return c != nil && c.traits.Catalog && c.cfg.HasModels() &&
		slices.ContainsFunc(loaded, func(m lifecycle.Model) bool { return m.Digest != "" && c.holds(m) == nil })
}

// ProbeSoon has the server of a consumer probed at once.
func (b *Broker) ProbeSoon(consumer string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.consumers[consumer]; c != nil && !b.closed {
		select {
		case c.real().probeNow <- struct{}{}:
		default: // it is about to be
		}
	}
}

// Held is what a model holds, before it is unloaded for a client.
type Held struct {
	Slot    string
	Loaded  bool // or it may be, or is about to be
	Pinned  bool
	Refused error // the consumer is not served now
}

// Held returns what a model of a consumer holds, or a consumer without models. It makes no slot.
func (b *Broker) Held(consumer, model string) Held {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.consumers[consumer]
	if c == nil || b.closed {
		return Held{Refused: b.turnAway(time.Now(), consumer, b.nowhere(&Request{Consumer: consumer}))}
	}
	sl := c.holder(model)
	if sl == nil {
		return Held{}
	}
	v, known := b.state.Slot(sl.name)
	return Held{Slot: sl.name, Loaded: known && v.State != scheduler.Idle, Pinned: v.Pinned}
}

// Pinned reports whether a model of a consumer, or one without models as a whole, is pinned now. It is for the warm path.
func (b *Broker) Pinned(consumer, model string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.consumers[consumer]
	if c == nil {
		return false
	}
	sl := c.holder(model)
	return sl != nil && b.state.Pinned(sl.name)
}

// holder is the slot of a model, or that of a consumer without models; nil: there is none. One that shares another's server has the other's.
func (c *consumer) holder(model string) *slot {
	c = c.real()
	switch {
	case model != "":
		return c.known(model)
	case !c.cfg.HasModels() && len(c.slots) > 0:
		return c.slots[0]
	}
	return nil
}
