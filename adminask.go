package gpubroker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/config"
)

const (
	maxLend   = 30 * 24 * time.Hour // a card that is lent for longer is not the broker's
	maxConfig = 64 << 10            // bytes of a PUT of the run-time configuration
)

// page is a route of the admin endpoint.
type page func(w http.ResponseWriter, r *http.Request, b *broker.Broker) error

// pages are those that are neither documents nor done with a consumer, by path and method.
var pages = map[string]map[string]page{
	"explain": {http.MethodGet: explain},
	"lend":    {http.MethodPost: lend},
	"config":  {http.MethodGet: getConfig, http.MethodPut: putConfig},
}

// explain says what would happen if a request came now.
func explain(w http.ResponseWriter, r *http.Request, b *broker.Broker) error {
	q := r.URL.Query()
	name := q.Get("consumer")
	if name == "" {
		return bad("name a consumer: explain?consumer=NAME")
	}
	var priority *int
	if text := q.Get("priority"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n > config.MaxPriority {
			return bad("priority=%q is not a whole number from 0 to %d", text, config.MaxPriority)
		}
		priority = &n
	}
	doc, err := b.Explain(name, priority)
	if errors.Is(err, broker.ErrUnknownConsumer) {
		return unknownConsumer(b, name)
	}
	if errors.Is(err, broker.ErrCannot) {
		return caddy.APIError{HTTPStatus: http.StatusConflict, Err: err}
	}
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

// lend lends a GPU to somebody who does not ask the broker.
func lend(w http.ResponseWriter, r *http.Request, b *broker.Broker) error {
	q := r.URL.Query()
	text := q.Get("for")
	if text == "" {
		return bad("say for how long: lend?for=30m; for=0 ends it")
	}
	d, err := caddy.ParseDuration(text)
	if text == "0" {
		d, err = 0, nil
	}
	if err != nil || d < 0 || d > maxLend {
		return bad("for=%q is no duration from 0 to %s: write for example for=30m", text, maxLend)
	}
	index := 0
	if text := q.Get("gpu"); text != "" {
		if index, err = strconv.Atoi(text); err != nil || index < 0 {
			return bad("gpu=%q is no index of a GPU: write for example gpu=0", text)
		}
	}
	doc, err := b.Lend(index, d)
	if errors.Is(err, broker.ErrUnknownGPU) {
		return caddy.APIError{HTTPStatus: http.StatusNotFound, Err: err}
	}
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

// getConfig tells the run-time configuration.
func getConfig(w http.ResponseWriter, _ *http.Request, b *broker.Broker) error {
	return writeJSON(w, http.StatusOK, b.Flags())
}

// putConfig sets it. It takes exactly what there is to set.
func putConfig(w http.ResponseWriter, r *http.Request, b *broker.Broker) error {
	yes, err := readConfig(r.Body)
	if err != nil {
		return bad(`%w: send {"allowCloudFallback": true} or {"allowCloudFallback": false}`, err)
	}
	doc, err := b.AllowCloudFallback(r.Context(), yes)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, doc)
}

// readConfig is strict, by the letter: Go's own decoder would take a field in any case, and null for false.
func readConfig(body io.Reader) (allowCloud bool, err error) {
	const field = "allowCloudFallback"
	data, err := io.ReadAll(io.LimitReader(body, maxConfig+1))
	switch {
	case err != nil:
		return false, fmt.Errorf("the body could not be read: %w", err)
	case len(data) > maxConfig:
		_, _ = io.CopyN(io.Discard, body, 4*maxConfig) // else its sender would find the connection closed, and no answer
		return false, fmt.Errorf("the body is too large: at most %d bytes are taken", maxConfig)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	token := func() json.Token {
		var t json.Token
		if err == nil {
			t, err = d.Token()
		}
		return t
	}
	if open := token(); err == nil && open != json.Delim('{') {
		return false, errors.New("the body is no JSON object")
	}
	seen := false
	for err == nil && d.More() {
		name, value := token(), token()
		yes, isBool := value.(bool)
		switch {
		case err != nil:
		case name != field:
			return false, config.Unknown("setting", fmt.Sprint(name), []string{field})
		case !isBool:
			return false, fmt.Errorf("%s is neither true nor false", field)
		case seen:
			return false, fmt.Errorf("%s is there twice", field)
		}
		allowCloud, seen = yes, true
	}
	token() // the closing brace
	if err != nil {
		return false, fmt.Errorf("the body is no JSON: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return false, errors.New("something follows the JSON object")
	}
	if !seen {
		return false, fmt.Errorf("%s is missing", field)
	}
	return allowCloud, nil
}

func bad(format string, args ...any) error {
	return caddy.APIError{HTTPStatus: http.StatusBadRequest, Err: fmt.Errorf(format, args...)}
}

func unknownConsumer(b *broker.Broker, name string) error {
	return caddy.APIError{HTTPStatus: http.StatusNotFound, Err: config.Unknown("consumer", name, b.Names())}
}
