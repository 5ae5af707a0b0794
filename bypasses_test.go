package gpubroker

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/standard" // every directive
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/doctor"
)

// bypassesOf are what is found in a site with the consumers comfyui, ollama and plain, as "severity consumer: what".
func bypassesOf(t *testing.T, site string) (out []string) {
	t.Helper()
	doc, _, err := adaptQuietly([]byte(`{
	gpu_broker {
		gpu static 24GiB
		consumer comfyui {
			preset comfyui
			upstream 127.0.0.1:8188
			vram 9GiB
		}
		consumer ollama {
			preset ollama
			upstream localhost:11434
			vram 6GiB
		}
		consumer plain {
			upstream 10.255.0.9:9000
			vram 1GiB
		}
		consumer own {
			upstream 10.255.0.9:9001
			vram 1GiB
			gpu_routes POST /own/do
		}
		consumer old {
			upstream 10.255.0.9:9002
			vram 1GiB
			enabled off
		}
		consumer hosted {
			cloud
			upstream 10.255.0.9:443
		}
	}
}
`+site), "Caddyfile")
	require.NoError(t, err, site)
	app, err := appOf(doc)
	require.NoError(t, err)
	for _, f := range doctor.Bypasses(doc, &app.Broker, placeholderNames()) {
		assert.NotEmpty(t, f.Mend, f.What)
		assert.NotEmpty(t, f.Where, f.What)
		out = append(out, fmt.Sprintf("%s %s: %s (%s)", f.Severity, f.Consumer, f.What, f.Mend))
	}
	return out
}

func appOf(doc []byte) (*App, error) {
	var whole struct {
		Apps map[string]json.RawMessage `json:"apps"`
	}
	if err := json.Unmarshal(doc, &whole); err != nil {
		return nil, err
	}
	app := new(App)
	if err := json.Unmarshal(whole.Apps["gpu_broker"], &app.Broker); err != nil {
		return nil, err
	}
	return app, config.Resolve(&app.Broker, lookUpPreset)
}

