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

// soakLayout is a card of 24 GiB and servers of 45 GiB, in all manners.
func soakLayout() layout {
	server := func(name string, vram float64, load time.Duration, lines ...string) consumer {
		return consumer{
			Options: modelserver.Options{Name: name, VRAM: gib(vram), Residue: 256 * gpu.MiB, LoadTime: load, LoadSteps: 3,
				UnloadTime: load / 4, ReleaseDelay: 20 * time.Millisecond, RunTime: 20 * time.Millisecond},
			Lines: strings.Join(append(lines, "bypass GET /audio/*"), "\n"),
		}
	}
	text := server("text", 9, 300*time.Millisecond, "concurrency 4", "residual 256MiB")
	voice := server("voice", 7, 200*time.Millisecond, "vram 7GiB", "residual 256MiB")
	voice.Concurrency = 1 // while it works it answers no probe
	lazy := server("lazy", 6, 250*time.Millisecond, "lifecycle_by_hand\nhealth /health {\nloaded $.loaded\n}\nunload POST /api/admin/unload", "concurrency 2", "residual 256MiB", "switch_cost 500ms")
	lazy.Lazy = true
	embed := server("embed", 1, 50*time.Millisecond, "lock none", "concurrency 4", "residual 256MiB")
	pinned := server("pinned", 2, 100*time.Millisecond, "pin", "concurrency 2", "residual 256MiB")
	guest := server("guest", 3, 100*time.Millisecond, "concurrency 2", "residual 256MiB")
	llm := consumer{
		Options: modelserver.Options{Name: "llm", Manner: modelserver.Ollama, Models: map[string]gpu.Bytes{chatModel: gib(8)},
			LoadTime: 250 * time.Millisecond, LoadSteps: 2, UnloadTime: 60 * time.Millisecond, RunTime: 40 * time.Millisecond, KeepAlive: 20 * time.Second},
		Lines: "concurrency 4\nswitch_cost 500ms",
	}
	image := consumer{
		Options: modelserver.Options{Name: "image", Manner: modelserver.ComfyUI, VRAM: gib(11), Residue: 300 * gpu.MiB,
			LoadTime: 400 * time.Millisecond, UnloadTime: 60 * time.Millisecond, RunTime: 60 * time.Millisecond},
		Lines: "switch_cost 500ms",
		Proxy: "reverse_proxy {http.gpu_broker.upstream} {\nstream_close_delay 1m\n}",
	}
	return layout{
		Total: "24GiB", HTTPS: true,
		Global: strings.Join([]string{
			"budget " + soakBudget.String(), "max_queue 30", "max_body 4MiB", "hold 0.1", "overtake 1", "overtake_min 300ms", "overtake_max 2s", "lock_overtake 300ms",
			"probe_interval 300ms", "probe_timeout 500ms", "load_timeout 2s", "unload_timeout 1500ms", "evict_wait 1s", "drain_timeout 4s",
			"abandon_after 500ms", "outsider_wait 1s", "idle_timeout 4s",
		}, "\n"),
		Consumers: []consumer{text, voice, lazy, llm, image, embed, pinned, guest},
		Routes:    "handle {\nrespond \"" + noRoute + "\" 404\n}",
	}
}

// noRoute is the site's answer where no consumer is.
const noRoute = "no such route"

// settings are what the soak's reloads change.
type settings struct {
	edit        int     // of something that is none of ours
	concurrency int     // of text: 2 or 4
	vram        float64 // of voice, in GiB: at least 7, which is what it takes
	idle        string  // idle_timeout
	pin         bool
	guest       bool // whether that consumer is there
}

var soakSettings = settings{concurrency: 4, vram: 7, idle: "4s", pin: true, guest: true}

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
	case "other app fails to provision":
		return text + "\nhttps://spoilt.localhost:1 {\ntls /nowhere/cert.pem /nowhere/key.pem\n}\n"
	case "occupied port":
		return text + "\nhttp://" + taken + " {\nbind 127.0.0.1\nrespond hi\n}\n"
	}
	panic("no such way: " + how)
}

var spoilings = []string{"bad word", "bad consumer", "other app fails to provision", "occupied port"}
