package caddyfile

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// reserved reads `reserved_interactive PLACES below PRIORITY`.
func reserved(field **config.Reserved) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) != 3 || args[1] != "below" {
			return wants(d, name+" PLACES below PRIORITY, as in "+name+" 16 below 100")
		}
		var faults []error
		places, err := number(1)(args[0])
		if err != nil {
			faults = append(faults, d.Errf("%s: %w", name, err))
		}
		below, err := priorityNumber(args[2])
		switch {
		case err != nil:
			faults = append(faults, d.Errf("%s: %w", name, err))
		case below == 0:
			faults = append(faults, d.Errf("%s: no priority is below 0", name))
		}
		if len(faults) > 0 {
			return errors.Join(faults...)
		}
		value := config.Reserved{Places: places, Below: below}
		if first := *field; first != nil && *first != value {
			return d.Errf("%s is set twice, to %d below %d and to %d below %d: leave one of them out", name, first.Places, first.Below, places, below)
		}
		*field = &value
		return nil
	}
}

// stayWarm reads `stay_warm CATEGORY DURATION`, which may be given once for each category. It does not change the
// map that it finds, which may be an earlier block's.
func stayWarm(field *map[string]caddy.Duration) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		var category, arg string
		if !d.AllArgs(&category, &arg) {
			return wants(d, name+" CATEGORY DURATION, as in "+name+" llm 5m")
		}
		if err := config.CheckCategory(category); err != nil {
			return d.Errf("%s: %w", name, err)
		}
		after, err := duration(arg)
		if err != nil {
			return d.Errf("%s: %w", name, err)
		}
		if first, twice := (*field)[category]; twice && first != after {
			return d.Errf("%s %s is set twice, to %s and to %s: leave one of them out", name, category, time.Duration(first), arg)
		}
		both := map[string]caddy.Duration{category: after}
		maps.Copy(both, *field)
		*field = both
		return nil
	}
}

// restore reads `restore CONSUMER after DURATION`, which may be given once for each consumer.
func restore(field *[]config.Restore) word {
	return func(d *caddyfile.Dispenser) error {
		name := d.Val()
		args := d.RemainingArgs()
		if len(args) != 3 || args[1] != "after" {
			return wants(d, name+" CONSUMER after DURATION, as in "+name+" ollama after 2m")
		}
		if err := config.CheckName(args[0]); err != nil {
			return d.Errf("%s: consumer %q: %w", name, args[0], err)
		}
		after, err := someDuration(args[2])
		if err != nil {
			return d.Errf("%s: %w", name, err)
		}
		for _, first := range *field {
			if first.Consumer == args[0] && first.After != after {
				return d.Errf("%s %s is set twice, to %s and to %s: leave one of them out", name, args[0], time.Duration(first.After), args[2])
			}
			if first.Consumer == args[0] {
				return nil
			}
		}
		*field = append(slices.Clip(*field), config.Restore{Consumer: args[0], After: after, Source: source(d)})
		return nil
	}
}

// checkedList is a word with one or more values, each of which is checked.
func checkedList(field *[]string, example string, check func(string) error) word {
	return func(d *caddyfile.Dispenser) error {
		var values []string
		if err := list(&values, example)(d); err != nil {
			return err
		}
		var faults []error
		for _, value := range values {
			if err := check(value); err != nil {
				faults = append(faults, d.WrapErr(err))
			}
		}
		if len(faults) > 0 {
			return errors.Join(faults...)
		}
		*field = append(*field, values...)
		return nil
	}
}

// consumerNames is a word with one or more names of consumers.
func consumerNames(name string, field *[]string) word {
	return checkedList(field, "CONSUMER ...", func(consumer string) error {
		if err := config.CheckName(consumer); err != nil {
			return fmt.Errorf("%s: consumer %q: %w", name, consumer, err)
		}
		return nil
	})
}

func priorityNumber(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("%q is not a whole number", s)
	}
	return n, config.CheckPriority(n)
}

func category(s string) (string, error) { return s, config.CheckCategory(s) }
