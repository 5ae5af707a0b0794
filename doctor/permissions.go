package doctor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// guest is what the doctor reads of lifecycles that start servers.
type guest struct {
	Protocol string   `json:"protocol"`
	Command  []string `json:"command"`
	Ports    string   `json:"ports"`
	Dir      string   `json:"dir"`
	Host     string   `json:"host"`
	User     any      `json:"user"`

	Env      map[string]any `json:"env"`
	EnvClear bool           `json:"env_clear"`
	EnvPass  []string       `json:"env_pass"`
}

func readGuest(raw json.RawMessage) (g guest) {
	if json.Unmarshal(raw, &g) != nil {
		return guest{}
	}
	return g
}

// Where Docker and systemd listen by default, and the ports from which processes get theirs.
const (
	dockerSocket = "unix:///var/run/docker.sock"
	systemBus    = "unix:///run/dbus/system_bus_socket"
	defaultPorts = "9100-9199"
)

// socket is the one that a lifecycle needs; empty: none.
func (g guest) socket() string {
	switch {
	case g.Protocol == "docker":
		return orWord(expand(g.Host), dockerSocket)
	case g.Protocol == "systemd" && g.User != true:
		if address, ok := strings.CutPrefix(os.Getenv("DBUS_SYSTEM_BUS_ADDRESS"), "unix:path="); ok {
			path, _, _ := strings.Cut(address, ",")
			return "unix://" + path
		}
		return systemBus
	}
	return ""
}

func protocolOf(raw json.RawMessage) string { return readGuest(raw).Protocol }

// expand replaces Caddy's placeholders as far as they have a value.
func expand(text string) string { return caddy.NewReplacer().ReplaceKnown(text, "") }

// sockets are all that the consumers' lifecycles need.
func (s *Site) sockets() (out []string) {
	for _, c := range s.consumers() {
		if socket := readGuest(s.Lifecycles[c.Name]).socket(); socket != "" && !slices.Contains(out, socket) {
			out = append(out, socket)
		}
	}
	return out
}

// socketFault reports whether the socket that a consumer's lifecycle needs can't be opened.
func (f *facts) socketFault(c *config.Consumer) bool {
	return f.sockets[readGuest(f.site.Lifecycles[c.Name]).socket()] != nil
}

// starts reports whether a consumer has a lifecycle of that protocol.
func (f *facts) starts(protocol string) bool {
	return slices.ContainsFunc(f.site.consumers(), func(c *config.Consumer) bool { return protocolOf(f.site.Lifecycles[c.Name]) == protocol })
}

// judgePorts says which ports can't be had: the site's own, and those for processes; and what else keeps processes from starting.
func judgePorts(f *facts) (out []Finding) {
	for _, l := range f.routes.listens {
		number, _ := strconv.Atoi(l.port) // it is one
		busy := f.listeners.conflicting(l.host, l.port)
		ours := slices.ContainsFunc(busy, func(s listener) bool { return isCaddy(s.whose()) || s.whose().pid == 0 && !f.host.root })
		switch {
		case ours:
		case len(busy) > 0:
			out = append(out, Finding{Severity: Error, Check: "ports", Where: f.site.File, What: fmt.Sprintf("the site is to listen on port %s, where %s listens", l.port, busy[0].whose()),
				Mend: "move that program, or give the site another port; a model server may move to 127.0.0.2 or to another port, see docs/install.md"})
		case number < f.host.firstFree && !f.host.mayBindLow:
			out = append(out, Finding{Severity: Error, Check: "ports", Where: f.site.File, What: fmt.Sprintf("%s may not listen on port %s: ports below %d need a privilege", f.host.user, l.port, f.host.firstFree),
				Mend: "AmbientCapabilities=CAP_NET_BIND_SERVICE in Caddy's unit, or `setcap cap_net_bind_service=+ep $(which caddy)`, or a higher port"})
		}
	}
	for _, socket := range sortedKeys(f.sockets) {
		if err := f.sockets[socket]; err != nil {
			out = append(out, f.judgeSocket(socket, err))
		}
	}
	spans := map[string][]*config.Consumer{}
	for _, c := range f.site.consumers() {
		g := readGuest(f.site.Lifecycles[c.Name])
		if g.Protocol != "process" {
			continue
		}
		out = append(out, f.judgeCommand(c, g)...)
		out = append(out, f.judgeSecrets(c, g)...)
		if c.Upstream == "" {
			span := orWord(g.Ports, defaultPorts)
			spans[span] = append(spans[span], c)
		}
	}
	for _, span := range sortedKeys(spans) {
		out = append(out, f.judgeSpan(span, spans[span])...)
	}
	return out
}

