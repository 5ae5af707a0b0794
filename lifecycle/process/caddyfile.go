package process

import (
	"errors"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// UnmarshalCaddyfile reads
//
//	process COMMAND ARGS... {
//		ports 9100-9199
//		env NAME VALUE
//		env_clear
//		env_pass NAME...
//		dir /path
//		user NAME
//		signal SIGTERM
//		grace 10s
//		restart never|on_failure
//		max_restarts 3
//	}
func (l *Lifecycle) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name of the module
	l.Command = d.RemainingArgs()
	if len(l.Command) == 0 {
		return d.Err("wanted: process COMMAND ARGS...")
	}
	var faults []error
	seen := map[string]bool{}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		word := d.Val()
		if seen[word] && word != "env" && word != "env_pass" {
			faults = append(faults, d.Errf("%s is set twice: leave one of them out", word))
			d.RemainingArgs()
			continue
		}
		seen[word] = true
		faults = append(faults, l.word(d, word))
	}
	return errors.Join(faults...)
}

func (l *Lifecycle) word(d *caddyfile.Dispenser, word string) error {
	args := d.RemainingArgs()
	if word == "env" {
		if len(args) != 2 {
			return d.Err("wanted: env NAME VALUE")
		}
		if _, twice := l.Env[args[0]]; twice {
			return d.Errf("env %s is set twice: leave one of them out", args[0])
		}
		if l.Env == nil {
			l.Env = map[string]string{}
		}
		l.Env[args[0]] = args[1]
		return nil
	}
	switch word {
	case "env_clear":
		if len(args) > 0 {
			return d.Err("wanted: env_clear, with nothing after it")
		}
		l.EnvClear = true
		return nil
	case "env_pass":
		if len(args) == 0 {
			return d.Err("wanted: env_pass NAME...")
		}
		l.EnvPass = append(l.EnvPass, args...)
		return nil
	}
	texts := map[string]*string{"ports": &l.Ports, "dir": &l.Dir, "user": &l.User, "signal": &l.Signal, "restart": &l.Restart}
	text := texts[word]
	if text == nil && word != "grace" && word != "max_restarts" {
		return d.Errf("unknown word %q in process: there are ports, env, env_clear, env_pass, dir, user, signal, grace, restart and max_restarts", word)
	}
	if len(args) != 1 {
		return d.Errf("wanted: %s with one value, found %d", word, len(args))
	}
	switch {
	case text != nil:
		*text = args[0]
	case word == "grace":
		grace, err := caddy.ParseDuration(args[0])
		if err != nil {
			return d.Errf("grace %q is not a duration, such as 10s", args[0])
		}
		l.Grace = caddy.Duration(grace)
	default:
		most, err := strconv.Atoi(args[0])
		if err != nil {
			return d.Errf("max_restarts %q is not a number", args[0])
		}
		l.Most = &most
	}
	return nil
}

// Interface guard.
var _ caddyfile.Unmarshaler = (*Lifecycle)(nil)