func TestN1_RequestsThatPassTheBrokerUnseenAreFound(t *testing.T) {
	t.Setenv("N1_OLLAMA", "127.0.0.1:11434")
	own, err := os.Hostname()
	require.NoError(t, err)
	const up = "reverse_proxy {http.gpu_broker.upstream}"
	unseen := "error : reverse_proxy {http.gpu_broker.upstream} is reached by requests that no gpu_broker has admitted"
	around := func(consumer, address string) string {
		return "warning " + consumer + ": a reverse_proxy of this site leads to " + address + " with no gpu_broker before it"
	}
	path := func(consumer string) string {
		return "error " + consumer + ": gpu_broker (Caddyfile:"
	}
	for name, tc := range map[string]struct{ site, want, fix string }{
		// Another path than the server.
		"stripped inside route":               {"route /comfy/* {\n gpu_broker comfyui\n uri strip_prefix /comfy\n " + up + "\n}", path("comfyui"), "write uri strip_prefix /comfy before gpu_broker"},
		"rewritten inside route":              {"route {\n gpu_broker ollama\n rewrite /llm /api/chat\n " + up + "\n}", path("ollama"), "write rewrite /api/chat before gpu_broker"},
		"stripped in a handle_path behind it": {"route {\n gpu_broker comfyui\n handle_path /comfy/* {\n " + up + "\n}\n}", path("comfyui"), "uri strip_prefix /comfy"},
		"another method":                      {"route {\n gpu_broker comfyui\n method POST\n " + up + "\n}", path("comfyui"), "method POST"},
		"replaced":                            {"route {\n gpu_broker comfyui\n uri replace /comfy /\n " + up + "\n}", path("comfyui"), "uri replace"},
		"rewritten by reverse_proxy itself":   {"handle {\n gpu_broker comfyui\n reverse_proxy {http.gpu_broker.upstream} {\n rewrite /prompt\n}\n}", path("comfyui"), "line of its own before gpu_broker"},
		"only some of them":                   {"route {\n gpu_broker comfyui\n @c path /comfy/*\n uri @c strip_prefix /comfy\n " + up + "\n}", path("comfyui"), ""},
		"to a straight address":               {"route {\n gpu_broker comfyui\n uri strip_prefix /comfy\n reverse_proxy localhost:8188\n}", path("comfyui"), ""},
		// No gpu_broker before it.
		"none":                             {"handle {\n " + up + "\n}", unseen, "write gpu_broker CONSUMER before it"},
		"in another handle":                {"handle /a/* {\n gpu_broker ollama\n " + up + "\n}\nhandle {\n " + up + "\n}", unseen, ""},
		"dynamic":                          {"reverse_proxy {\n dynamic gpu_broker\n}", "error : reverse_proxy dynamic gpu_broker is reached by requests that no gpu_broker", ""},
		"multi":                            {"reverse_proxy {\n dynamic multi {\n gpu_broker\n a localhost 8189\n}\n}", "error : reverse_proxy dynamic gpu_broker is reached", ""},
		"too late":                         {"route {\n reverse_proxy {http.gpu_broker.upstream}\n gpu_broker ollama\n}", unseen, "move gpu_broker CONSUMER, which stands after it"},
		"only some are admitted":           {"@gpu path /api/chat\ngpu_broker @gpu ollama\n" + up, "error : reverse_proxy {http.gpu_broker.upstream} is reached by some requests", "same matcher"},
		"in handle_errors":                 {"gpu_broker ollama\n" + up + "\nhandle_errors {\n " + up + "\n}", unseen, "in error routes a request has lost"},
		"in a named route":                 {"invoke llm\n", "", ""},
		"behind an answer of forward_auth": {"route {\n forward_auth 10.255.0.1:80 {\n uri /auth\n copy_headers X-User\n}\n " + up + "\n}", unseen, ""},
		"in handle_response":               {"reverse_proxy 10.255.0.1:80 {\n @f status 404\n handle_response @f {\n " + up + "\n}\n}", unseen, ""},
		"intercepted, after its turn":      {"route {\n intercept {\n @f status 404\n handle_response @f {\n " + up + "\n}\n}\n gpu_broker ollama\n " + up + "\n}", unseen, ""},
		// Straight to a consumer's server.
		"straight":                            {"reverse_proxy 127.0.0.1:8188", around("comfyui", "127.0.0.1:8188"), "write gpu_broker comfyui before it"},
		"localhost":                           {"reverse_proxy localhost:8188", around("comfyui", "localhost:8188"), ""},
		"as a URL":                            {"reverse_proxy http://localhost:8188", around("comfyui", "localhost:8188"), ""},
		"IPv6":                                {"reverse_proxy [::1]:11434", around("ollama", "[::1]:11434"), ""},
		"the loopback's other name":           {"reverse_proxy ip6-loopback:11434", around("ollama", "ip6-loopback:11434"), ""},
		"an address cut short":                {"reverse_proxy 127.1:11434", around("ollama", "127.1:11434"), ""},
		"the port alone":                      {"reverse_proxy :11434", around("ollama", ":11434"), ""},
		"by this machine's name":              {"reverse_proxy " + own + ":11434", around("ollama", own+":11434"), ""},
		"by the environment":                  {"reverse_proxy {env.N1_OLLAMA}", around("ollama", "{env.N1_OLLAMA}"), ""},
		"by the environment, at once":         {"reverse_proxy {$N1_OLLAMA}", around("ollama", "127.0.0.1:11434"), ""},
		"by a variable":                       {"vars llm 127.0.0.1:11434\nreverse_proxy {vars.llm}", around("ollama", "{http.vars.llm}"), ""},
		"by a number":                         {"vars port 11434\nreverse_proxy 127.0.0.1:{vars.port}", around("ollama", "127.0.0.1:{http.vars.port}"), ""},
		"by a map":                            {"map {host} {up} {\n chat.example.com 127.0.0.1:11434\n default 10.255.0.1:80\n}\nreverse_proxy {up}", around("ollama", "{up}"), ""},
		"by its default":                      {"map {host} {x} {up} {\n chat.example.com 1 10.255.0.1:80\n default 2 127.0.0.1:11434\n}\nreverse_proxy {up}", around("ollama", "{up}"), ""},
		"by a map's number":                   {"map {host} {llm_port} {\n chat.example.com 11434\n default 80\n}\nreverse_proxy 127.0.0.1:{llm_port}", around("ollama", "127.0.0.1:{llm_port}"), ""},
		"by host and port":                    {"vars ip 127.0.0.1\nvars /a/* ip 10.255.0.1\nvars port 80\nvars /b/* port 8188\nreverse_proxy {vars.ip}:{vars.port}", around("comfyui", "{http.vars.ip}:{http.vars.port}"), ""},
		"by the first of two":                 {"vars /a/* up 127.0.0.1:11434\nvars /b/* up 10.255.0.1:80\nreverse_proxy {vars.up}", around("ollama", "{http.vars.up}"), ""},
		"by the second of two":                {"vars /a/* up 10.255.0.1:80\nvars /b/* up 127.0.0.1:11434\nreverse_proxy {vars.up}", around("ollama", "{http.vars.up}"), ""},
		"by a variable of a variable":         {"route {\n vars ip 127.0.0.1\n vars up {vars.ip}:11434\n reverse_proxy {vars.up}\n}", around("ollama", "{http.vars.up}"), ""},
		"set for those that no broker admits": {"route {\n @gpu path /api/*\n gpu_broker @gpu ollama\n vars up 127.0.0.1:11434\n reverse_proxy {vars.up}\n}", around("ollama", "{http.vars.up}"), "same matcher"},
		"by dynamic a":                        {"reverse_proxy {\n dynamic a localhost 8188\n}", around("comfyui", "localhost:8188"), ""},
		"among others":                        {"reverse_proxy 10.255.0.1:80 127.0.0.1:8188", around("comfyui", "127.0.0.1:8188"), ""},
		"in a route behind a guard":           {"route {\n @no not header Authorization *\n respond @no 401\n reverse_proxy 127.0.0.1:11434\n}", around("ollama", "127.0.0.1:11434"), ""},
		"beside the broker":                   {"handle /api/tags {\n reverse_proxy 127.0.0.1:11434\n}\nhandle {\n gpu_broker ollama\n " + up + "\n}", around("ollama", "127.0.0.1:11434"), ""},
		"on another server":                   {"gpu_broker ollama\n" + up + "\n}\n:8081 {\n reverse_proxy 127.0.0.1:11434", around("ollama", "127.0.0.1:11434"), ""},
		"admitted for another":                {"gpu_broker comfyui\nreverse_proxy 127.0.0.1:11434", "warning ollama: requests that gpu_broker (Caddyfile:", "write reverse_proxy {http.gpu_broker.upstream}"},
		"admitted for any":                    {"gpu_broker\nreverse_proxy 127.0.0.1:11434", "warning ollama: requests that gpu_broker (Caddyfile:", ""},
		// Two brokers, one after the other.
		"twice":                            {"route {\n gpu_broker comfyui\n gpu_broker ollama\n " + up + "\n}", "error : requests come to gpu_broker (Caddyfile:", "leave one of them out"},
		"twice, sorted by Caddy":           {"gpu_broker comfyui\ngpu_broker ollama\n" + up, "error : requests come to gpu_broker (Caddyfile:", ""},
		"once for all, and once in handle": {"route {\n gpu_broker\n handle /api/* {\n gpu_broker ollama\n " + up + "\n}\n}", "error : requests come to gpu_broker (Caddyfile:", ""},
		"the second has a wider matcher":   {"route {\n gpu_broker /api/chat ollama\n gpu_broker /api/* ollama\n handle /api/* {\n " + up + "\n}\n}", "error : requests come to gpu_broker (Caddyfile:", ""},
		"in handle_response, anew":         {"gpu_broker ollama\n" + "reverse_proxy {http.gpu_broker.upstream} {\n @f status 404\n handle_response @f {\n gpu_broker plain\n " + up + "\n}\n}", "error : requests come to gpu_broker (Caddyfile:", ""},
		// Misspelt.
		"upsteam":             {"gpu_broker ollama\nreverse_proxy {http.gpu_broker.upsteam}", "error : unknown placeholder {http.gpu_broker.upsteam}: did you mean {http.gpu_broker.upstream}?", "write {http.gpu_broker.upstream}"},
		"without http":        {"gpu_broker ollama\nreverse_proxy {gpu_broker.upstream}", "unknown placeholder {gpu_broker.upstream}: did you mean {http.gpu_broker.upstream}?", ""},
		"with a hyphen":       {"gpu_broker ollama\nreverse_proxy {http.gpu-broker.upstream}", "did you mean {http.gpu_broker.upstream}?", ""},
		"brokr":               {"gpu_broker ollama\nreverse_proxy {http.gpu_brokr.upstream}", "did you mean {http.gpu_broker.upstream}?", ""},
		"capitals":            {"gpu_broker ollama\nreverse_proxy {http.GPU_Broker.Upstream}", "did you mean {http.gpu_broker.upstream}?", ""},
		"handlers":            {"gpu_broker ollama\nreverse_proxy {http.handlers.gpu_broker.upstream}", "did you mean {http.gpu_broker.upstream}?", ""},
		"in a header":         {"gpu_broker ollama\nheader X-Waited {http.gpu_broker.wait}\n" + up, "unknown placeholder {http.gpu_broker.wait}: did you mean {http.gpu_broker.wait_ms}?", ""},
		"without braces":      {"gpu_broker ollama\nreverse_proxy http.gpu_broker.upstream", "the name of a placeholder without its braces", "write {http.gpu_broker.upstream}"},
		"the consumer's name": {"gpu_broker ollama\nreverse_proxy {http.gpu_broker.consumer}", "{http.gpu_broker.consumer} is no address", "write {http.gpu_broker.upstream}"},
	} {
		if name == "in a named route" {
			continue // below
		}
		found := bypassesOf(t, ":8080 {\n"+tc.site+"\n}\n")
		if assert.Len(t, found, 1, "%s: %s", name, strings.Join(found, "\n")) {
			assert.Contains(t, found[0], tc.want, name)
			assert.Contains(t, found[0], tc.fix, name)
		}
	}
	found := bypassesOf(t, "&(llm) {\n "+up+"\n}\n:8080 {\n handle /a/* {\n gpu_broker ollama\n invoke llm\n}\n handle {\n invoke llm\n}\n}\n")
	require.Len(t, found, 1)
	assert.Contains(t, found[0], unseen)
}