func (f *facts) judgeSocket(socket string, err error) Finding {
	kind, word := "Docker", "docker"
	found := Finding{Severity: Error, Check: "permissions"}
	for _, c := range f.site.consumers() {
		if g := readGuest(f.site.Lifecycles[c.Name]); g.socket() == socket {
			word = g.Protocol
			found.Consumer, found.Where = c.Name, f.lines.of(c.Source, word)
			break
		}
	}
	if word == "systemd" {
		kind = "D-Bus, and with it systemd,"
	}
	switch {
	case errors.Is(err, fs.ErrPermission) && word == "docker":
		return found.saying(fmt.Sprintf("%s may not speak to Docker at %s", f.host.user, socket),
			"put that user into the group that owns the socket (SupplementaryGroups=docker in Caddy's unit; as good as root), or set host to a socket proxy that allows only start and stop")
	case errors.Is(err, fs.ErrPermission):
		return found.saying(fmt.Sprintf("%s may not speak to %s at %s", f.host.user, kind, socket), "let Caddy's user reach the system bus; in a container mount the socket")
	case errors.Is(err, fs.ErrNotExist):
		return found.saying(fmt.Sprintf("there is no %s at %s", strings.TrimSuffix(kind, ","), socket), "start it, or in a container mount its socket; where Docker listens elsewhere, set host")
	}
	return found.saying(fmt.Sprintf("%s at %s does not answer: %v", strings.TrimSuffix(kind, ","), socket, err), "see whether it runs: systemctl status "+word)
}

// judgeCommand says what keeps a consumer's program from being started.
func (f *facts) judgeCommand(c *config.Consumer, g guest) (out []Finding) {
	if len(g.Command) == 0 {
		return nil // that is a fault of the configuration
	}
	name := expand(g.Command[0])
	dir := expand(g.Dir)
	if dir != "" && !strings.Contains(dir, "{gpu_broker.") {
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			out = append(out, f.about(Error, "process", c, "dir").saying("its folder "+dir+" can't be used: it is not there, or is none", "make it, or correct dir"))
		}
	}
	if strings.Contains(name, "{gpu_broker.") || dir != "" && strings.Contains(name, "/") && !strings.HasPrefix(name, "/") {
		return out
	}
	if _, err := exec.LookPath(name); err != nil {
		out = append(out, f.about(Error, "process", c, "process").saying(fmt.Sprintf("its program can't be started: %v", err),
			"install it, or write its whole path: a service has another PATH than your shell"))
	}
	return out
}

// judgeSpan reports whether a range of ports has room for those that share it.
func (f *facts) judgeSpan(span string, who []*config.Consumer) []Finding {
	a, b, ranged := strings.Cut(span, "-")
	if !ranged {
		b = a
	}
	first, errA := strconv.Atoi(strings.TrimSpace(a))
	last, errB := strconv.Atoi(strings.TrimSpace(b))
	if errA != nil || errB != nil {
		return nil // that is a fault of the configuration
	}
	free := 0
	holder := program{}
	for port := first; port <= min(last, 65535); port++ {
		busy := f.listeners.conflicting("127.0.0.1", strconv.Itoa(port))
		taken := false
		for _, s := range busy {
			p := s.whose()
			if !slices.ContainsFunc(line(p.pid), isCaddy) { // one of its own gives the port back
				taken, holder = true, p
			}
		}
		if !taken {
			free++
		}
	}
	if free >= len(who) {
		return nil
	}
	what := fmt.Sprintf("of its ports %s only %d are free, and %d consumers need one", span, free, len(who))
	if free == 0 {
		what = "none of its ports " + span + " is free"
	}
	return []Finding{f.about(Error, "ports", who[0], "ports").saying(what+": among others "+holder.String()+" listens there",
		"write another range, as in ports 9300-9399, or end what listens there")}
}

// judgeFolders says which folders Caddy can't write to.
func judgeFolders(f *facts) (out []Finding) {
	for _, folder := range f.host.folders {
		if folder.err == nil {
			continue
		}
		what := fmt.Sprintf("%s may not write to Caddy's folder %s", f.host.user, folder.path)
		if folder.blame != folder.path {
			what += ", as it can't be made in " + folder.blame
		}
		out = append(out, Finding{Severity: Error, Check: "permissions", What: fmt.Sprintf("%s: %v: certificates and what was learnt are not kept", what, folder.err),
			Mend: "chown -R it to the user that Caddy runs as (often an earlier `sudo caddy run` has made it root's), or set XDG_DATA_HOME or HOME"})
	}
	return out
}
