package doctor

import (
	"encoding/json"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// routes is what the doctor wants of the site's own configuration.
type routes struct {
	listens []listen
	brokers []brokerRoute
	servers []siteServer
	storage []string // folders of Caddy's storage
}

// listen is a TCP port that Caddy is to open.
type listen struct{ host, port string }

// siteServer is an HTTP server of the configuration.
type siteServer struct {
	name         string
	writeTimeout time.Duration
	brokers      []int // indices of routes.brokers
}

// brokerRoute is a directive gpu_broker, and what stands between it and the model server.
type brokerRoute struct {
	raw      json.RawMessage
	source   string
	consumer string // empty: the model decides
	names    []string
	budget   time.Duration
	// The time-outs of the reverse_proxy behind it; 0: none.
	responseHeader, read time.Duration
	proxied              bool
}

// The parts of Caddy's JSON that are read.
type (
	jsonSite struct {
		Storage struct {
			Module string `json:"module"`
			Root   string `json:"root"`
		} `json:"storage"`
		Apps struct {
			HTTP struct {
				HTTPPort  int                   `json:"http_port"`
				HTTPSPort int                   `json:"https_port"`
				Servers   map[string]jsonServer `json:"servers"`
			} `json:"http"`
		} `json:"apps"`
	}
	jsonServer struct {
		Listen         []string       `json:"listen"`
		WriteTimeout   caddy.Duration `json:"write_timeout"`
		Routes         []jsonRoute    `json:"routes"`
		AutomaticHTTPS struct {
			Disable          bool `json:"disable"`
			DisableRedirects bool `json:"disable_redirects"`
		} `json:"automatic_https"`
	}
	jsonRoute struct {
		Handle []json.RawMessage `json:"handle"`
	}
	jsonHandler struct {
		Handler   string          `json:"handler"`
		Routes    []jsonRoute     `json:"routes"`
		Consumer  string          `json:"consumer"`
		Default   string          `json:"default"`
		Fallback  []string        `json:"fallback"`
		Budget    caddy.Duration  `json:"budget"`
		Source    string          `json:"source"`
		Transport json.RawMessage `json:"transport"`
	}
	jsonTransport struct {
		ResponseHeaderTimeout caddy.Duration `json:"response_header_timeout"`
		ReadTimeout           caddy.Duration `json:"read_timeout"`
	}
)

// readRoutes reads them. What it does not understand it passes over: `caddy validate` is for that.
func readRoutes(doc []byte) *routes {
	r := &routes{}
	var site jsonSite
	if json.Unmarshal(doc, &site) != nil {
		return r
	}
	if site.Storage.Module == "file_system" && site.Storage.Root != "" {
		r.storage = append(r.storage, site.Storage.Root)
	}
	http, https := site.Apps.HTTP.HTTPPort, site.Apps.HTTP.HTTPSPort
	if http == 0 {
		http = 80
	}
	if https == 0 {
		https = 443
	}
	for _, name := range sortedKeys(site.Apps.HTTP.Servers) {
		in := site.Apps.HTTP.Servers[name]
		s := siteServer{name: name, writeTimeout: time.Duration(in.WriteTimeout)}
		first := len(r.brokers)
		r.walk(in.Routes, -1)
		for i := first; i < len(r.brokers); i++ {
			s.brokers = append(s.brokers, i)
		}
		r.servers = append(r.servers, s)
		for _, address := range in.Listen {
			r.listenAt(address, https, http, !in.AutomaticHTTPS.Disable && !in.AutomaticHTTPS.DisableRedirects)
		}
	}
	return r
}

func (r *routes) listenAt(address string, https, http int, redirects bool) {
	a, err := caddy.ParseNetworkAddress(address)
	if err != nil || a.IsUnixNetwork() || a.IsFdNetwork() {
		return
	}
	for port := a.StartPort; port <= a.EndPort && port-a.StartPort < 64; port++ {
		r.addListen(listen{a.Host, strconv.FormatUint(uint64(port), 10)})
		if int(port) == https && redirects {
			r.addListen(listen{a.Host, strconv.Itoa(http)}) // Caddy redirects from there by itself
		}
	}
}

func (r *routes) addListen(l listen) {
	if !slices.Contains(r.listens, l) {
		r.listens = append(r.listens, l)
	}
}

// BrokerHandlers are the handlers gpu_broker of a site, as JSON, in their order.
func BrokerHandlers(doc []byte) (out []json.RawMessage) {
	for _, b := range readRoutes(doc).brokers {
		out = append(out, b.raw)
	}
	return out
}

// walk goes through routes in their order. broker is the index of the gpu_broker that requests have passed, or -1.
func (r *routes) walk(list []jsonRoute, broker int) {
	for _, route := range list {
		for _, raw := range route.Handle {
			var h jsonHandler
			if json.Unmarshal(raw, &h) != nil {
				continue
			}
			switch h.Handler {
			case "subroute":
				r.walk(h.Routes, broker)
			case "gpu_broker":
				b := brokerRoute{raw: raw, source: h.Source, consumer: h.Consumer, names: h.Fallback, budget: time.Duration(h.Budget)}
				for _, name := range []string{h.Consumer, h.Default} {
					if name != "" {
						b.names = append(b.names, name)
					}
				}
				broker = len(r.brokers)
				r.brokers = append(r.brokers, b)
			case "reverse_proxy":
				r.proxy(&h, broker)
			}
		}
	}
}

func (r *routes) proxy(h *jsonHandler, broker int) {
	if broker < 0 {
		return
	}
	var t jsonTransport
	if len(h.Transport) > 0 && json.Unmarshal(h.Transport, &t) != nil {
		return
	}
	b := &r.brokers[broker]
	b.proxied, b.responseHeader, b.read = true, time.Duration(t.ResponseHeaderTimeout), time.Duration(t.ReadTimeout)
}
