package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// soakBudget is how long a request of the soak may wait.
const soakBudget = 5 * time.Second

// chatModel is the model of the soak's ollama.
const chatModel = "tiny"

// soakNamesOf are the names by which the soak's clients ask for its consumers.
var soakNamesOf = map[string][]string{
	"text": {"text", "words:7b", "gpt-4o", sometimes}, "voice": {"voice", "tts-1"}, "lazy": {"lazy", "slow.model"}, "embed": {"embed", "text-embedding-3-small"},
	"library": {"small", "large"}, "pinned": {"pinned"}, "guest": {"guest", "visitor"}, "llm": {"llm", chatModel}, "sky": {"sky", "hosted"},
}

// sometimes is an alias of text that reloads take away and bring back.
const sometimes = "now-and-then"

// soakRoutes are those on which requests name their model, and one with a ladder.
const soakRoutes = `
handle_path /model/* {
	gpu_broker {
		model_from body
		model_from query
		metadata x_mine
		client_id {header.X-Client}
		heartbeat 40ms
	}
	reverse_proxy {http.gpu_broker.upstream}
}
handle_path /prio/* {
	gpu_broker {
		model_from body
		model_from query
		trust_body
		metadata x_mine
		priority {header.X-Priority}
		priority_range 10 90
		client_id {header.X-Client}
		heartbeat 40ms
	}
	reverse_proxy {http.gpu_broker.upstream}
}
handle_path /ladder/* {
	gpu_broker voice {
		fallback lazy sky
		client_id {header.X-Client}
		heartbeat 40ms
	}
	reverse_proxy {http.gpu_broker.upstream}
}
handle_path /sky/* {
	gpu_broker sky {
		bypass GET /audio/*
	}
	reverse_proxy {http.gpu_broker.upstream}
}
handle {
	respond "` + noRoute + `" 404
}`

// What the queue of the soak takes: so many, and so many of no urgency.
const (
	soakQueue = 36
	soakKept  = 6
	soakBulk  = 50 // from this priority on
)

// soakLayout is a card of 24 GiB and servers of 45 GiB, in all manners; and one that runs elsewhere.
func soakLayout(sky, started, routes string) layout {
	server := func(name string, vram float64, load time.Duration, lines ...string) consumer {
		if names := soakNamesOf[name]; len(names) > 1 {
			lines = append(lines, "alias "+strings.Join(names[1:], " "))
		}
		return consumer{
			Options: modelserver.Options{Name: name, VRAM: gib(vram), Residue: 256 * gpu.MiB, LoadTime: load, LoadSteps: 3,
				UnloadTime: load / 4, ReleaseDelay: 20 * time.Millisecond, RunTime: 20 * time.Millisecond},
			Lines: strings.Join(append(lines, "bypass GET /audio/*"), "\n"),
			Route: soakClient,
		}
	}
	text := server("text", 9, 300*time.Millisecond, "concurrency 4", "reserved_interactive 1", "residual 256MiB", "category llm")
	voice := server("voice", 7, 200*time.Millisecond, "vram 7GiB", "residual 256MiB", "keep_alive 300ms")
	voice.Concurrency = 1 // while it works it answers no probe
	lazy := server("lazy", 6, 250*time.Millisecond, "lifecycle_by_hand\nhealth /health {\nloaded $.loaded\n}\nunload POST /api/admin/unload", "concurrency 2", "residual 256MiB", "switch_cost 500ms")
	lazy.Lazy = true
	embed := server("embed", 1, 50*time.Millisecond, "lock none", "concurrency 4", "residual 256MiB")
	pinned := server("pinned", 2, 100*time.Millisecond, "pin", "concurrency 2", "residual 256MiB")
	guest := server("guest", 3, 100*time.Millisecond, "concurrency 2", "residual 256MiB", "conflicts_with lazy")
	llm := consumer{
		Options: modelserver.Options{Name: "llm", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{chatModel: gib(8)},
			LoadTime: 250 * time.Millisecond, LoadSteps: 2, UnloadTime: 60 * time.Millisecond, RunTime: 40 * time.Millisecond, KeepAlive: 20 * time.Second},
		Lines: "concurrency 4\nswitch_cost 500ms\nalias " + chatModel,
		Route: soakClient,
	}
	image := consumer{
		Options: modelserver.Options{Name: "image", Manner: modelserver.ComfyUI, VRAM: gib(11), Residue: 300 * gpu.MiB,
			LoadTime: 400 * time.Millisecond, UnloadTime: 60 * time.Millisecond, RunTime: 60 * time.Millisecond},
		Lines: "switch_cost 500ms",
		Route: soakClient,
		Proxy: "reverse_proxy {http.gpu_broker.upstream} {\nstream_close_delay 1m\n}",
	}
	return layout{
		Total: "24GiB", HTTPS: true,
		Global: strings.Join([]string{
			"budget " + soakBudget.String(), fmt.Sprint("max_queue ", soakQueue), fmt.Sprintf("reserved_interactive %d below %d", soakKept, soakBulk), "max_body 4MiB", "hold 0.1", "overtake 1", "overtake_min 300ms", "overtake_max 2s", "lock_overtake 300ms",
			"probe_interval 300ms", "probe_timeout 500ms", "load_timeout 2s", "unload_timeout 1500ms", "evict_wait 1s", "drain_timeout 4s",
			"abandon_after 500ms", "outsider_wait 1s", "idle_timeout 4s",
			"credit 3s", "client_cooldown 20ms", "stay_warm llm 3s", "restore voice after 2s", "request_log {env.HOME}/requests.csv",
			"consumer sky {\ncloud\nalias hosted\nupstream " + sky + "\n}",
			started,
		}, "\n"),
		Consumers: []consumer{text, voice, lazy, llm, image, embed, pinned, guest, soakLibrary()},
		Routes:    routes + soakRoutes,
	}
}

