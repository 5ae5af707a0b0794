package simulate

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Bounds of a trace.
const (
	maxRequests = 5_000_000
	maxFaults   = 10 // that are told; one is enough to refuse a trace
	maxSeconds  = 1e10
)

// Lookup finds the consumer that a trace means by a name, and the priority of its requests where the trace tells none.
type Lookup func(name string) (consumer string, priority int, err error)

// columns of a trace, in their usual order. A header may name them in any order, and others, which are
// ignored, but for client.
var columns = []string{"time", "consumer", "service_seconds", "priority", "patience"}

// ReadTrace reads requests from CSV: time, consumer, service_seconds and, if
// they are there, priority and patience. A time is in seconds, or as RFC 3339
// has it; the earliest is the beginning. A request without service_seconds, as one that was
// never served, gets the mean of its consumer's others, or else of all. Patience is in seconds; empty or 0: for ever.
// A header is there if the first field says time. Requests whose consumer find does not know are skipped, and counted by its name.
// name is the file's, for errors, which tell the line.
func ReadTrace(in io.Reader, name string, find Lookup) ([]Request, []Skipped, error) {
	t := &traceReader{name: name, find: find, known: map[string]*known{}}
	rows := csv.NewReader(in)
	rows.FieldsPerRecord, rows.ReuseRecord, rows.TrimLeadingSpace, rows.Comment = -1, true, true, '#'
	t.at(columns)
	for first := true; len(t.faults) < maxFaults; first = false {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.faults = append(t.faults, fmt.Errorf("%s: %w", name, err)) // it tells the line
			break
		}
		t.line, _ = rows.FieldPos(0)
		if first {
			row[0] = strings.TrimPrefix(row[0], "\ufeff")
		}
		if strings.EqualFold(strings.TrimSpace(row[0]), columns[0]) { // also in the middle, where files were put together
			t.header(row)
			continue
		}
		if len(t.requests) == maxRequests {
			t.fault("more than %d requests: cut the trace", maxRequests)
			break
		}
		t.read(row)
	}
	t.fillIn()
	skipped := t.skipped()
	switch {
	case len(t.faults) > 0 || len(t.requests) > 0:
	case len(skipped) > 0:
		t.faults = append(t.faults, fmt.Errorf("%s holds no request of a consumer of this configuration: %w", name, skipped[0].Why))
	default:
		t.faults = append(t.faults, fmt.Errorf("%s holds no requests: each is a line of the form time,consumer,service_seconds", name))
	}
	if len(t.faults) > 0 {
		return nil, nil, errors.Join(t.faults...)
	}
	return t.requests, skipped, nil
}

// Skipped are the requests of a trace for one consumer that the configuration doesn't have.
type Skipped struct {
	Name     string // as the trace has it
	Requests int
	Why      error
}

// skipped are the unknown consumers, those with the most requests first.
func (t *traceReader) skipped() (out []Skipped) {
	for name, k := range t.known {
		if k.err != nil && k.skipped > 0 {
			out = append(out, Skipped{name, k.skipped, k.err})
		}
	}
	slices.SortFunc(out, func(a, b Skipped) int {
		return cmp.Or(cmp.Compare(b.Requests, a.Requests), strings.Compare(a.Name, b.Name))
	})
	return out
}

type traceReader struct {
	name     string
	find     Lookup
	line     int
	column   map[string]int // where each is; those that are not there are absent
	known    map[string]*known
	requests []Request
	unserved []int     // places of those without service time
	begin    time.Time // the first line's
	begun    bool
	clock    bool // times are RFC 3339
	faults   []error
}

// known is what was found out about a consumer.
type known struct {
	consumer string
	priority int
	err      error
	skipped  int // requests of an unknown one
}

func (t *traceReader) fault(format string, args ...any) {
	t.faults = append(t.faults, fmt.Errorf("%s:%d: %w", t.name, t.line, fmt.Errorf(format, args...)))
}

func (t *traceReader) at(names []string) {
	t.column = map[string]int{}
	for i, n := range names {
		n = strings.ToLower(strings.TrimSpace(n))
		if _, twice := t.column[n]; !twice {
			t.column[n] = i
		}
	}
}

func (t *traceReader) header(row []string) {
	t.at(row)
	for _, must := range columns[:3] {
		if _, ok := t.column[must]; !ok {
			t.fault("the header names no column %s: it must name time, consumer and service_seconds", must)
		}
	}
}

// field is a field of a row, or "" if it has none.
func (t *traceReader) field(row []string, column string) string {
	i, ok := t.column[column]
	if !ok || i >= len(row) {
		return ""
	}
	return strings.TrimSpace(row[i])
}

