package doctor

import (
	"fmt"
	"net"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
)

// judgeServers says what the probes of the consumers came to.
func judgeServers(f *facts) (out []Finding) {
	for _, c := range f.site.consumers() {
		p, probed := f.probes[c.Name]
		id := f.answers[c.Upstream]
		switch {
		case c.Cloud || c.Shares != "" || f.site.isFaulty(c.Name):
		case id.Caddy && c.Upstream != "":
			out = append(out, f.about(Error, "server", c, "upstream").saying(
				"its upstream "+c.Upstream+" is a Caddy: requests would go round in a circle", "name the model server's own address; if Caddy has taken over its port, that is the one to which it was moved"))
		case probed && f.strange(c, id):
			e, _ := EngineOf(id.Engine)
			out = append(out, f.about(Error, "server", c, "preset").saying(
				fmt.Sprintf("its preset is %s, but the server at %s is %s, which may answer in %s's name", c.Preset, c.Upstream, e.Title, c.Preset), "write preset "+id.Engine))
		case probed:
			out = append(out, f.judgeProbe(c, p, id)...)
		}
	}
	return out
}

// strange reports whether another kind of server answers than the preset is for.
func (f *facts) strange(c *config.Consumer, id Identity) bool {
	return c.Preset != "" && !presets.IsFile(c.Preset) && id.Engine != "" && !mayStandFor(c.Preset, id.Engine)
}

// listensElsewhere returns the fix for a consumer whose server was found at another address; empty: it was not.
func (f *facts) listensElsewhere(c *config.Consumer) string {
	e, ok := EngineOf(c.Preset)
	if !ok {
		return ""
	}
	at := f.elsewhere(e.Preset)
	if at == "" {
		return ""
	}
	return e.Title + " listens at " + at + ": write upstream " + at
}

func (f *facts) judgeProbe(c *config.Consumer, p probe, id Identity) (out []Finding) {
	detail := p.report.Detail
	switch p.report.Outcome {
	case lifecycle.Refused:
		what, fix := "nothing listens at "+c.Upstream, "start the server, or correct its upstream"
		if p.traits.Starts {
			what = detail
		}
		if found := f.listensElsewhere(c); found != "" {
			fix = found
		} else if e, ok := EngineOf(c.Preset); ok && listPorts(e.Ports()) != "" {
			fix += "; " + e.Title + " listens on port " + listPorts(e.Ports()) + " unless told otherwise"
		}
		out = append(out, f.about(Error, "server", c, "upstream").saying(what, fix))
	case lifecycle.Wrong:
		if p.traits.Starts {
			if f.socketFault(c) {
				break // it can't be asked: that is said once for all
			}
			out = append(out, f.about(Error, "server", c, protocolOf(f.site.Lifecycles[c.Name])).saying(detail, "see what it says; the unit or container must exist before Caddy can start it"))
			break
		}
		fix := "see whether its upstream is right, and its health route"
		if c.Preset == "" && id.Engine != "" {
			fix = "it is " + titleOf(id.Engine) + ": write preset " + id.Engine
		}
		out = append(out, f.about(Error, "server", c, "upstream").saying("it answers, but not as it should: "+detail, fix))
	case lifecycle.Unreachable:
		fix := "correct its upstream, or fix DNS or routing on this machine"
		if found := f.listensElsewhere(c); found != "" {
			fix = found
		}
		out = append(out, f.about(Error, "server", c, "upstream").saying("it can't be reached: "+detail, fix))
	case lifecycle.TimedOut:
		out = append(out, f.about(Warning, "server", c, "upstream").saying("it does not answer in time: "+detail,
			"it may be computing or loading; if it always is so slow, raise probe_timeout, and see whether a firewall drops the connection"))
	case lifecycle.Answered:
		out = append(out, f.judgeAnswer(c, p)...)
	}
	return out
}

func (f *facts) judgeAnswer(c *config.Consumer, p probe) (out []Finding) {
	if p.report.Detail != "" && !p.report.Stopped {
		out = append(out, f.about(Warning, "server", c, "health").saying("it answers, but does not say whether it is loaded: "+p.report.Detail,
			"correct the expression for what it answers; without it the memory itself must tell"))
	}
	if p.busyErr != nil {
		out = append(out, f.about(Warning, "server", c, "busy").saying("it can't be asked whether it works: "+oneLine(p.busyErr),
			"correct its busy route: without it the broker may unload it while work that came past the broker runs"))
	}
	state := "it answers at " + c.Upstream
	switch {
	case p.report.Stopped:
		state = "it does not run; the broker starts it when it is needed"
	case p.report.Loaded == lifecycle.Yes && p.report.Resident > 0:
		state += ", and holds " + p.report.Resident.String()
	case p.report.Loaded == lifecycle.Yes:
		state += ", and is loaded"
	case p.report.Loaded == lifecycle.No:
		state += ", and is not loaded"
	}
	return append(out, f.about(Note, "server", c, "").saying(state, ""))
}

