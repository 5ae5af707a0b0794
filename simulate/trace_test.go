package simulate

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

func ab(name string) (string, int, error) {
	switch name {
	case "a", "alias-of-a":
		return "a", 100, nil
	case "b":
		return "b", 50, nil
	default:
		return "", 0, config.Unknown("consumer", name, []string{"a", "b"})
	}
}

func TestTracesAreRead(t *testing.T) {
	two := []Request{
		{At: 0, Consumer: "a", Service: 1500 * time.Millisecond, Priority: 100},
		{At: 10 * time.Second, Consumer: "b", Service: 2 * time.Second, Priority: 50},
	}
	for name, c := range map[string]struct {
		text string
		want []Request
	}{
		"three columns":            {"5,a,1.5\n15,b,2\n", two},
		"an alias":                 {"5,alias-of-a,1.5\n15,b,2\n", two},
		"comments, blanks and BOM": {"\ufefftime,consumer,service_seconds\n# a comment\n 5, a , 1.5\n\n15,b,2", two},
		"CRLF":                     {"5,a,1.5\r\n15,b,2\r\n", two},
		"any order":                {"Time,SERVICE_seconds,code,consumer\n5,1.5,200,a\n15,2,500,b\n", two},
		"dates":                    {"2026-03-01T00:00:05Z,a,1.5\n2026-03-01T01:00:15.000+01:00,b,2\n", two},
		"seconds since 1970":       {"1772323205,a,1.5\n1772323215,b,2\n", two},
		"not in order":             {"15,b,2\n5,a,1.5\n", []Request{two[1], two[0]}},
		"a header in the middle":   {"time,consumer,service_seconds\n5,a,1.5\ntime,consumer,service_seconds\n15,b,2", two},
		"priority and patience": {"0,a,1,10,60\n1,a,1,,\n2,b,1,,0.5\n", []Request{
			{At: 0, Consumer: "a", Service: time.Second, Priority: 10, Patience: time.Minute},
			{At: time.Second, Consumer: "a", Service: time.Second, Priority: 100},
			{At: 2 * time.Second, Consumer: "b", Service: time.Second, Priority: 50, Patience: 500 * time.Millisecond},
		}},
		"clients": {"time,consumer,service_seconds,client\n0,a,1,me\n", []Request{{Consumer: "a", Client: "me", Service: time.Second, Priority: 100}}},
		"one that was not served": {"0,a,1\n1,a,3\n2,a,\n3,b,\n", []Request{
			{Consumer: "a", Service: time.Second, Priority: 100},
			{At: time.Second, Consumer: "a", Service: 3 * time.Second, Priority: 100},
			{At: 2 * time.Second, Consumer: "a", Service: 2 * time.Second, Priority: 100},
			{At: 3 * time.Second, Consumer: "b", Service: 2 * time.Second, Priority: 50},
		}},
		"the broker's own log": {
			"time,consumer,service_seconds,priority,patience,wait_seconds,load_seconds,code\n" +
				"2026-03-01T00:00:05.250Z,a,1.500,100,,0.020,0.000,200\n2026-03-01T00:00:06.250Z,b,,50,3.000,3.000,0.000,client_left\n",
			[]Request{
				{Consumer: "a", Service: 1500 * time.Millisecond, Priority: 100},
				{At: time.Second, Consumer: "b", Service: 1500 * time.Millisecond, Priority: 50, Patience: 3 * time.Second},
			}},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := ReadTrace(strings.NewReader(c.text), "trace.csv", ab)
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
		})
	}
}

