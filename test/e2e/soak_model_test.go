package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"mime/multipart"
	"net/url"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

const (
	ladderSign = "~"         // between the names of a ladder, in the ID of a request
	urgentSign = ".p"        // between a client's name and the priority that its requests must have
	overruled  = "overruled" // what a client is called in a header that the body overrules
)

// askModel makes a request on a route that finds the consumer itself.
func (c *soaker) askModel(route, consumer, method, path string, query ...any) *asked {
	a := c.ask(consumer, method, path, query...)
	a.path = "/" + route + strings.TrimPrefix(a.path, "/"+consumer)
	a.alias = c.pick(soakNamesOf[consumer])
	a.byModel = true
	return a
}

// document is a JSON object that names a model, mostly at its end, with fields of
// the broker's among its own, and what of it must arrive.
func (c *soaker) document(model string, more ...string) (sent, arrives string) {
	kept := append([]string{
		fmt.Sprintf(`"prompt" :"say \"model\": %d"`, c.rng.Int()),
		`"options":{"x_priority": 1, "model":"nobody", "x_mine" : [ 1.0e1 ]}`,
		`"x_speed" : 1.50`,
		`"é":"\u00e9\n"`,
	}, more...)
	if c.rng.IntN(4) == 0 {
		kept = append(kept, `"image":"`+strings.Repeat("base64+/", c.about(20_000))+`"`)
	}
	ours := []string{`"x_keep_alive":"0.2"`, `"x_stay_warm" : 3`, `"x_cooldown":0.02`, `"x_mine":{"a":["}",{}]}`, `"x_mi\u006ee":null`}
	c.rng.Shuffle(len(kept), func(i, j int) { kept[i], kept[j] = kept[j], kept[i] })
	kept = append(kept, fmt.Sprintf(`"model":%q`, model))
	if c.rng.IntN(4) == 0 {
		kept[0], kept[len(kept)-1] = kept[len(kept)-1], kept[0]
	}
	all := kept
	for _, field := range ours {
		if c.rng.IntN(2) == 0 {
			at := c.rng.IntN(len(all) + 1)
			all = append(append(append([]string{}, all[:at]...), field), all[at:]...)
		}
	}
	return "{ " + strings.Join(all, ",") + "\r\n}", "{ " + strings.Join(kept, ",") + "\r\n}"
}

// urgency is a priority as it is said and as it must count, and fields that say it in a body.
func (c *soaker) urgency(a *asked) (fields []string) {
	said := []struct {
		text string
		want int
	}{{"0", 10}, {"30", 30}, {"80", 80}, {"500", 90}}[c.rng.IntN(4)]
	client := fmt.Sprintf("c%d%s%d", c.rng.IntN(4), urgentSign, said.want)
	if c.rng.IntN(2) == 0 {
		a.header = map[string]string{"X-Priority": said.text, "X-Client": client}
		return nil
	}
	a.header = map[string]string{"X-Priority": "50", "X-Client": overruled}
	return []string{`"x_priority":` + said.text, fmt.Sprintf(`"x_client_id" : %q`, client)}
}

// with gives a request a body, whose length it tells or not.
func (c *soaker) with(a *asked, kind, body string) {
	if a.header == nil {
		a.header = map[string]string{}
	}
	a.header["Content-Type"] = kind
	a.body, a.size = strings.NewReader(body), int64(len(body))
	if c.rng.IntN(3) == 0 {
		a.body, a.size = unknownLength{a.body}, -1
	}
}

const jsonKind = "application/json"

// named asks for a model by one of its names, in a document or in a form behind a file.
func (c *soaker) named(context.Context) {
	size := c.about(1500)
	a := c.askModel("model", c.pick(plainConsumers), "POST", "/proof", "ms", c.about(25), "bytes", size)
	sent, arrives := c.document(a.alias)
	kind := jsonKind
	if c.rng.IntN(4) == 0 {
		sent, kind = c.form(a.alias)
		arrives = sent
	}
	c.with(a, kind, sent)
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(modelserver.ProofBytes(a.consumer, a.id, []byte(arrives), size)))
}

