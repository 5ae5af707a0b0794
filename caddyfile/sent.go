package caddyfile

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// fallback reads `fallback CONSUMER ...`, or `fallback CONSUMER { as NAME }`.
func fallback(names *[]string, as *map[string]string) word {
	read := consumerNames("fallback", names)
	places := map[string]string{} // where the name for a fallback stands
	return func(d *caddyfile.Dispenser) error {
		before, at := len(*names), source(d)
		several := d.Errf("fallback: as NAME stands for one consumer: write fallback CONSUMER { as NAME }, once for each")
		if err := read(d); err != nil {
			return err
		}
		added := (*names)[before:]
		name := ""
		err := readBlock(d, "fallback", map[string]word{
			"as": single(newSaid(nil), &name, "NAME", sendAs),
			"after": func(d *caddyfile.Dispenser) error {
				return d.Errf("fallback: after is not supported yet: leave it out; a fallback is taken where the consumer can't serve without unloading another")
			},
		})
		switch {
		case err != nil || name == "":
			return err
		case len(added) != 1:
			return several
		}
		to := added[0]
		if first, twice := (*as)[to]; twice && first != name {
			return fmt.Errorf("fallback %s: as is set twice, to %s (%s) and to %s: leave one of them out, at %s", to, first, places[to], name, at)
		}
		if *as == nil {
			*as = map[string]string{}
		}
		(*as)[to], places[to] = name, at
		return nil
	}
}

func sendAs(name string) (string, error) { return name, config.CheckSendAs(name) }

// fieldValue reads `set FIELD VALUE`: a value that is not JSON is text.
func fieldValue(fields *map[string]json.RawMessage) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		var field, text string
		if !d.AllArgs(&field, &text) {
			return wants(d, name+" FIELD VALUE, as in "+name+" temperature 0.7")
		}
		if err := config.CheckChangedField(field); err != nil {
			return d.Errf("%s: %w", name, err)
		}
		value := json.RawMessage(text)
		if !json.Valid(value) {
			value, _ = json.Marshal(text) // text can be encoded
		}
		if first, twice := (*fields)[field]; twice && !bytes.Equal(first, value) {
			return d.Errf("%s %s is set twice, to %s and to %s: leave one of them out", name, field, first, value)
		}
		if *fields == nil {
			*fields = map[string]json.RawMessage{}
		}
		(*fields)[field] = value
		return nil
	}
}
