package httplife

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// maxCatalog bounds how many models of one server's catalog are read.
const maxCatalog = 4096

// Catalog asks the server once which models it could load.
func (d *driver) Catalog(ctx context.Context) ([]lifecycle.Model, error) {
	r := d.plan.catalog
	if r == nil {
		return nil, d.wrap("catalog", errors.New("no catalog route is configured"))
	}
	answer, err := d.ask(ctx, r, nil, limit(r, time.Now().Add(d.deps.Limits.Probe())))
	if err != nil {
		return nil, d.wrap("catalog", err)
	}
	models, err := r.listModels(ctx, answer, maxCatalog)
	if err != nil {
		return nil, d.wrap("catalog", fmt.Errorf("%s: %w", r.name, err))
	}
	return models, nil
}

// Elsewhere reports whether a model of this name may be served though the catalog does not list it.
func (d *driver) Elsewhere(name string) bool {
	return slices.ContainsFunc(d.plan.elsewhere, func(ending string) bool { return strings.HasSuffix(name, ending) })
}

// digest returns the digest of a model as the catalog has it; empty: it can't be told.
func (d *driver) digest(ctx context.Context, model string) string {
	if d.plan.catalog == nil || d.plan.catalog.digests == nil {
		return ""
	}
	models, err := d.Catalog(ctx)
	if err != nil {
		return "" // the load fails by its name, then
	}
	for _, m := range models {
		if d.plan.modelNames.Same(m.Name, model) {
			return m.Digest
		}
	}
	return ""
}

// listLoading reads the names of the models that an answer says are being loaded.
func (r *route) listLoading(ctx context.Context, answer any) (names []string) {
	if r.loading == nil {
		return nil
	}
	value, err := r.loading.find(ctx, answer)
	if err != nil {
		return nil
	}
	values, err := list(value)
	if err != nil {
		return nil
	}
	for _, v := range values {
		names = append(names, plain(v))
	}
	return names
}

// lists reports whether names have that of a model.
func (d *driver) lists(names []string, model string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return d.plan.modelNames.Same(name, model) })
}

// Times after which a load that the server has accepted counts as one that came to nothing.
const (
	stableList = 250 * time.Millisecond // where the load call waits until it is loaded
	stillWait  = 10 * time.Second       // where it does not: by the list, and by the free memory
)

// outcome judges whether an accepted load has come to nothing, by what the server lists since. It has no clock.
type outcome struct {
	waits bool // the load call returns only once the model is loaded
	model bool // a model of several is meant, not the server as a whole
	still func() (time.Duration, bool)

	listed string    // what the server has listed since then
	since  time.Time // zero: the target was listed, or the server did not say
}

// toNothing takes in a probe made at now. absent reports that the server answered and that the target was not listed.
func (o *outcome) toNothing(now time.Time, absent bool, models []lifecycle.Model) bool {
	listed := listing(models)
	switch {
	case !absent:
		o.since = time.Time{}
		return false
	case o.since.IsZero() || o.listed != listed:
		o.listed, o.since = listed, now
		return false
	case o.waits:
		return now.Sub(o.since) >= stableList
	case !o.model || o.still == nil || now.Sub(o.since) < stillWait: // a server that says nothing of others may be slow
		return false
	}
	still, known := o.still()
	return known && still >= stillWait
}

// listing is what a server lists, in an order of its own.
func listing(models []lifecycle.Model) string {
	names := make([]string, 0, len(models))
	for _, m := range models {
		names = append(names, m.Name)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// cameToNothing is the error of a load that the server accepted and did not do.
func (d *driver) cameToNothing(t lifecycle.Target, models []lifecycle.Model) error {
	if t.Model == "" {
		return errors.New("the server accepted the load, but says that it is not loaded")
	}
	values := make([]any, 0, len(models))
	for _, m := range models {
		values = append(values, m.Name)
	}
	has := d.names(values)
	if has == "" {
		has = "no model"
	}
	return fmt.Errorf("the server accepted the load of %q, but lists %s: does it know the model by another name?", t.Model, has)
}

var _ lifecycle.Cataloguer = (*driver)(nil)
