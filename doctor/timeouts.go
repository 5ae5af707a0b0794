package doctor

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// judgeTimeouts holds the time-outs of the site against those of the broker.
// The budget is what clients are promised; whatever gives up before it breaks the promise.
func judgeTimeouts(f *facts) (out []Finding) {
	b := f.site.Broker
	if b == nil {
		return nil
	}
	for _, c := range f.site.consumers() {
		if c.Cloud || c.Shares != "" || b.Scheduler != config.Evicting || c.Budget >= c.LoadTimeout {
			continue
		}
		out = append(out, f.about(Warning, "timeouts", c, "budget").saying(
			fmt.Sprintf("its budget of %s is below its load_timeout of %s: requests that need a long load get 504 while it goes on", time.Duration(c.Budget), time.Duration(c.LoadTimeout)),
			fmt.Sprintf("write budget %s or more, or a smaller load_timeout", time.Duration(c.LoadTimeout))))
	}
	for _, s := range f.routes.servers {
		longest := time.Duration(0)
		for _, i := range s.brokers {
			longest = max(longest, f.budgetOf(&f.routes.brokers[i]))
		}
		if s.writeTimeout > 0 && s.writeTimeout < longest {
			out = append(out, Finding{Severity: Error, Check: "timeouts", Where: f.lines.matching(f.site.File, 1, f.site.File, "write"),
				What: fmt.Sprintf("the server's write time-out of %s is below the budget of %s: answers of requests that had to wait are cut off", s.writeTimeout, longest),
				Mend: "remove it (servers { timeouts { write … } }), or make it longer than the budget and the longest answer together"})
		}
	}
	for i := range f.routes.brokers {
		out = append(out, f.judgeProxy(&f.routes.brokers[i])...)
	}
	return out
}

func (f *facts) judgeProxy(r *brokerRoute) (out []Finding) {
	file, from, _ := splitSource(r.source)
	for _, t := range []struct {
		word  string
		value time.Duration
	}{{"response_header_timeout", r.responseHeader}, {"read_timeout", r.read}} {
		if t.value == 0 {
			continue
		}
		found := Finding{Check: "timeouts", Where: f.lines.matching(file, from, r.source, t.word)}
		for _, c := range f.served(r) {
			p := f.probes[c.Name]
			switch lazy := !p.traits.Starts && !p.traits.Load && !(c.HasModels() && p.traits.LoadModel); {
			case lazy && t.value < time.Duration(c.LoadTimeout):
				found.Severity, found.Consumer = Error, c.Name
				found = found.saying(fmt.Sprintf("reverse_proxy's %s of %s is below the load_timeout of %s of %s, which loads inside its first request: cold starts are cut off", t.word, t.value, time.Duration(c.LoadTimeout), c.Name),
					"remove it, or make it longer than a load and an answer together")
			case found.Severity == "" && t.value < time.Duration(c.Budget):
				found.Severity = Warning
				found = found.saying(fmt.Sprintf("reverse_proxy's %s of %s is below the budget of %s: answers that take long to begin are cut off, though their clients would wait", t.word, t.value, time.Duration(c.Budget)),
					"remove it: max_run bounds how long a request may run")
			}
		}
		if found.Severity != "" {
			out = append(out, found)
		}
	}
	return out
}

// served are the consumers that a route's requests may go to.
func (f *facts) served(r *brokerRoute) (out []*config.Consumer) {
	for _, c := range f.site.consumers() {
		if r.consumer == "" || c.Name == r.consumer || slices.Contains(r.names, c.Name) {
			out = append(out, c)
		}
	}
	return out
}

// budgetOf is the longest that requests of a route may wait.
func (f *facts) budgetOf(r *brokerRoute) (longest time.Duration) {
	if r.budget > 0 {
		return r.budget
	}
	for _, c := range f.served(r) {
		longest = max(longest, time.Duration(c.Budget))
	}
	return longest
}

// judgeRoutes says what the site's routes lack.
func judgeRoutes(f *facts) (out []Finding) {
	b := f.site.Broker
	if b == nil || f.site.Config == nil {
		return nil
	}
	if len(f.routes.brokers) == 0 && len(b.Consumers) > 0 {
		out = append(out, Finding{Severity: Error, Check: "routes", Where: f.site.File, What: "no route of the site has a gpu_broker: no request is ever brokered",
			Mend: "write gpu_broker CONSUMER before reverse_proxy {http.gpu_broker.upstream}, both inside the same handle block"})
	}
	return out
}
