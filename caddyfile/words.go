// Package caddyfile turns the Caddyfile's text into configuration: the global
// option gpu_broker and the directive of the same name. A word that is wrong
// does not end the reading: all faults are told at once, each with file and line.
package caddyfile

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// word reads one subdirective. It finds d on the word itself, and d holds
// nothing but the word, its arguments and its block.
type word func(d *caddyfile.Dispenser) error

// readBlock reads the block that d stands before, word by word. what names
// the block in errors. It goes on after a fault.
func readBlock(d *caddyfile.Dispenser, what string, words map[string]word) error {
	var faults []error
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		segment := d.NewFromNextSegment()
		segment.Next()
		name := segment.Val()
		read, ok := words[name]
		if !ok {
			faults = append(faults, segment.WrapErr(config.Unknown(what+" subdirective", name, slices.Collect(maps.Keys(words)))))
			continue
		}
		if err := read(segment); err != nil {
			faults = append(faults, err)
			continue
		}
		if err := atEnd(segment, name); err != nil {
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}

// atEnd says what stands after a word that has been read.
func atEnd(d *caddyfile.Dispenser, name string) error {
	if n := d.CountRemainingArgs(); n > 0 {
		return d.Errf("%s has %d arguments too many", name, n)
	}
	if d.NextBlock(0) {
		return d.Errf("%s takes no block", name)
	}
	return nil
}

// wants is the error for wrong arguments. It does not show what was found,
// which may be a secret.
func wants(d *caddyfile.Dispenser, usage string) error {
	return d.Errf("wrong arguments: write %s", usage)
}

// said remembers which single values have been given, as they were written, so
// that a second, different one is found.
type said struct {
	values map[string]string
	// zero is told of values that are given although they are zero; it may be nil
	zero func(word string)
}

func newSaid(zero func(string)) *said { return &said{values: map[string]string{}, zero: zero} }

// single is a word with one value.
func single[T comparable](s *said, field *T, example string, parse func(string) (T, error)) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		var arg string
		if !d.AllArgs(&arg) {
			return wants(d, name+" "+example)
		}
		value, err := parse(arg)
		if err != nil {
			return d.Errf("%s: %w", name, err)
		}
		return store(s, d, name, field, value, arg)
	}
}

// optional is a word with one value, whose absence is told apart from zero.
func optional[T comparable](s *said, field **T, example string, parse func(string) (T, error)) word {
	return func(d *caddyfile.Dispenser) error {
		var value T
		if *field != nil {
			s.values[d.Val()] = cmp.Or(s.values[d.Val()], show(**field)) // so that a zero counts as given
			value = **field
		}
		if err := single(s, &value, example, parse)(d); err != nil {
			return err
		}
		*field = &value
		return nil
	}
}

// flag is a word that stands alone, or with on or off.
func flag(s *said, field *bool) word {
	return func(d *caddyfile.Dispenser) error {
		name, arg := d.Val(), config.On
		if d.NextArg() {
			arg = d.Val()
		}
		if err := known(name+" setting", config.Switches)(arg); err != nil {
			return d.WrapErr(err)
		}
		return store(s, d, name, field, arg == config.On, arg)
	}
}

// store sets field to value, which was written as arg, unless another value has
// been given before, here or in an earlier block.
func store[T comparable](s *said, d *caddyfile.Dispenser, name string, field *T, value T, arg string) error {
	var zero T
	first, twice := s.values[name]
	if !twice && *field != zero {
		first, twice = show(*field), true
	}
	if twice && *field != value {
		return d.Errf("%s is set twice, to %s and to %s: leave one of them out", name, first, arg)
	}
	*field = value
	s.values[name] = arg
	if value == zero && s.zero != nil {
		s.zero(name)
	}
	return nil
}

// list is a word with one or more values, which may be given several times.
func list(field *[]string, example string) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) == 0 {
			return wants(d, name+" "+example)
		}
		*field = append(*field, args...)
		return nil
	}
}

// patterns is a word with one or more route patterns, METHOD /path or /path,
// which may be given several times.
func patterns(field *[]string) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) == 0 {
			return wants(d, name+" [METHOD] /path ...")
		}
		var faults []error
		for i := 0; i < len(args); i++ {
			pattern := args[i]
			if !strings.ContainsAny(pattern, "/* ") && i+1 < len(args) {
				i++
				pattern += " " + args[i]
			}
			if _, err := config.ParseRoutePattern(pattern); err != nil {
				faults = append(faults, d.Errf("%s: %w", name, err))
				continue
			}
			*field = append(*field, pattern)
		}
		return errors.Join(faults...)
	}
}

// known accepts the allowed words.
func known(what string, allowed []string) func(string) error {
	return func(found string) error {
		if slices.Contains(allowed, found) {
			return nil
		}
		return config.Unknown(what, found, allowed)
	}
}

// The parsers of single values.

func oneOf(what string, allowed []string) func(string) (string, error) {
	check := known(what, allowed)
	return func(found string) (string, error) { return found, check(found) }
}

func anyText(s string) (string, error) {
	if s == "" {
		return "", errors.New("the value is empty")
	}
	return s, nil
}

// number reads a whole number of at least least.
func number(least int) func(string) (int, error) {
	return func(s string) (int, error) {
		n, err := strconv.Atoi(s)
		if err != nil {
			return 0, fmt.Errorf("%q is not a whole number", s)
		}
		if n < least {
			return 0, fmt.Errorf("%d is too small: it must be at least %d", n, least)
		}
		return n, nil
	}
}

func factor(s string) (float64, error) {
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) || f < 0 {
		return 0, fmt.Errorf("%q is not a number of 0 or more", s)
	}
	return f, nil
}

// size reads an amount of memory.
func size(s string) (gpu.Bytes, error) { return gpu.ParseBytes(s) }

// someSize reads an amount of memory above zero.
func someSize(s string) (gpu.Bytes, error) {
	n, err := gpu.ParseBytes(s)
	if err == nil && n == 0 {
		err = fmt.Errorf("%q is too small: it must be above 0", s)
	}
	return n, err
}

// duration reads a time of 0 or more.
func duration(s string) (caddy.Duration, error) {
	d, err := caddy.ParseDuration(s)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%q is not a duration: write for example 500ms, 30s, 10m, 2h or 1d", s)
	case d < 0:
		return 0, fmt.Errorf("%q is negative", s)
	}
	return caddy.Duration(d), nil
}

// someDuration reads a time above 0.
func someDuration(s string) (caddy.Duration, error) {
	d, err := duration(s)
	if err == nil && d == 0 {
		err = fmt.Errorf("%q is too short: it must be above 0", s)
	}
	return d, err
}

// show is a value as one would write it.
func show(v any) string {
	switch v := v.(type) {
	case caddy.Duration:
		return time.Duration(v).String()
	case bool:
		if v {
			return config.On
		}
		return config.Off
	default:
		return fmt.Sprint(v)
	}
}