func (t *traceReader) read(row []string) {
	if len(row) < 3 {
		t.fault("%d fields: at least three are wanted, time, consumer and service_seconds", len(row))
		return
	}
	before := len(t.faults)
	var q Request
	q.At = t.time(t.field(row, "time"))
	name := t.field(row, "consumer")
	k, ok := t.known[name]
	if !ok {
		k = &known{}
		k.consumer, k.priority, k.err = t.find(strings.Clone(name))
		t.known[strings.Clone(name)] = k
	}
	q.Consumer, q.Priority, q.Client = k.consumer, k.priority, strings.Clone(t.field(row, "client"))
	service := t.field(row, "service_seconds")
	q.Service = t.seconds("service_seconds", service)
	q.Patience = t.seconds("patience", t.field(row, "patience"))
	if p := t.field(row, "priority"); p != "" {
		n, err := strconv.Atoi(p)
		if err != nil {
			t.fault("priority %q is no whole number", p)
		}
		q.Priority = n
	}
	if len(t.faults) > before {
		return
	}
	if k.err != nil {
		k.skipped++
		return
	}
	if service == "" {
		t.unserved = append(t.unserved, len(t.requests))
	}
	t.requests = append(t.requests, q)
}

// time is when a request comes, from the first line's time.
func (t *traceReader) time(text string) time.Duration {
	if s, err := strconv.ParseFloat(text, 64); err == nil && math.Abs(s) <= maxSeconds {
		if t.clock {
			t.fault("time %q is in seconds, and those before are of the form 2006-01-02T15:04:05Z: use one of them", text)
		}
		// Whole seconds and the rest apart: seconds since 1970 would lose what is below a microsecond.
		whole, rest := math.Modf(s)
		return t.since(time.Unix(int64(whole), int64(rest*1e9)))
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.fault("time %q is neither a number of seconds nor of the form 2006-01-02T15:04:05Z", text)
		return 0
	}
	if t.begun && !t.clock {
		t.fault("time %q is a date, and those before are in seconds: use one of them", text)
	}
	t.clock = true
	return t.since(at)
}

func (t *traceReader) since(at time.Time) time.Duration {
	if !t.begun {
		t.begin, t.begun = at, true
	}
	return at.Sub(t.begin)
}

// seconds is a field that holds a time in seconds; an empty one is 0.
func (t *traceReader) seconds(column, text string) time.Duration {
	if text == "" {
		return 0
	}
	s, err := strconv.ParseFloat(text, 64)
	if err != nil || !(s >= 0 && s <= maxSeconds/10) {
		t.fault("%s %q is no number of seconds: 0 or more are wanted, as in 12.5", column, text)
		return 0
	}
	return seconds(s)
}

// fillIn gives a service time to those that tell none, and lets the earliest request be the beginning.
func (t *traceReader) fillIn() {
	type total struct{ sum, count time.Duration }
	all, by := total{}, map[string]total{}
	unserved := map[int]bool{}
	for _, i := range t.unserved {
		unserved[i] = true
	}
	earliest := never
	for i, q := range t.requests {
		earliest = min(earliest, q.At)
		if unserved[i] {
			continue
		}
		all = total{all.sum + q.Service, all.count + 1}
		by[q.Consumer] = total{by[q.Consumer].sum + q.Service, by[q.Consumer].count + 1}
	}
	if len(t.unserved) > 0 && all.count == 0 {
		t.faults = append(t.faults, fmt.Errorf("%s: no request tells its service_seconds", t.name))
		return
	}
	for _, i := range t.unserved {
		from := by[t.requests[i].Consumer]
		if from.count == 0 {
			from = all
		}
		t.requests[i].Service = from.sum / from.count
	}
	for i := range t.requests {
		t.requests[i].At -= earliest
	}
}

// Rate is requests that come at random.
type Rate struct {
	Consumer string
	PerHour  float64
	Service  time.Duration // the mean; the times themselves are exponentially distributed
	Priority int
}

// Poisson makes a trace of so many hours from rates.
func Poisson(rates []Rate, hours float64, seed uint64) ([]Request, error) {
	var out []Request
	for i, rate := range rates {
		if n := rate.PerHour * hours; !(n >= 0 && n <= maxRequests) {
			return nil, fmt.Errorf("%v requests an hour for %s over %v hours: at most %d in all are possible", rate.PerHour, rate.Consumer, hours, maxRequests)
		}
		if rate.PerHour == 0 {
			continue
		}
		r := rand.New(rand.NewPCG(seed, uint64(1000+i)))
		for at := r.ExpFloat64() / rate.PerHour; at < hours; at += r.ExpFloat64() / rate.PerHour {
			out = append(out, Request{At: seconds(at * 3600), Consumer: rate.Consumer, Priority: rate.Priority,
				Service: time.Duration(float64(rate.Service) * r.ExpFloat64())})
		}
	}
	if len(out) == 0 {
		return nil, errors.New("the rates give no request in that time: raise them, or simulate more hours")
	}
	return out, nil
}