func (c *soaker) form(model string) (body, kind string) {
	var b bytes.Buffer // it never fails
	w := multipart.NewWriter(&b)
	part, _ := w.CreateFormFile("file", "speech.wav")
	for range c.about(40_000) {
		_, _ = part.Write([]byte{byte(c.rng.Uint32())})
	}
	_ = w.WriteField("model", model)
	_ = w.Close()
	return b.String(), w.FormDataContentType()
}

// urgent asks by model, too, with a priority and a client of its own.
func (c *soaker) urgent(context.Context) {
	a := c.askModel("prio", c.pick(plainConsumers), "POST", "/proof", "ms", c.about(25))
	fields := c.urgency(a)
	sent, arrives := c.document(a.alias)
	if fields != nil {
		sent = strings.Replace(sent, "{ ", "{ "+strings.Join(fields, ",")+",", 1)
	}
	c.with(a, jsonKind, sent)
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(modelserver.ProofBytes(a.consumer, a.id, []byte(arrives), 0)))
}

// listener waits for an event stream, before which comments may come.
func (c *soaker) listener(context.Context) {
	a, want := c.listen([]string{"model", "prio"}[c.rng.IntN(2)], c.pick(plainConsumers), c.about(12))
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(want))
}

// listen makes a request for an event stream, which says so in one way or the other.
func (c *soaker) listen(route, consumer string, events int) (a *asked, want []byte) {
	query := []any{"ms", c.about(12), "events", events}
	if c.rng.IntN(2) == 0 {
		a = c.askModel(route, consumer, "POST", "/proof/stream", query...)
		sent, _ := c.document(a.alias, `"stream" : true`)
		c.with(a, jsonKind, sent)
	} else {
		a = c.askModel(route, consumer, "GET", "/proof/stream", query...)
		a.path += "&model=" + url.QueryEscape(a.alias)
		a.header = map[string]string{"Accept": "text/event-stream"}
	}
	a.beats = true
	return a, modelserver.ProofStream(consumer, a.id, events)
}

// ladder asks voice, for which others may answer.
func (c *soaker) ladder(context.Context) {
	others := []string{"lazy", "sky"}
	a := c.ask("voice", "GET", "/proof/stream")
	a.id = strings.Join(append([]string{"voice"}, others...), ladderSign) + strings.TrimPrefix(a.id, "voice")
	a.may = others
	if c.rng.IntN(2) == 0 {
		a.path = fmt.Sprintf("/ladder/proof/stream?id=%s&ms=%d&events=8", a.id, c.about(12))
		a.header = map[string]string{"Accept": "text/event-stream"}
		a.beats = true
		c.send(c.k.hard, a)
		c.k.judge(a, func(body []byte) string { return exactly(modelserver.ProofStream(a.by, a.id, 8))(body) })
	} else {
		body := strings.Repeat("x", c.rng.IntN(100_000))
		a.method, a.path = "POST", fmt.Sprintf("/ladder/proof?id=%s&ms=%d", a.id, c.about(25))
		c.with(a, "text/plain", body)
		c.send(c.k.hard, a)
		c.k.judge(a, func(got []byte) string { return exactly(modelserver.ProofBytes(a.by, a.id, []byte(body), 0))(got) })
	}
}

// cloud asks what runs elsewhere, by its route or by its name.
func (c *soaker) cloud(context.Context) {
	a := c.ask("sky", "POST", "/proof", "ms", c.about(25))
	if c.rng.IntN(2) == 0 {
		a = c.askModel("prio", "sky", "POST", "/proof", "ms", c.about(25))
	}
	sent, arrives := c.document("sky")
	if !a.byModel {
		arrives = sent
	}
	c.with(a, jsonKind, sent)
	c.send(c.k.hard, a)
	c.k.judge(a, exactly(modelserver.ProofBytes("sky", a.id, []byte(arrives), 0)))
}

