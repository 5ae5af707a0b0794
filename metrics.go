package gpubroker

import (
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// metrics are made once for the process and registered with each configuration's registry, so they survive reloads.
var metrics = struct {
	wait, run, load, unload, residency                                                 *prometheus.HistogramVec
	errors, passed, fallbacks, evictions, unloads, loads, loadFailures, unloadFailures *prometheus.CounterVec
}{
	wait:           histogram("wait_seconds", "How long requests waited for their turn and their model.", waits),
	run:            histogram("run_seconds", "How long requests ran, until the last byte of their answer.", waits),
	load:           histogram("load_seconds", "How long loads took.", waits),
	unload:         histogram("unload_seconds", "How long unloads took, until the memory was back.", waits),
	residency:      histogram("residency_seconds", "How long models stayed loaded, until their memory was back or they were gone.", stays),
	errors:         counter("errors_total", "Requests that were refused or failed, by code.", "consumer", "code"),
	fallbacks:      counter("fallbacks_total", "Requests that a fallback took, by the consumer that was asked for.", "consumer", "to"),
	passed:         counter("passed_total", "Requests that no list of their consumer names, and that passed without a turn.", "consumer"),
	evictions:      counter("evictions_total", "Successful unloads made for room. The only reason is evict.", "consumer", "reason"),
	unloads:        counter("unloads_total", "Successful unloads, by reason: evict (made for room), idle or manual.", "consumer", "reason"),
	loads:          counter("loads_total", "Loads that were decided.", "consumer"),
	loadFailures:   counter("load_failures_total", "Loads that failed.", "consumer"),
	unloadFailures: counter("unload_failures_total", "Unloads that failed: the model stayed.", "consumer"),
}

const namespace, subsystem = "caddy", "gpu_broker"

// The upper bounds of histograms, in seconds: of what a client waits for, and of how long a model stays.
var (
	waits = []float64{.001, .01, .1, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640}
	stays = []float64{1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 7 * 24 * 3600}
)

func histogram(name, help string, buckets []float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help,
		Buckets: buckets}, []string{"consumer"})
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help}, labels)
}

// registerMetrics adds all metrics to a configuration's registry; those that are there already are no fault.
func registerMetrics(r *prometheus.Registry) error {
	for _, c := range []prometheus.Collector{metrics.wait, metrics.run, metrics.load, metrics.unload, metrics.residency, metrics.errors, metrics.passed, metrics.fallbacks,
		metrics.evictions, metrics.unloads, metrics.loads, metrics.loadFailures, metrics.unloadFailures, live{}} {
		var twice prometheus.AlreadyRegisteredError
		if err := r.Register(c); err != nil && !errors.As(err, &twice) {
			return err
		}
	}
	return nil
}

// reasons are the values of the label reason of unloads.
const (
	reasonEvict  = "evict"
	reasonIdle   = "idle"
	reasonManual = "manual"
)

// codes are the values of the label code of errors_total.
var codes = []string{
	"bad_request", "blocked", "body_too_large", "unsupported_encoding", codeLeft, "failed", "misrouted", "not_found", "server_died", "storage_full", codeUploadStalled,
	string(scheduler.UnknownConsumer), string(scheduler.NeverFits), string(scheduler.Unhealthy), string(scheduler.NotRunning), string(scheduler.QueueFull),
	string(scheduler.VRAMExhausted), string(scheduler.LoadFailed), string(scheduler.GPULost), string(scheduler.Draining), string(scheduler.BudgetExceeded),
	"unload_failed",
}

// cutCodes are the values of requests that were cut, which are answers to nobody.
var cutCodes = []string{codeDownloadStalled, codeTunnelIdle}

// createSeries creates every series of these consumers, at zero: the increase of a
// counter that begins at one is never seen. Those that exist keep their values.
func createSeries(consumers []string) {
	for _, code := range codes { // of requests for which no consumer was found
		metrics.errors.WithLabelValues("", code)
	}
	for _, name := range consumers {
		for _, h := range []*prometheus.HistogramVec{metrics.wait, metrics.run, metrics.load, metrics.unload, metrics.residency} {
			h.WithLabelValues(name)
		}
		for _, c := range []*prometheus.CounterVec{metrics.passed, metrics.loads, metrics.loadFailures, metrics.unloadFailures} {
			c.WithLabelValues(name)
		}
		for _, code := range slices.Concat(codes, cutCodes) {
			metrics.errors.WithLabelValues(name, code)
		}
		metrics.evictions.WithLabelValues(name, reasonEvict)
		for _, reason := range []string{reasonEvict, reasonIdle, reasonManual} {
			metrics.unloads.WithLabelValues(name, reason)
		}
	}
}

// countPassed counts a request that no list of its consumer names, and that passed without a turn.
func countPassed(consumer string) { metrics.passed.WithLabelValues(consumer).Inc() }

// live reads the broker's state when metrics are asked for.
type live struct{}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, subsystem, name), help, labels, nil)
}

