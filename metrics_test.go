package gpubroker

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// shown is a status that is collected as the broker's own.
type shown struct {
	status broker.Status
	held   int64
}

func (shown) Describe(ch chan<- *prometheus.Desc) { live{}.Describe(ch) }

func (s shown) Collect(ch chan<- prometheus.Metric) { collect(s.status, s.held, ch) }

// gathered are the series of a registry by name and labels, of which each is `name{value,value}`.
func gathered(t *testing.T, c ...prometheus.Collector) map[string]*dto.Metric {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c...)
	families, err := r.Gather()
	require.NoError(t, err)
	out := map[string]*dto.Metric{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			out[name] = m
		}
	}
	return out
}

func TestMetricsTellHowBusyAGPUIsIfTheDriverDoes(t *testing.T) {
	got := gathered(t, shown{broker.Status{GPUs: []broker.GPU{
		{Index: 0, Health: string(gpu.Healthy), Utilisation: new(37)}, {Index: 1, Health: string(gpu.Healthy), Utilisation: new(0)}, {Index: 2, Health: string(gpu.Healthy)},
	}}, 4096})
	require.InDelta(t, 0.37, got["caddy_gpu_broker_gpu_utilization_ratio 0"].GetGauge().GetValue(), 1e-9)
	require.Contains(t, got, "caddy_gpu_broker_gpu_utilization_ratio 1")
	require.Zero(t, got["caddy_gpu_broker_gpu_utilization_ratio 1"].GetGauge().GetValue())
	require.NotContains(t, got, "caddy_gpu_broker_gpu_utilization_ratio 2")
	require.Equal(t, 4096.0, got["caddy_gpu_broker_buffered_bytes"].GetGauge().GetValue())
}

func TestResidencyIsCountedByConsumerAndTellsDaysApart(t *testing.T) {
	t.Cleanup(func() { metrics.residency.DeleteLabelValues("stays") })
	observer{}.Resided("stays/one", 30*time.Second)
	observer{}.Resided("stays/another", 2*24*time.Hour)
	h := gathered(t, metrics.residency)["caddy_gpu_broker_residency_seconds stays"].GetHistogram()
	require.EqualValues(t, 2, h.GetSampleCount(), "models would be labels without a bound")
	require.Equal(t, 2*24*3600+30.0, h.GetSampleSum())
	var below float64
	for _, b := range h.Bucket {
		if b.GetCumulativeCount() < 2 {
			below = b.GetUpperBound()
		}
	}
	require.Equal(t, 24*3600.0, below)
}

func TestEveryDocumentedErrorCodeHasASeries(t *testing.T) {
	page, err := os.ReadFile("docs/operating.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(page), "<!-- codes -->")
	require.True(t, ok)
	var documented []string
	for line := range strings.Lines(strings.TrimSpace(rest)) {
		if !strings.HasPrefix(line, "|") {
			break
		}
		if name := strings.SplitN(line, "`", 3); len(name) == 3 {
			documented = append(documented, name[1])
		}
	}
	require.ElementsMatch(t, documented, codes, "a new code belongs into the table of docs/operating.md and into codes in metrics.go")
}

func TestN2_ASeriesThatExistsKeepsItsValue(t *testing.T) {
	t.Cleanup(func() { metrics.loads.DeleteLabelValues("kept"); metrics.passed.DeleteLabelValues("kept") })
	createSeries([]string{"kept"})
	metrics.loads.WithLabelValues("kept").Inc()
	countPassed("kept")
	createSeries([]string{"kept", "added"})
	got := gathered(t, metrics.loads, metrics.passed)
	for series, want := range map[string]float64{"loads_total kept": 1, "loads_total added": 0, "passed_total kept": 1, "passed_total added": 0} {
		require.Contains(t, got, "caddy_gpu_broker_"+series)
		require.Equal(t, want, got["caddy_gpu_broker_"+series].GetCounter().GetValue(), series)
	}
}
