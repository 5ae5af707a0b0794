package caddyfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// ModelFrom is a place of a request where the name of a model may stand.
type ModelFrom = config.ModelFrom

// modelFrom reads `model_from body|query [NAME]`, `model_from header NAME` or `model_from path PATTERN`.
func modelFrom(field *[]ModelFrom) word {
	return func(d *caddyfile.Dispenser) error {
		args := d.RemainingArgs()
		if len(args) == 0 || len(args) > 2 {
			return wants(d, "model_from body [FIELD], model_from query [NAME], model_from header NAME or model_from path PATTERN")
		}
		m := ModelFrom{Source: args[0]}
		if len(args) == 2 {
			m.Name = args[1]
		}
		m.Name = m.Field()
		if err := m.Check(); err != nil {
			return d.Errf("model_from: %w", err)
		}
		*field = append(*field, m)
		return nil
	}
}

// anyName is the second argument of `default CONSUMER any`.
const anyName = "any"

// defaultConsumer reads `default CONSUMER` or `default CONSUMER any`.
func defaultConsumer(s *said, r *Route) word {
	return func(d *caddyfile.Dispenser) error {
		name, args := d.Val(), d.RemainingArgs()
		if len(args) == 0 || len(args) > 2 || len(args) == 2 && args[1] != anyName {
			return wants(d, "default CONSUMER, or default CONSUMER any to serve unknown models, too")
		}
		if err := config.CheckName(args[0]); err != nil {
			return d.Errf("%s: %w", name, err)
		}
		text, before := strings.Join(args, " "), s.values[name]
		if before != "" && before != text {
			return d.Errf("%s is set twice, to %s and to %s: leave one of them out", name, before, text)
		}
		s.values[name] = text
		r.Default, r.DefaultAny = args[0], len(args) == 2
		return nil
	}
}

// PriorityRange bounds a priority.
type PriorityRange struct {
	// The most urgent that is possible.
	Min int `json:"min"`
	// The least urgent that is possible.
	Max int `json:"max"`
}

// Check says what is wrong with p.
func (p PriorityRange) Check() error {
	for _, end := range []int{p.Min, p.Max} {
		if err := config.CheckPriority(end); err != nil {
			return err
		}
	}
	if p.Min > p.Max {
		return fmt.Errorf("it goes from %d to %d: the smaller number, which is more urgent, comes first", p.Min, p.Max)
	}
	return nil
}

// Clamp is n or the end of the range that is nearer to it; a nil range is that of all priorities.
func (p *PriorityRange) Clamp(n int) int {
	if p == nil {
		return min(max(n, 0), config.MaxPriority)
	}
	return min(max(n, p.Min), p.Max)
}

// priorityRange reads `priority_range MIN MAX`.
func priorityRange(field **PriorityRange) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) != 2 {
			return wants(d, name+" MIN MAX, as in "+name+" 50 200")
		}
		var value PriorityRange
		var err, otherErr error
		value.Min, err = priorityNumber(args[0])
		value.Max, otherErr = priorityNumber(args[1])
		if err == nil && otherErr == nil {
			err = value.Check()
		}
		for _, err := range []error{err, otherErr} {
			if err != nil {
				return d.Errf("%s: %w", name, err)
			}
		}
		if first := *field; first != nil && *first != value {
			return d.Errf("%s is set twice, to %d %d and to %d %d: leave one of them out", name, first.Min, first.Max, value.Min, value.Max)
		}
		*field = &value
		return nil
	}
}

// Priority is a number as text, or text with placeholders. In JSON a number may stand for it.
type Priority string

// Number is the priority, if it is a number and not text with placeholders.
func (p Priority) Number() (int, bool) {
	n, err := strconv.Atoi(string(p))
	return n, err == nil
}

// Check says what is wrong with p.
func (p Priority) Check() error {
	if p == "" || isPlaceholder(string(p)) {
		return nil
	}
	n, ok := p.Number()
	if !ok {
		return fmt.Errorf("priority is %q: it must be a number, or a placeholder such as {header.X-Priority}", string(p))
	}
	return config.CheckPriority(n)
}

// MarshalJSON writes a number as such.
func (p Priority) MarshalJSON() ([]byte, error) {
	if n, ok := p.Number(); ok {
		return json.Marshal(n)
	}
	return json.Marshal(string(p))
}

// UnmarshalJSON reads text or a number.
func (p *Priority) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) == nil {
		*p = Priority(text)
		return nil
	}
	var n int
	if json.Unmarshal(data, &n) != nil {
		return errors.New("priority must be a whole number, or text with placeholders")
	}
	*p = Priority(strconv.Itoa(n))
	return nil
}

func priority(s string) (Priority, error) {
	if s == "" {
		return "", errors.New("the value is empty")
	}
	return Priority(s), Priority(s).Check()
}

// offOrDuration reads a time above 0, or off.
func offOrDuration(s string) (caddy.Duration, error) {
	if s == config.Off {
		return 0, nil
	}
	return someDuration(s)
}

// unloadRequest reads `unload_request METHOD /path { ... }`.
func unloadRequest(field *[]config.UnloadRequest) word {
	return func(d *caddyfile.Dispenser) error {
		args := d.RemainingArgs()
		if len(args) == 0 || len(args) > 2 {
			return wants(d, "unload_request [METHOD] /path { ... }")
		}
		u := config.UnloadRequest{Route: strings.Join(args, " ")}
		s := newSaid(nil)
		err := readBlock(d, "unload_request", map[string]word{
			"zero":   single(s, &u.Zero, "keep_alive", anyText),
			"true":   list(&u.True, "FIELD ..."),
			"empty":  list(&u.Empty, "FIELD ..."),
			"answer": single(s, &u.Answer, "`{\"done\":true}`", anyText),
		})
		if err == nil {
			err = u.Check()
		}
		if err != nil {
			return d.Errf("unload_request: %w", err)
		}
		*field = append(*field, u)
		return nil
	}
}
