package simulate

import (
	"bufio"
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// Mixes are the names that Mix knows.
var Mixes = []string{"hl2", "hl4", "agents4", "hot"}

// MixPriority is the priority of the requests of a mix.
const MixPriority = 100

// Files of the Azure LLM inference traces of 2023 (Azure Public Dataset, CC-BY 4.0), in the folder that Mix is given.
const (
	codeTrace = "azure_llm_code_2023.csv"
	convTrace = "azure_llm_conv_2023.csv"
)

// Mix makes one of the public mixes on which the order of service was chosen:
// models that share a card of 24 GiB, and requests for them which alone
// would keep it busy for the share u of the time. The mix hot is synthetic; the
// others are made from the Azure LLM inference traces of 2023, in the folder traces.
// Equal seeds give equal requests.
func Mix(name string, u float64, seed uint64, traces string) (*World, []Request, error) {
	if !(u > 0) || math.IsInf(u, 1) {
		return nil, nil, fmt.Errorf("the load of a mix must be above 0, and is %v", u)
	}
	m := &mixer{r: rand.New(rand.NewPCG(seed, 7)), traces: traces}
	var err error
	switch name {
	case "hl2":
		err = m.hl2()
	case "hl4":
		err = m.hl4()
	case "agents4":
		err = m.agents4(u)
	case "hot":
		m.hot()
	default:
		err = fmt.Errorf("unknown mix %q: allowed: %s", name, strings.Join(Mixes, ", "))
	}
	if err != nil {
		return nil, nil, err
	}
	m.stretch(u)
	return m.world(), m.requests, nil
}

// mixer puts a mix together.
type mixer struct {
	r        *rand.Rand
	traces   string
	sizes    []gpu.Bytes
	requests []Request
	horizon  time.Duration
}

func (m *mixer) model(size gpu.Bytes) string {
	m.sizes = append(m.sizes, size)
	return "model" + strconv.Itoa(len(m.sizes)-1)
}

func (m *mixer) hl2() error {
	if err := m.azure(convTrace, .20, m.model(14*gpu.GiB), 2500, 50); err != nil {
		return err
	}
	return m.azure(codeTrace, .40, m.model(14*gpu.GiB), 1500, 30)
}

func (m *mixer) hl4() error {
	for _, part := range []struct {
		file             string
		share            float64
		size             gpu.Bytes
		prefill, decoded float64
	}{
		{convTrace, .10, 10 * gpu.GiB, 2500, 50},
		{codeTrace, .30, 14 * gpu.GiB, 1500, 30},
		{convTrace, .03, 16 * gpu.GiB, 1200, 25},
		{convTrace, .05, 6 * gpu.GiB, 20000, 1000},
	} {
		if err := m.azure(part.file, part.share, m.model(part.size), part.prefill, part.decoded); err != nil {
			return err
		}
	}
	m.poisson(m.model(12*gpu.GiB), 120/m.horizon.Seconds(), func() float64 { return 23 * math.Exp(.5*m.r.NormFloat64()) })
	return nil
}

// agents4 is a closed loop: each session waits for an answer, thinks, and asks again.
func (m *mixer) agents4(u float64) error {
	rows, err := readAzure(filepath.Join(m.traces, codeTrace))
	if err != nil {
		return err
	}
	var mean float64
	for _, row := range rows {
		mean += row.service(1500, 30) / float64(len(rows))
	}
	const more = 19.5                     // requests of a session after its first: exponential, of this mean, cut to whole ones
	inSession := 1 + 1/math.Expm1(1/more) // … so many in all
	m.horizon = 40_000 * time.Second
	models := []string{m.model(14 * gpu.GiB), m.model(14 * gpu.GiB), m.model(10 * gpu.GiB), m.model(8 * gpu.GiB)}
	service := func() time.Duration { return seconds(rows[m.r.IntN(len(rows))].service(1500, 30)) }
	rate := u / mean / inSession
	for at := m.r.ExpFloat64() / rate; at < m.horizon.Seconds(); at += m.r.ExpFloat64() / rate {
		q := Request{At: seconds(at), Consumer: models[m.r.IntN(len(models))], Service: service(), Priority: MixPriority}
		for range int(m.r.ExpFloat64() * more) {
			q.Then = append(q.Then, FollowUp{Think: seconds(1.5 * math.Exp(.7*m.r.NormFloat64())), Service: service()})
		}
		m.requests = append(m.requests, q)
	}
	return nil
}

// hot has one busy model and two rare ones, of which no two fit beside each other.
// It is made for a load of 1, like the hour of a trace, and stretched later.
func (m *mixer) hot() {
	m.horizon = 40_000 * time.Second
	service := func() float64 { return .3 + 3.7*m.r.ExpFloat64() }
	m.poisson(m.model(14*gpu.GiB), .98/4, service)
	m.poisson(m.model(14*gpu.GiB), 1./400, service)
	m.poisson(m.model(12*gpu.GiB), 1./400, service)
}

// poisson adds requests that come at random, so many a second.
func (m *mixer) poisson(model string, rate float64, service func() float64) {
	for at := m.r.ExpFloat64() / rate; at < m.horizon.Seconds(); at += m.r.ExpFloat64() / rate {
		m.requests = append(m.requests, Request{At: seconds(at), Consumer: model, Service: seconds(service()), Priority: MixPriority})
	}
}

// azure adds a share of a trace's requests to a model.
func (m *mixer) azure(file string, share float64, model string, prefill, decode float64) error {
	rows, err := readAzure(filepath.Join(m.traces, file))
	if err != nil {
		return err
	}
	m.horizon = max(m.horizon, rows[len(rows)-1].at)
	for _, row := range rows {
		if m.r.Float64() < share {
			m.requests = append(m.requests, Request{At: row.at, Consumer: model, Service: seconds(row.service(prefill, decode)), Priority: MixPriority})
		}
	}
	return nil
}

// stretch makes the trace so long that pure execution takes the share u of it.
func (m *mixer) stretch(u float64) {
	var work time.Duration
	for _, q := range m.requests {
		work += q.Service
		for _, f := range q.Then {
			work += f.Service
		}
	}
	factor := work.Seconds() / u / m.horizon.Seconds()
	for i := range m.requests {
		m.requests[i].At = time.Duration(float64(m.requests[i].At) * factor)
	}
	slices.SortStableFunc(m.requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
}

// world is the card with the mix's models. Everything but loads, unloads and jobs takes no time in it.
func (m *mixer) world() *World {
	none := gpu.Bytes(0)
	w := &World{GPUs: []gpu.Bytes{24 * gpu.GiB}, Settings: scheduler.Config{
		Cushion: &none, MaxQueue: math.MaxInt, MaxEvictions: 5, IdleUnload: scheduler.IdleOff,
		EvictWait: 10 * time.Second, DrainTimeout: 10 * time.Minute, AbandonAfter: 10 * time.Second, OutsiderWait: 10 * time.Second,
		Overtake: 15, OvertakeMin: 30 * time.Second, OvertakeMax: 600 * time.Second, Hold: .25, LockOvertake: 20 * time.Second,
	}}
	for i, size := range m.sizes {
		w.Consumers = append(w.Consumers, Consumer{
			Slot: scheduler.SlotConfig{Name: "model" + strconv.Itoa(i), GPUs: []int{0}, Claim: size, Concurrency: 1, CanLoad: true, CanUnload: true},
			Load: mixLoad(size), Unload: func(r *rand.Rand) time.Duration { return seconds(1 + r.Float64()) },
		})
	}
	return w
}

// mixLoad is the load time of a model: some are in the page cache, most come from the disk.
func mixLoad(size gpu.Bytes) Times {
	scale := .5 + .5*float64(size)/float64(11*gpu.GiB)
	return func(r *rand.Rand) time.Duration {
		cached, quick, slow := r.Float64() < 1./3, 2+3*r.Float64(), 30+8*r.NormFloat64()
		if cached {
			return seconds(scale * quick)
		}
		return seconds(scale * max(10, min(60, slow)))
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// azureRow is one request of a trace.
type azureRow struct {
	at                 time.Duration // from the trace's first
	context, generated float64       // tokens
}

// service is how long it runs, in seconds, at so many tokens a second.
func (a azureRow) service(prefill, decode float64) float64 {
	return .05 + a.context/prefill + a.generated/decode
}

// readAzure reads a trace of the form TIMESTAMP,ContextTokens,GeneratedTokens.
func readAzure(path string) ([]azureRow, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("the Azure traces are needed for this mix: %w", err)
	}
	defer func() { _ = f.Close() }() // it was only read
	var rows []azureRow
	var first time.Time
	in := bufio.NewScanner(f)
	for line := 1; in.Scan(); line++ {
		fields := strings.Split(strings.TrimSpace(in.Text()), ",")
		if line == 1 && fields[0] == "TIMESTAMP" || len(fields) == 1 && fields[0] == "" {
			continue
		}
		if len(fields) != 3 {
			return nil, fmt.Errorf("%s:%d: %d columns, but three are expected: a time and two counts of tokens", path, line, len(fields))
		}
		at, err := time.Parse("2006-01-02 15:04:05.999999999", fields[0])
		context, err2 := strconv.ParseFloat(fields[1], 64)
		generated, err3 := strconv.ParseFloat(fields[2], 64)
		if err != nil || err2 != nil || err3 != nil {
			return nil, fmt.Errorf("%s:%d: %q is not of the form TIME,TOKENS,TOKENS", path, line, in.Text())
		}
		if first.IsZero() {
			first = at
		}
		rows = append(rows, azureRow{at.Sub(first), context, generated})
	}
	if err := in.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if len(rows) < 2 {
		return nil, fmt.Errorf("%s holds no requests", path)
	}
	return rows, nil
}