func TestN1_RoutesThatAreRightAreNotBlamed(t *testing.T) {
	const up = "reverse_proxy {http.gpu_broker.upstream}"
	for name, site := range map[string]string{
		"plain":                                "gpu_broker ollama\n" + up,
		"dynamic":                              "gpu_broker ollama\nreverse_proxy {\n dynamic gpu_broker\n}",
		"a straight address":                   "gpu_broker ollama\nreverse_proxy 127.0.0.1:11434",
		"sorted by Caddy":                      "uri strip_prefix /comfy\ngpu_broker comfyui\n" + up,
		"sorted by Caddy, the other way round": "gpu_broker comfyui\nuri strip_prefix /comfy\n" + up,
		"handle_path":                          "handle_path /comfy/* {\n gpu_broker comfyui\n " + up + "\n}",
		"a guard in route":                     "route {\n @no not header Authorization \"Bearer secret\"\n respond @no 401\n uri strip_prefix /llm\n gpu_broker ollama\n " + up + "\n}",
		"in different routes":                  "route {\n route /a/* {\n gpu_broker ollama\n}\n" + "handle /a/* {\n " + up + "\n}\n}",
		"the same matcher":                     "@gpu path /api/chat /api/generate\ngpu_broker @gpu ollama\nreverse_proxy @gpu {http.gpu_broker.upstream}\nrespond 404",
		"a narrower matcher":                   "route {\n gpu_broker /api/* ollama\n handle /api/chat {\n " + up + "\n}\n}",
		"all others are answered":              "@other not path /api/*\nroute {\n respond @other 404\n gpu_broker ollama\n " + up + "\n}",
		"a query is added":                     "route {\n gpu_broker comfyui\n uri query +a b\n rewrite {path}?a=b\n " + up + "\n}",
		"no lists of paths":                    "route {\n gpu_broker plain\n uri strip_prefix /plain\n " + up + "\n}",
		"lists for that prefix":                "route {\n gpu_broker own\n uri strip_prefix /own\n " + up + "\n}",
		"forward_auth":                         "route {\n forward_auth 10.255.0.1:80 {\n uri /auth\n}\n gpu_broker ollama\n " + up + "\n}",
		"another server":                       "reverse_proxy 10.255.0.1:11434",
		"another port":                         "reverse_proxy 127.0.0.1:11435",
		"a consumer that is off":               "reverse_proxy 10.255.0.9:9002",
		"a cloud":                              "reverse_proxy 10.255.0.9:443",
		"within its turn":                      "gpu_broker ollama\nreverse_proxy {http.gpu_broker.upstream} {\n @f status 404\n handle_response @f {\n reverse_proxy 127.0.0.1:11434\n}\n}",
		"anew in handle_errors":                "gpu_broker ollama\n" + up + "\nhandle_errors {\n gpu_broker plain\n " + up + "\n}",
		"all placeholders":                     "gpu_broker ollama\nheader X-A \"{http.gpu_broker.consumer} {http.gpu_broker.wait_ms} {http.gpu_broker.reason} {http.request.header.X-Gpu-Broker} {env.GPU_BROKER_X} {http.vars.gpu_broker}\"\n" + up,
		"log and respond":                      "log_append gpu {http.gpu_broker.consumer}\nrespond \"{http.request.uri} {http.request.remote.host}\"",
		"two, whose matchers may exclude each other": "gpu_broker /api/* ollama\ngpu_broker /prompt comfyui\nreverse_proxy /api/* {http.gpu_broker.upstream}\nreverse_proxy /prompt {http.gpu_broker.upstream}",
		"two, with another path between them":        "route {\n gpu_broker /v1/* ollama\n uri /v1/* strip_prefix /v1\n gpu_broker /own/* own\n handle /api/* {\n respond ok\n}\n}",
		"one for some, and one for the others":       "@gpu header X-Model comfyui\n@rest not header X-Model comfyui\nroute {\n gpu_broker @gpu comfyui\n gpu_broker @rest ollama\n reverse_proxy @gpu {http.gpu_broker.upstream}\n reverse_proxy @rest {http.gpu_broker.upstream}\n}",
		"both ways to one server":                    "handle /a/* {\n gpu_broker ollama\n " + up + "\n}\nhandle /b/* {\n gpu_broker comfyui\n " + up + "\n}\nhandle {\n gpu_broker\n " + up + "\n}",
		"a variable that is another's":               "vars up 10.255.0.1:80\nvars port 11434\nreverse_proxy {vars.up}\nreverse_proxy /x/* 10.255.0.1:{vars.port}",
		"a variable that is set anew":                "route {\n vars up 127.0.0.1:11434\n vars up 10.255.0.1:80\n reverse_proxy {vars.up}\n}",
		"a variable for those that are admitted":     "@gpu path /api/*\nroute {\n vars up 10.255.0.1:80\n vars @gpu up 127.0.0.1:11434\n gpu_broker @gpu ollama\n reverse_proxy {vars.up}\n}",
		"a variable for each of two brokers":         "route {\n @a path /a/*\n @b path /b/*\n vars @a up 127.0.0.1:8188\n gpu_broker @a comfyui\n vars @b up 127.0.0.1:11434\n gpu_broker @b ollama\n reverse_proxy @a {vars.up}\n reverse_proxy @b {vars.up}\n}",
		"a variable that stands for itself":          "vars a {vars.b}{vars.a}\nvars b {vars.a}{vars.b}\nreverse_proxy {vars.a}:80",
		"a group of handles":                         "handle /a/* {\n header X y\n gpu_broker ollama\n}\nhandle {\n gpu_broker comfyui\n}\n" + up,
	} {
		assert.Empty(t, bypassesOf(t, ":8080 {\n"+site+"\n}\n"), name)
	}
	assert.Empty(t, bypassesOf(t, "&(llm) {\n "+up+"\n}\n:8080 {\n route {\n gpu_broker ollama\n invoke llm\n}\n}\n"))
}

