package gpubroker

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/internal/faultlines"
)

// titled is err with the route's place before each of its faults.
func (h *Handler) titled(err error) error {
	return faultlines.Prefix(faultlines.Title("gpu_broker", h.Source), err)
}

// check says what is wrong with the route. Its error holds all faults.
func (h *Handler) check() error {
	return errors.Join(h.Check(), h.CheckNames(h.app.names()), h.checkConsumers())
}

// checkConsumers says what is wrong between the route and the consumers that it names.
func (h *Handler) checkConsumers() error {
	var faults []error
	if c := h.app.consumer(h.Default); h.Default != "" && c != nil && c.HasModels() {
		faults = append(faults, fmt.Errorf("default names consumer %q, which has several models: name one without, or leave default out", h.Default))
	}
	if c := h.app.consumer(h.Consumer); h.StreamBody && h.Consumer != "" && c != nil && c.HasModels() &&
		slices.ContainsFunc(modelFrom(c), func(m config.ModelFrom) bool { return m.Source == config.FromBody }) {
		faults = append(faults, fmt.Errorf("stream_body, but the requests of consumer %q name their model in the body: leave stream_body out, or say model_from header or path at the consumer", h.Consumer))
	}
	return errors.Join(faults...)
}