// soakClient makes clients of what they call themselves: all of them come from one address.
const soakClient = "client_id {header.X-Client}"

// noRoute is the site's answer where no consumer is.
const noRoute = "no such route"

// settings are what the soak's reloads change.
type settings struct {
	edit        int     // of something that is none of ours
	concurrency int     // of text: 2 or 4
	vram        float64 // of voice, in GiB: at least 7, which is what it takes
	idle        string  // idle_timeout
	pin         bool
	guest       bool   // whether that consumer is there
	cooldown    bool   // client_cooldown
	heartbeat   bool   // on the route /model/*
	ladder      bool   // on the route /ladder/*
	alias       bool   // sometimes
	reserved    bool   // a place of text's
	log         int    // of two request logs
	child, fork int    // editions of their commands
	broken      string // whose command can't start
}

var soakSettings = settings{concurrency: 4, vram: 7, idle: "4s", pin: true, guest: true, cooldown: true, heartbeat: true, ladder: true, alias: true, reserved: true}

// apply writes the Caddyfile of some settings.
func (c settings) apply(base string) string {
	replace := func(old, changed string) {
		if !strings.Contains(base, old) {
			panic("the soak's Caddyfile lacks " + old)
		}
		base = strings.Replace(base, old, changed, 1)
	}
	replace("concurrency 4", fmt.Sprintf("concurrency %d", c.concurrency))
	replace("vram 7GiB", fmt.Sprintf("vram %d", gib(c.vram)))
	replace("idle_timeout 4s", "idle_timeout "+c.idle)
	replace("handle /gpu/*", fmt.Sprintf("handle /edit {\nrespond %d\n}\nhandle /gpu/*", c.edit))
	if !c.pin {
		replace("\npin\n", "\n")
	}
	for word, there := range map[string]bool{
		"\nclient_cooldown 20ms\n": c.cooldown, "heartbeat 40ms\n": c.heartbeat, "fallback lazy sky\n": c.ladder, " " + sometimes: c.alias, "\nreserved_interactive 1\n": c.reserved,
	} {
		if !there {
			replace(word, strings.Repeat("\n", strings.Count(word, "\n")))
		}
	}
	c.commands(replace)
	if c.log == 1 {
		replace("/requests.csv", "/others.csv")
	}
	if !c.guest {
		base = guestBlock.ReplaceAllString(base, "")
		base = guestRoute.ReplaceAllString(base, "")
	}
	return base
}

var (
	guestBlock = regexp.MustCompile(`(?s)consumer guest \{.*?bypass GET /audio/\*\n\}\n`)
	guestRoute = regexp.MustCompile(`(?s)handle_path /guest/\*.*?\n\}\n.*?\n\}\n`)
)

// spoil makes a configuration that Caddy must refuse, each way at another stage.
func spoil(text, how, taken string) string {
	switch how {
	case "bad word":
		return strings.Replace(text, "consumer text {", "consumer text {\nvrm 3GiB", 1)
	case "bad consumer":
		return strings.Replace(text, "gpu_broker text {", "gpu_broker nobody {", 1)
	case "bad range":
		return strings.Replace(text, "priority_range 10 90", "priority_range 90 10", 1)
	case "other app fails to provision":
		return text + "\nhttps://spoilt.localhost:1 {\ntls /nowhere/cert.pem /nowhere/key.pem\n}\n"
	case "occupied port":
		return text + "\nhttp://" + taken + " {\nbind 127.0.0.1\nrespond hi\n}\n"
	}
	panic("no such way: " + how)
}

var spoilings = []string{"bad word", "bad consumer", "bad range", "other app fails to provision", "occupied port"}
