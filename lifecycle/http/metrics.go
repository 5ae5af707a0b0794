package httplife

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// measured reports whether one of a route's metrics is above 0. That all of them are missing is an error: the server does not say.
func (d *driver) measured(ctx context.Context, r *route, t lifecycle.Target) (bool, error) {
	body, err := d.exchange(ctx, r, d.plan.item(t), limit(r, time.Now().Add(d.deps.Limits.Probe())))
	if err != nil {
		return false, d.wrap("busy", err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		return false, d.wrap("busy", fmt.Errorf("%s: the answer is not in Prometheus' text form", r.name))
	}
	found := false
	for name, family := range families {
		if !slices.Contains(r.metrics, name) {
			continue
		}
		found = true
		if slices.ContainsFunc(family.GetMetric(), func(m *dto.Metric) bool {
			return m.GetGauge().GetValue() > 0 || m.GetUntyped().GetValue() > 0 || m.GetCounter().GetValue() > 0
		}) {
			return true, nil
		}
	}
	if !found {
		return false, d.wrap("busy", fmt.Errorf("%s: the answer has none of the metrics %q", r.name, r.metrics))
	}
	return false, nil
}
