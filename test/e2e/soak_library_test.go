package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// libraryModels are the models of the soak's second ollama. All of them together do not fit on the card.
var libraryModels = map[string]gpu.Bytes{"small": gib(6), "large": gib(9), unnamed: gib(10)}

// unnamed is the one that no configuration names: it takes what its consumer says.
const unnamed = "stranger"

// soakLibrary is that ollama.
func soakLibrary() consumer {
	return consumer{
		Options: modelserver.Options{Name: "library", Manner: modelserver.Ollama, Models: libraryModels,
			LoadTime: 200 * time.Millisecond, LoadSteps: 2, UnloadTime: 40 * time.Millisecond, RunTime: 30 * time.Millisecond, KeepAlive: 20 * time.Second},
		Lines: "vram 10GiB\nconcurrency 2\nswitch_cost 500ms\nmodel small {\nvram 6GiB\n}\nmodel large {\nvram 9GiB\n}",
		Route: soakClient,
	}
}

// ofLibrary asks for one of the models, by the consumer's own route or by its name alone.
func (c *soaker) ofLibrary(context.Context) {
	model, words := c.pick([]string{"small", "small", "large", "large", unnamed}), c.about(10)
	a := c.ask("library", "POST", "/api/generate", "ms", c.about(60))
	if model != unnamed && c.rng.IntN(3) == 0 {
		a = c.ask("library", "POST", "/api/generate", "ms", c.about(60))
		a.path, a.alias, a.byModel = "/model"+strings.TrimPrefix(a.path, "/library"), model, true
	}
	id := strings.Replace(a.id, "-", "-"+model+"-", 1) // so that the server's own log tells which was asked for
	a.path, a.id, a.model = strings.Replace(a.path, "id="+a.id, "id="+id, 1), id, model
	a.body = strings.NewReader(fmt.Sprintf(`{"model":%q,"prompt":"hi","stream":%t,"options":{"num_predict":%d}}`, model, c.rng.IntN(2) == 0, words))
	c.send(c.k.hard, a)
	want := modelserver.ProofWords("library", a.id, words)
	taken := c.k.judge(a, func(body []byte) string {
		text, whole := said(body)
		if text != want || !whole {
			return fmt.Sprintf("the words %.200q (whole: %t), wanted %.200q", text, whole, want)
		}
		return ofModel(body, model)
	})
	if taken {
		c.k.rec.count("models", model)
	}
}

// ofModel says what is wrong if not every piece of an answer names the model.
func ofModel(body []byte, model string) string {
	for line := range bytes.Lines(body) {
		var doc struct{ Model string }
		if err := json.Unmarshal(line, &doc); err != nil || doc.Model != model {
			return fmt.Sprintf("%.200q, wanted it of the model %s", line, model)
		}
	}
	return ""
}

// pastTheBroker loads the model that nobody has named without asking the broker, and lets it go again.
func (k *soak) pastTheBroker(ctx context.Context, dice *rand.Rand) {
	k.lasting(ctx, "past the broker", someTime(dice, 300*time.Millisecond, 2*time.Second), func() func() {
		end := k.spells.begin(spellMemory, "", "a model is loaded past the broker")
		k.rec.count("chaos", "past the broker")
		k.generate(`{"model":"` + unnamed + `"}`)
		return func() {
			k.generate(`{"model":"` + unnamed + `","keep_alive":0}`)
			end()
		}
	})
}

// generate asks the library itself. It may be dead, or have no room.
func (k *soak) generate(body string) {
	ctx, cancel := context.WithTimeout(k.hard, slowly(2*time.Second))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "POST", k.servers["library"].URL()+"/api/generate", strings.NewReader(body))
	if err != nil {
		k.rec.violation("the soak itself: %v", err)
		return
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}

// lookAtModels holds what the library says that it has loaded against the card.
func (k *soak) lookAtModels() {
	ctx, cancel := context.WithTimeout(k.hard, time.Second)
	defer cancel()
	sent := time.Now()
	req, err := http.NewRequestWithContext(ctx, "GET", k.servers["library"].URL()+"/api/ps", nil)
	if err != nil {
		return
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return // it is dead, or made to hang
	}
	defer resp.Body.Close()
	var doc struct {
		Models []struct {
			Name string
			Size gpu.Bytes `json:"size_vram"`
		}
	}
	if json.NewDecoder(resp.Body).Decode(&doc) != nil || resp.StatusCode != 200 {
		return
	}
	var sum gpu.Bytes
	for _, m := range doc.Models {
		sum += m.Size
	}
	k.rec.count("library holds", fmt.Sprintf("%d models", len(doc.Models)))
	if card := gib(24); sum > card && !k.mayRunOut(sent, time.Now()) {
		k.rec.violation("library holds %s in %d models, the card has %s; going on: %s", sum, len(doc.Models), card, k.spells.around(sent.Add(-3*time.Second), time.Now()))
	}
}