var (
	queueDepth  = desc("queue_depth", "Requests that wait.")
	activeJobs  = desc("active", "Requests that run.", "consumer")
	waitingJobs = desc("waiting", "Requests that wait.", "consumer")
	loaded      = desc("loaded", "1 if it is loaded.", "consumer")
	healthy     = desc("healthy", "1 if its server answers.", "consumer")
	slotMemory  = desc("slot_memory_bytes", "GPU memory that is booked for it.", "consumer", "gpu")
	gpuMemory   = desc("gpu_memory_bytes", "GPU memory, by kind: total, free, used, booked, outsiders.", "gpu", "kind")
	gpuUse      = desc("gpu_utilization_ratio", "How busy the GPU is, 0 to 1.", "gpu")
	gpuHealth   = desc("gpu_healthy", "1 if the GPU is not lost.", "gpu")
	bodies      = desc("buffered_bytes", "Request bodies that are held ahead.")
)

// Describe implements prometheus.Collector.
func (live) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{queueDepth, activeJobs, waitingJobs, loaded, healthy, slotMemory, gpuMemory, gpuUse, gpuHealth, bodies} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (live) Collect(ch chan<- prometheus.Metric) {
	if p := active.Load(); p != nil {
		collect(p.broker.Status(), p.buffers.Held(), ch)
	}
}

func collect(s broker.Status, held int64, ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(queueDepth, float64(s.Scheduler.QueueDepth))
	gauge(bodies, float64(held))
	for i, g := range s.GPUs {
		if hidden(s.GPUs, i) {
			continue
		}
		index := strconv.Itoa(g.Index)
		for kind, v := range map[string]int64{"total": g.Total, "free": g.Free, "used": g.Used, "booked": g.Booked, "outsiders": g.Outsiders} {
			gauge(gpuMemory, float64(v), index, kind)
		}
		gauge(gpuHealth, truth(g.Health == "healthy"), index)
		if g.Utilisation != nil {
			gauge(gpuUse, float64(*g.Utilisation)/100, index)
		}
	}
	for name, c := range s.Consumers {
		gauge(activeJobs, float64(c.Active), name)
		gauge(waitingJobs, float64(c.Waiting), name)
		gauge(loaded, truth(c.Loaded), name)
		gauge(healthy, truth(c.Health == "healthy"), name)
		booked := map[int]int64{}
		for _, slot := range c.Slots {
			booked[slot.GPUIndex] += slot.Booking
		}
		for index, bytes := range booked {
			gauge(slotMemory, float64(bytes), name, strconv.Itoa(index))
		}
	}
}

// hidden reports whether a GPU is left out, because another has its index: the
// driver may give that of a lost one away, and no series may come twice.
func hidden(gpus []broker.GPU, i int) bool {
	return slices.ContainsFunc(gpus[:i], func(g broker.GPU) bool { return g.Index == gpus[i].Index && g.Health == gpus[i].Health }) ||
		gpus[i].Health != "healthy" && slices.ContainsFunc(gpus, func(g broker.GPU) bool { return g.Index == gpus[i].Index && g.Health == "healthy" })
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// observer counts decisions and tells Caddy's events of them. It belongs to one configuration.
type observer struct {
	ctx    caddy.Context
	events *caddyevents.App
}

// Count implements broker.Observer.
func (observer) Count(d scheduler.Decision) {
	consumer := broker.ConsumerOf(d.Slot) // models would be labels without a bound
	switch d.Kind {
	case "fallback":
		metrics.fallbacks.WithLabelValues(consumer, d.Target).Inc()
	case "load":
		metrics.loads.WithLabelValues(consumer).Inc()
	case "loaded":
		metrics.load.WithLabelValues(consumer).Observe(d.Took)
	case "load_failed":
		metrics.loadFailures.WithLabelValues(consumer).Inc()
	case "evicted":
		metrics.evictions.WithLabelValues(consumer, reasonEvict).Inc()
		metrics.unloads.WithLabelValues(consumer, reasonEvict).Inc()
		metrics.unload.WithLabelValues(consumer).Observe(d.Took)
	case "unloaded":
		metrics.unloads.WithLabelValues(consumer, reasonManual).Inc()
		metrics.unload.WithLabelValues(consumer).Observe(d.Took)
	case "idle_unloaded":
		metrics.unloads.WithLabelValues(consumer, reasonIdle).Inc()
		metrics.unload.WithLabelValues(consumer).Observe(d.Took)
	case "unload_failed":
		metrics.unloadFailures.WithLabelValues(consumer).Inc()
	}
}

// Resided implements broker.Observer.
func (observer) Resided(slot string, stayed time.Duration) {
	metrics.residency.WithLabelValues(broker.ConsumerOf(slot)).Observe(stayed.Seconds())
}

// eventNames are the decisions that are Caddy events, under the names that users subscribe to.
var eventNames = map[string]string{
	"loaded": "loaded", "unloaded": "unloaded", "idle_unloaded": "unloaded", "evicted": "evicted", "load_failed": "load_failed", "gpu_lost": "gpu_unhealthy",
}

// Decided implements broker.Observer.
func (o observer) Decided(d scheduler.Decision) {
	name := eventNames[d.Kind]
	if d.Kind == "refuse" && d.Code == scheduler.QueueFull {
		name = "queue_full"
	}
	if name == "" {
		return
	}
	o.events.Emit(o.ctx, name, map[string]any{"consumer": broker.ConsumerOf(d.Slot), "slot": d.Slot, "for": d.Target, "gpu": d.GPU, "reason": d.Reason, "seconds": d.Took})
}
