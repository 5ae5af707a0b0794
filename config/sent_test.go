package config

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestN3_WhatContradictsItselfInWhatServersGetIsRefused(t *testing.T) {
	broker := func(change func(llm, hosted *Consumer, m *Model)) *Broker {
		m := &Model{Name: "m", VRAM: gpu.GiB, Source: "Caddyfile:7"}
		llm := &Consumer{Name: "llm", Upstream: "127.0.0.1:1", Models: []*Model{m}, Fallback: []string{"hosted"}}
		hosted := &Consumer{Name: "hosted", Upstream: "127.0.0.1:2", Cloud: true}
		change(llm, hosted, m)
		return &Broker{Consumers: []*Consumer{llm, hosted}}
	}
	raw := func(s string) map[string]json.RawMessage { return map[string]json.RawMessage{"a": json.RawMessage(s)} }
	for want, change := range map[string]func(llm, hosted *Consumer, m *Model){
		"": func(llm, hosted *Consumer, m *Model) {
			m.SendAs, m.Set, m.Strip, hosted.SendAs = "x", raw("1"), []string{"b"}, SendClient
			llm.FallbackAs = map[string]string{"hosted": "gpt"}
		},
		`model "m" (Caddyfile:7): set and strip: the field "a" is given twice`: func(_, _ *Consumer, m *Model) { m.Set, m.Strip = raw("1"), []string{"a"} },
		`set and default: the field "a" is given twice`:                        func(_, _ *Consumer, m *Model) { m.Set, m.Default = raw("1"), raw("2") },
		`set model: that field names the model: write send_as NAME instead`:    func(_, _ *Consumer, m *Model) { m.Set = map[string]json.RawMessage{"model": json.RawMessage(`"b"`)} },
		`strip model: that field names the model`:                              func(_, _ *Consumer, m *Model) { m.Strip = []string{"model"} },
		`strip MODEL: that field names the model`:                              func(llm, _ *Consumer, m *Model) { llm.FoldKeys, m.Strip = true, []string{"MODEL"} },
		`default Name: that field names the model`: func(llm, _ *Consumer, m *Model) {
			llm.FoldKeys, llm.ModelFrom = true, []ModelFrom{{Source: FromBody, Name: "name"}}
			m.Default = map[string]json.RawMessage{"Name": json.RawMessage(`"b"`)}
		},
		`set and strip: the field "a" is given twice`:               func(llm, _ *Consumer, m *Model) { llm.FoldKeys, m.Set, m.Strip = true, raw("1"), []string{"A"} },
		`default a: its value is not JSON`:                          func(_, _ *Consumer, m *Model) { m.Default = raw("{") },
		`send_as is for consumers without models`:                   func(llm, _ *Consumer, _ *Model) { llm.SendAs = "x" },
		`fallback_as names other, which is not among its fallbacks`: func(llm, _ *Consumer, _ *Model) { llm.FallbackAs = map[string]string{"other": "x"} },
		`send_as or as: "*" stands for many names`:                  func(_, _ *Consumer, m *Model) { m.SendAs = "*" },
		`strip: the field has no name`:                              func(_, _ *Consumer, m *Model) { m.Strip = []string{""} },
	} {
		b := broker(change)
		text := ""
		if err := Resolve(b, nil); err != nil {
			text = err.Error()
		}
		if want == "" && text != "" || !strings.Contains(text, want) {
			t.Errorf("error %q, want %q", text, want)
		}
	}
}