// inVain asks for what must be refused before anything is done for it.
func (c *soaker) inVain(context.Context) {
	a := c.askModel([]string{"model", "prio"}[c.rng.IntN(2)], "text", "POST", "/proof")
	document, _ := c.document("text")
	a.cheap, a.wants = true, "bad_request"
	switch c.rng.IntN(5) {
	case 0:
		a.wants = "unknown_model"
		document, _ = c.document(fmt.Sprintf("nobody-%d", c.rng.IntN(100)))
	case 1:
		document = document[:len(document)-1-c.rng.IntN(len(document)-1)]
	case 2:
		document += "]"
	case 3:
		document = `{"prompt":"no model"}`
	case 4:
		document = `{"model":["text"]}`
	}
	c.with(a, jsonKind, document)
	c.send(c.k.hard, a)
	c.k.judge(a, func([]byte) string { return "it was served, wanted " + a.wants })
}

// lists asks which models there are, which the broker itself answers.
func (c *soaker) lists() {
	path := []string{"/v1/models", "/api/tags"}[c.rng.IntN(2)]
	a := c.askModel("model", "text", "GET", path)
	a.cheap, a.own = true, true
	c.send(c.k.hard, a)
	c.k.judge(a, func(body []byte) string {
		for _, name := range []string{"words:7b", "voice", "hosted", chatModel} {
			if !json.Valid(body) || !bytes.Contains(body, []byte(`"`+name+`"`)) {
				return fmt.Sprintf("a list without %s: %s", name, body)
			}
		}
		return ""
	})
}

// afterComments judges an event stream that began with comments: after them
// comes the whole stream, or one event with an error in OpenAI's form.
func (k *soak) afterComments(a *asked, wrong func(body []byte) string) string {
	rest := a.got.body
	for n := 0; ; n++ {
		line, after, ok := bytes.Cut(rest, []byte("\n\n"))
		if !bytes.HasPrefix(rest, []byte(": ")) || !ok {
			k.rec.count("listening", map[bool]string{false: "few comments", true: "ten comments and more"}[n >= 10])
			break
		}
		a.heard, rest = strings.TrimPrefix(string(line), ": "), after
		if strings.Contains(a.heard, "\n") {
			return k.wrong(a, "a comment of several lines: %q", a.heard)
		}
	}
	a.by = a.got.header.Get("X-Gpu-Broker-Consumer")
	if !a.beats || a.got.status != 200 || a.heard == "" || !k.mayAnswer(a, a.by) {
		return k.wrong(a, "comments that it must not have: status %d by %q: %.200q", a.got.status, a.by, a.got.body)
	}
	troubled := k.disturbedAny(a) || k.scarce(a.began, a.got.at) || k.ranOut(a, rest)
	if a.gone && len(rest) == 0 { // its connection was just about to be closed
		return left
	}
	if !bytes.HasPrefix(rest, []byte(`data: {"error":`)) {
		if why := wrong(rest); why != "" {
			return k.wrong(a, "after comments, of which the last is %q: %s", a.heard, why)
		}
		if !strings.HasPrefix(a.heard, "gpu-queue;dur=") {
			return k.wrong(a, "the last comment before a stream is %q", a.heard)
		}
		k.rec.count("listening", "streams after comments")
		k.rec.count("served by", a.by)
		k.rec.waited(waitOf(a.heard))
		return served
	}
	event, ok := bytes.CutSuffix(rest, []byte("\n\n"))
	event = bytes.TrimPrefix(event, []byte("data: "))
	var doc struct{ Error refusalDocument }
	switch {
	case !ok || bytes.Contains(event, []byte("\n")) || json.Unmarshal(event, &doc) != nil || doc.Error.Message == "":
		return k.wrong(a, "after comments: %.300q", rest)
	case doc.Error.Type != "gpu_broker_error" || doc.Error.Code == "no_stream": // what the server said, in this form
		if !troubled {
			return k.wrong(a, "after comments: %.300q", rest)
		}
		k.rec.count("listening", "errors of servers after comments")
		return ownError
	}
	k.rec.count("listening", "refusals after comments")
	return k.refusal(a, doc.Error)
}