func TestFaultsOfATraceAreToldWithTheirLines(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "trace.csv holds no requests: each is a line of the form time,consumer,service_seconds",
		"time,consumer\n":                   "trace.csv:1: the header names no column service_seconds",
		"0,a,1\n0,a\n":                      "trace.csv:2: 2 fields: at least three are wanted",
		"0,c,1\n\n0,c,1\n":                  `trace.csv holds no request of a consumer of this configuration: unknown consumer "c"`,
		"soon,a,1\n":                        `trace.csv:1: time "soon" is neither a number of seconds nor of the form 2006-01-02T15:04:05Z`,
		"NaN,a,1\n":                         `trace.csv:1: time "NaN" is neither`,
		"0,a,1\n2026-03-01T00:00:05Z,a,1\n": "trace.csv:2: time \"2026-03-01T00:00:05Z\" is a date, and those before are in seconds",
		"2026-03-01T00:00:05Z,a,1\n0,a,1\n": `trace.csv:2: time "0" is in seconds, and those before are of the form`,
		"0,a,-1\n":                          `trace.csv:1: service_seconds "-1" is no number of seconds`,
		"0,a,Inf\n":                         `trace.csv:1: service_seconds "Inf" is no number of seconds`,
		"0,a,1,high\n":                      `trace.csv:1: priority "high" is no whole number`,
		"0,a,1,,long\n":                     `trace.csv:1: patience "long" is no number of seconds`,
		"0,a,\n":                            "trace.csv: no request tells its service_seconds",
		"0,a,\"1\n":                         "trace.csv: parse error on line 1",
		"0,c,1\n0,a,x\n":                    "trace.csv:2: service_seconds",
		strings.Repeat("0,a,x\n", 50):       "trace.csv:10: service_seconds",
	} {
		t.Run(text[:min(len(text), 20)], func(t *testing.T) {
			got, _, err := ReadTrace(strings.NewReader(text), "trace.csv", ab)
			require.Error(t, err)
			assert.Nil(t, got)
			assert.Contains(t, err.Error(), want)
			assert.LessOrEqual(t, strings.Count(err.Error(), "\n"), maxFaults-1)
		})
	}
}

func TestN5_RequestsOfUnknownConsumersAreSkippedAndCounted(t *testing.T) {
	got, skipped, err := ReadTrace(strings.NewReader("0,a,1\n1,hosted/m,1\n2,gone,1\n3,hosted/m,\n4,a,1\n"), "trace.csv", ab)
	require.NoError(t, err)
	require.Len(t, got, 2)
	require.Equal(t, 4*time.Second, got[1].At)
	require.Len(t, skipped, 2)
	assert.Equal(t, "hosted/m", skipped[0].Name)
	assert.Equal(t, 2, skipped[0].Requests)
	assert.ErrorContains(t, skipped[0].Why, "hosted/m")
	assert.Equal(t, "gone", skipped[1].Name)
}

func TestRatesComeAtRandomAsOftenAsTheySay(t *testing.T) {
	rates := []Rate{{Consumer: "a", PerHour: 600, Service: 4 * time.Second, Priority: 7}, {Consumer: "b", PerHour: 60, Service: time.Second}}
	got, err := Poisson(rates, 100, 1)
	require.NoError(t, err)
	count, work := map[string]float64{}, map[string]float64{}
	for _, q := range got {
		count[q.Consumer]++
		work[q.Consumer] += q.Service.Seconds()
		assert.Less(t, q.At, 100*time.Hour)
	}
	assert.InEpsilon(t, 60_000, count["a"], .03)
	assert.InEpsilon(t, 6_000, count["b"], .06)
	assert.InEpsilon(t, 4, work["a"]/count["a"], .03, "mean service")
	assert.Equal(t, 7, got[0].Priority)

	again, err := Poisson(rates, 100, 1)
	require.NoError(t, err)
	assert.Equal(t, got, again, "equal seeds give equal requests")
	other, err := Poisson(rates, 100, 2)
	require.NoError(t, err)
	assert.NotEqual(t, got, other)
}

func TestRatesThatGiveNothingOrTooMuchAreRefused(t *testing.T) {
	_, err := Poisson([]Rate{{Consumer: "a", PerHour: 0}}, 1, 1)
	assert.ErrorContains(t, err, "no request in that time")
	_, err = Poisson([]Rate{{Consumer: "a", PerHour: 1e9}}, 1, 1)
	assert.ErrorContains(t, err, fmt.Sprint(maxRequests))
}