// elsewhere is an address at which a kind of server was found that the configuration does not name.
func (f *facts) elsewhere(engine string) string {
	for _, id := range f.unnamed {
		if id.Engine == engine {
			return id.Address
		}
	}
	return ""
}

// judgeMeans says which consumers nothing can unload.
func judgeMeans(f *facts) (out []Finding) {
	if f.site.Broker == nil || f.site.Broker.Scheduler != config.Evicting {
		return nil
	}
	for _, c := range f.site.consumers() {
		p, ok := f.probes[c.Name]
		if !ok || f.site.isFaulty(c.Name) || c.Cloud || c.Shares != "" {
			continue
		}
		e, known := EngineOf(c.Preset)
		for _, lack := range Lacking(c) {
			out = append(out, f.about(Error, "means", c, "preset").saying(lack, "see `caddy gpu-broker presets "+c.Preset+"`"))
		}
		switch {
		case c.Pin || c.NoEvict || c.VRAMManaged || p.traits.Unload || p.traits.UnloadModel:
		case known && e.NeedsProcess:
			out = append(out, f.about(Error, "means", c, "preset").saying("only the end of its process frees the memory of "+e.Title+", and nothing says how it is started and stopped: it is never unloaded",
				"let the broker run it: process COMMAND ... with {gpu_broker.port} where its port goes, systemd UNIT, or docker CONTAINER; or write pin if it is to stay"))
		default:
			out = append(out, f.about(Warning, "means", c, "").saying("nothing says how its memory is freed: it is never unloaded for others",
				"name its unload route, as in unload POST /unload, or its process, unit or container; or write no_evict if that is meant"))
		}
	}
	return out
}

// Lacking says what a resolved consumer must be told beyond its preset so that it can be loaded.
func Lacking(c *config.Consumer) []string {
	if e, known := EngineOf(c.Preset); !known || e.NeedsProcess {
		return nil // what starts it loads it
	}
	return presets.Lacking(c)
}

// judgeListeners says which servers can be reached past the broker.
func judgeListeners(f *facts) (out []Finding) {
	for _, c := range f.site.consumers() {
		host, port, err := net.SplitHostPort(c.Upstream)
		if err != nil || c.Cloud || c.Shares != "" {
			continue
		}
		for _, l := range f.listeners.serving(host, port) {
			address := l.address.Addr()
			if address.IsLoopback() {
				continue
			}
			who := l.whose()
			fix := "let it listen on 127.0.0.1 alone"
			if e, ok := EngineOf(c.Preset); ok && e.Bind != "" {
				fix += ": " + e.Bind
			}
			if who.name == "docker-proxy" || who.name == "rootlessport" {
				fix = "publish no port, or on this machine alone: 127.0.0.1:" + port + ":" + port
			}
			where := "on " + address.String()
			if address.IsUnspecified() {
				where = "on all addresses"
			}
			out = append(out, f.about(Warning, "listeners", c, "upstream").saying(
				"it listens "+where+", port "+port+": clients can bypass the broker", fix+"; or close the port with a firewall"))
			break
		}
	}
	return out
}

// judgeUnnamed says which model servers run that the configuration does not name.
func judgeUnnamed(f *facts) (out []Finding) {
	for _, id := range f.unnamed {
		if id.Engine == "" || f.isWanted(id) {
			continue
		}
		out = append(out, Finding{Severity: Warning, Check: "engines", Where: f.lines.matching(f.site.File, 1, f.site.File, "gpu_broker"),
			What: titleOf(id.Engine) + " runs at " + id.Address + ", and no consumer names it: what it loads is an outsider's memory to the broker",
			Mend: fmt.Sprintf("add consumer %s { preset %s; upstream %s; vram SIZE }, each on a line of its own, or end it", id.Engine, id.Engine, id.Address)})
	}
	return out
}

// isWanted reports whether a consumer looks for it elsewhere in vain: that was said there.
func (f *facts) isWanted(id Identity) bool {
	for _, c := range f.site.consumers() {
		p := f.probes[c.Name]
		if c.Preset == id.Engine && (p.report.Outcome == lifecycle.Refused || p.report.Outcome == lifecycle.Unreachable) && p.traits.Health {
			return true
		}
	}
	return false
}

func titleOf(engine string) string {
	e, ok := EngineOf(engine)
	if !ok {
		return engine
	}
	return e.Title
}

func listPorts(ports []int) string {
	words := make([]string, len(ports))
	for i, p := range ports {
		words[i] = fmt.Sprint(p)
	}
	return strings.Join(words, " or ")
}