// Sites of many hosts and of many conditional routes take no long time.
func TestN1_TheWalkThroughALargeSiteEnds(t *testing.T) {
	var b strings.Builder
	for i := range 300 {
		fmt.Fprintf(&b, "http://h%d.example.com {\n gpu_broker ollama\n reverse_proxy {http.gpu_broker.upstream}\n}\n", i)
	}
	b.WriteString(":8080 {\nroute {\n")
	for i := range 200 {
		fmt.Fprintf(&b, "gpu_broker /a%d/* ollama\nuri /b%d/* strip_prefix /b%d\n", i, i, i)
	}
	b.WriteString("reverse_proxy {http.gpu_broker.upstream}\n}\n}\n")
	assert.NotEmpty(t, bypassesOf(t, b.String()))
}

func TestN1_AProxyThatMayLeadToTwoServersIsToldForEach(t *testing.T) {
	found := bypassesOf(t, ":8080 {\nmap {host} {up} {\n chat.example.com 127.0.0.1:11434\n default 127.0.0.1:8188\n}\nreverse_proxy {up}\n}\n")
	require.Len(t, found, 2)
	assert.Contains(t, strings.Join(found, "\n"), "warning comfyui: a reverse_proxy of this site leads to {up}")
	assert.Contains(t, strings.Join(found, "\n"), "warning ollama: a reverse_proxy of this site leads to {up}")
}

// What placeholders may stand for is bounded, however many values each has.
func TestN1_TheWalkThroughManyValuesEnds(t *testing.T) {
	var b strings.Builder
	b.WriteString(":8080 {\nroute {\n")
	for _, name := range []string{"a", "b", "c", "d"} {
		for i := range 300 {
			fmt.Fprintf(&b, "vars /%d/* %s {vars.b}%d\n", i, name, i)
		}
	}
	b.WriteString("reverse_proxy /x/* {vars.a}{vars.b}{vars.c}{vars.d}:80\nreverse_proxy 127.0.0.1:11434\n}\n}\n")
	assert.NotEmpty(t, bypassesOf(t, b.String()))
}
