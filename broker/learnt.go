package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Store keeps one document over restarts. Its methods are called one at a time.
type Store interface {
	// Load returns the document, or nil if there is none.
	Load(ctx context.Context) ([]byte, error)
	// Save replaces the document, all of it or nothing.
	Save(ctx context.Context, doc []byte) error
	// SetAside puts a document that can't be read out of the way, and says where it is now.
	SetAside(ctx context.Context, doc []byte) (where string, err error)
}

const (
	learntVersion = 1
	learntMax     = 1 << 20         // bytes: it is a few thousand
	saveEvery     = time.Minute     // at most; only what has changed is written
	storeTimeout  = 5 * time.Second // storage may be on a network
)

// learntDoc is the document.
type learntDoc struct {
	Version   int                       `json:"version"`
	Consumers map[string]learntConsumer `json:"consumers"`
}

type learntConsumer struct {
	LoadSeconds   float64     `json:"load_seconds,omitempty"`
	UnloadSeconds float64     `json:"unload_seconds,omitempty"`
	LastUsed      time.Time   `json:"last_used,omitzero"`
	LastPriority  int         `json:"last_priority,omitempty"`
	Footprints    []gpu.Bytes `json:"footprints,omitempty"`
}

func encodeLearnt(learnt map[string]scheduler.Learnt) ([]byte, error) {
	doc := learntDoc{Version: learntVersion, Consumers: map[string]learntConsumer{}}
	for name, l := range learnt {
		doc.Consumers[name] = learntConsumer{LoadSeconds: l.LoadCost.Seconds(), UnloadSeconds: l.UnloadCost.Seconds(),
			LastUsed: l.LastUse.UTC(), LastPriority: l.LastPriority, Footprints: l.Footprints}
	}
	return json.MarshalIndent(doc, "", "\t")
}

// decodeLearnt reads a document; it refuses one that it does not understand whole.
func decodeLearnt(data []byte) (map[string]scheduler.Learnt, error) {
	if len(data) > learntMax {
		return nil, fmt.Errorf("it has %d bytes, more than %d", len(data), learntMax)
	}
	var doc learntDoc
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&doc); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the document")
	}
	if doc.Version != learntVersion {
		return nil, fmt.Errorf("its version is %d, not %d", doc.Version, learntVersion)
	}
	out := map[string]scheduler.Learnt{}
	for name, c := range doc.Consumers {
		consumer, model, of := strings.Cut(name, "/")
		err := config.CheckName(consumer)
		if err == nil && of {
			err = config.CheckModelName(model)
		}
		if err != nil {
			return nil, fmt.Errorf("consumer %q: %w", name, err)
		}
		l := scheduler.Learnt{LastUse: c.LastUsed, LastPriority: c.LastPriority, Footprints: c.Footprints}
		for _, s := range []struct {
			from float64
			to   *time.Duration
		}{{c.LoadSeconds, &l.LoadCost}, {c.UnloadSeconds, &l.UnloadCost}} {
			if s.from < 0 || s.from > math.MaxInt32 {
				return nil, fmt.Errorf("consumer %q: a time of %v s", name, s.from)
			}
			*s.to = time.Duration(math.Round(s.from * float64(time.Second))) // as it was: else each restart would change the document
		}
		for _, f := range c.Footprints {
			if f < 0 {
				return nil, fmt.Errorf("consumer %q: a footprint of %d bytes", name, f)
			}
		}
		out[name] = l
	}
	return out, nil
}

// recall reads what was learnt before a restart; first is false if that was
// done before. Trouble with it costs what was learnt, and nothing else.
func (b *Broker) recall(g *Generation) (learnt map[string]scheduler.Learnt, first bool) {
	b.saving.Lock()
	defer b.saving.Unlock()
	if b.recalled || g.Store == nil {
		return nil, false
	}
	b.recalled = true
	ctx, cancel := context.WithTimeout(b.ctx, storeTimeout)
	defer cancel()
	data, err := g.Store.Load(ctx)
	if err != nil {
		b.unsaved = true
		g.Logger.Warn("what was learnt before can't be read: beginning anew, and saving nothing before the next start", zap.Error(err))
		return nil, false
	}
	if data == nil {
		return nil, false
	}
	if learnt, err = decodeLearnt(data); err != nil {
		where, asideErr := g.Store.SetAside(ctx, data)
		b.unsaved = asideErr != nil
		g.Logger.Warn("what was learnt before is damaged: it is set aside, beginning anew", zap.String("moved_to", where), zap.NamedError("damage", err), zap.Error(asideErr))
		return nil, false
	}
	b.saved = data
	return learnt, true
}

// keepLearnt sees to it that what is learnt is kept in the ruling generation's store. It holds mu.
func (b *Broker) keepLearnt(g *Generation) {
	if g.Store == nil || b.keeping {
		return
	}
	b.keeping = true
	b.tasks.Go(func() {
		for sleep(b.ctx, saveEvery) {
			b.save()
		}
	})
}

// withOthers adds what other processes have learnt of models that this one knows nothing of: two Caddys with one data
// folder would otherwise each drop what the other has learnt. It holds saving.
func (b *Broker) withOthers(ctx context.Context, g *Generation, learnt map[string]scheduler.Learnt) []byte {
	there, err := g.Store.Load(ctx)
	if err != nil || there == nil || bytes.Equal(there, b.saved) {
		return b.encodeAll(learnt) // the first is told by Save
	}
	theirs, err := decodeLearnt(there)
	if err != nil {
		return b.encodeAll(learnt) // it is of no use to anybody
	}
	if !b.sharesStore {
		b.sharesStore = true
		g.Logger.Warn("another Caddy keeps what it learns in the same data folder: both are kept, model by model. Give each its own folder (XDG_DATA_HOME, or storage), or what they know of models of the same name gets mixed up")
	}
	b.others = theirs
	return b.encodeAll(learnt)
}

// encodeAll encodes learnt together with what others have learnt, unless that is too much for one document; nil: it can't be encoded. It holds saving.
func (b *Broker) encodeAll(learnt map[string]scheduler.Learnt) []byte {
	if len(b.others) > 0 {
		all := maps.Clone(b.others)
		maps.Copy(all, learnt)
		if doc, err := encodeLearnt(all); err == nil && len(doc) <= learntMax {
			return doc
		}
	}
	doc, err := encodeLearnt(learnt)
	if err != nil {
		return nil
	}
	return doc
}

// save writes what was learnt, if it has changed.
func (b *Broker) save() {
	g := b.current.Load()
	if g == nil || g.Store == nil {
		return
	}
	b.saving.Lock() // first: a later save must not be the older one
	defer b.saving.Unlock()
	b.mu.Lock()
	learnt := b.state.Learnt()
	b.mu.Unlock()
	doc := b.encodeAll(learnt)
	if doc == nil || b.unsaved || bytes.Equal(doc, b.saved) || len(learnt) == 0 && b.saved == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.ctx), storeTimeout) // the last one is at the end
	defer cancel()
	doc = b.withOthers(ctx, g, learnt)
	if err := g.Store.Save(ctx, doc); err != nil {
		g.Logger.Warn("what was learnt can't be saved", zap.Error(err))
		return
	}
	b.saved = doc
}
