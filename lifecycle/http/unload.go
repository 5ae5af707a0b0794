package httplife

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const (
	// askAgain is when the unload of a value that is still listed is asked for
	// once more: a request that ran meanwhile may have set its timer anew.
	askAgain = 2 * time.Second
	// goneAfter is how long nothing must listen, after an accepted unload, for the wait to end.
	goneAfter = time.Second
)

// Unload calls the unload route, once or for each value of its list until that
// is empty, and waits until the residency probe says unloaded. Where there is
// no such probe, or nothing listens any more, it can't confirm. A route that
// is refused is an error that wraps lifecycle.ErrRefused.
func (d *driver) Unload(ctx context.Context, t lifecycle.Target) (bool, error) {
	r := d.plan.unload
	if traits := d.Traits(); r == nil || t.Model == "" && !traits.Unload || t.Model != "" && !traits.UnloadModel {
		return false, d.wrap("unload", errors.New("no unload route is configured"))
	}
	ctx, cancel := context.WithTimeout(ctx, d.deps.Limits.Unload())
	defer cancel()
	var err error
	switch {
	case d.plan.remember && d.last.unloaded(): // it must not be asked twice
	case t.Model == "" && r.forEach != nil:
		err = d.unloadEach(ctx, r)
	default:
		_, err = d.call(ctx, r, d.plan.item(t))
	}
	if err != nil {
		return false, d.wrap("unload", err)
	}
	if d.plan.remember {
		d.last.note()
	}
	d.deps.Logger.Debug("unload accepted", zap.String("consumer", d.deps.Consumer))
	if d.tells == nil || t.Model != "" && d.tells.names == nil {
		return false, nil
	}
	confirmed, err := d.confirm(ctx, t)
	if err != nil {
		return false, d.wrap("unload", err)
	}
	return confirmed, nil
}

// confirm waits until the residency probe says unloaded.
func (d *driver) confirm(ctx context.Context, t lifecycle.Target) (bool, error) {
	var last said
	var lastErr error
	var refusedSince time.Time
	confirmed, looked := false, false
	err := poll(ctx, func() bool {
		now, err := d.residency(ctx, time.Now().Add(d.deps.Limits.Probe()))
		now.loaded = d.of(now, t)
		if ctx.Err() != nil && err != nil {
			if !looked { // a look that the end of the wait has cut says less than one before it
				lastErr = err
			}
			return false
		}
		looked = true
		last, lastErr = now, err
		if outcomeOf(err) != lifecycle.Refused {
			refusedSince = time.Time{}
		} else if refusedSince.IsZero() {
			refusedSince = time.Now()
		}
		confirmed = err == nil && last.loaded == lifecycle.No
		return confirmed || !refusedSince.IsZero() && time.Since(refusedSince) >= goneAfter
	})
	switch {
	case err == nil:
		return confirmed, nil
	case lastErr != nil:
		return false, fmt.Errorf("the unload was accepted but can't be confirmed: %w", lastErr)
	case last.loaded == lifecycle.Yes:
		return false, fmt.Errorf("the unload was accepted, but the server still says loaded (%w)", err)
	default:
		return false, fmt.Errorf("the unload was accepted, but the server does not say whether it is loaded: %s (%w)", last.detail, err)
	}
}

// unloadEach calls r for each value that its list tells, until the list is empty.
func (d *driver) unloadEach(ctx context.Context, r *route) error {
	asked := map[any]time.Time{}
	var left []any
	var failed, lastErr error
	first := true
	err := poll(ctx, func() bool {
		values, err := d.listed(ctx, r.forEach)
		if err != nil {
			lastErr = err
			if first {
				failed = err
			}
			return failed != nil
		}
		first, left, lastErr = false, values, nil
		failed = d.unloadThese(ctx, r, values, asked)
		return failed != nil || len(left) == 0
	})
	switch {
	case failed != nil:
		return failed
	case err == nil:
		return nil
	case lastErr != nil && len(left) == 0:
		return fmt.Errorf("%w (%w)", lastErr, err)
	default:
		return fmt.Errorf("the unload was accepted, but the server still lists %s (%w)", d.names(left), err)
	}
}

// unloadThese calls r for those of values that were not asked for lately. One
// that fails does not keep the others from being tried.
func (d *driver) unloadThese(ctx context.Context, r *route, values []any, asked map[any]time.Time) error {
	var errs []error
	for _, value := range values {
		if ctx.Err() != nil {
			break
		}
		if at, ok := asked[value]; ok && time.Since(at) < askAgain {
			continue
		}
		asked[value] = time.Now()
		if _, err := d.call(ctx, r, value); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d.names([]any{value}), err))
		}
	}
	return errors.Join(errs...)
}

// listed asks for the values that are to be unloaded.
func (d *driver) listed(ctx context.Context, r *route) ([]any, error) {
	answer, err := d.ask(ctx, r, nil, limit(r, time.Now().Add(d.deps.Limits.Probe())))
	if err != nil {
		return nil, err
	}
	value, err := r.values.find(ctx, answer)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.name, err)
	}
	values, err := list(value)
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", r.name, r.values.expression, err)
	}
	return values, nil
}

// names shows values for people: a few of them, short, without secrets.
func (d *driver) names(values []any) string {
	const most = 5
	var shown []string
	for i, v := range values {
		if i == most {
			shown = append(shown, fmt.Sprintf("and %d more", len(values)-most))
			break
		}
		shown = append(shown, d.plan.secrets.excerpt([]byte(plain(v))))
	}
	return strings.Join(shown, ", ")
}
