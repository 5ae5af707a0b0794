package broker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"go.uber.org/zap"
)

// Flags are the settings that can be changed while the broker runs (spec §4.8).
type Flags struct {
	// Whether a request may go to a cloud consumer that is not the first of its candidates.
	AllowCloudFallback bool `json:"allowCloudFallback"`
	// Where that comes from: `stored` (said on the admin API, also before a restart), `environment` or `default`.
	Source string `json:"source"`
}

// Where flags come from.
const (
	FromDefault     = "default"
	FromEnvironment = "environment"
	FromStore       = "stored"
)

// CloudVariable is the environment variable that seeds Flags.AllowCloudFallback.
const CloudVariable = "GPU_BROKER_ALLOW_CLOUD_FALLBACK"

// CloudSeed reads CloudVariable; nil: it is not set, or empty. Its error names
// the variable and what was found.
func CloudSeed(lookup func(name string) (string, bool)) (*bool, error) {
	text, _ := lookup(CloudVariable)
	yes := false
	switch strings.ToLower(strings.TrimSpace(text)) {
	case "":
		return nil, nil
	case "true", "1", "on":
		yes = true
	case "false", "0", "off":
	default:
		return nil, fmt.Errorf("the environment variable %s is %q: set it to true or false (or 1, 0, on, off), or not at all", CloudVariable, text)
	}
	return &yes, nil
}

// flags is what the broker knows of its flags.
type flags struct {
	io       sync.Mutex // held during calls of the store; never taken under mu
	recalled bool       // guarded by io
	stored   *bool      // guarded by the broker's mu; nil: nothing was ever stored
}

// flagsDoc is the document in the store.
type flagsDoc struct {
	Version            int   `json:"version"`
	AllowCloudFallback *bool `json:"allow_cloud_fallback"`
}

const (
	flagsVersion = 1
	flagsMax     = 64 << 10 // bytes: it is less than a hundred
)

func decodeFlags(data []byte) (flagsDoc, error) {
	var doc flagsDoc
	if len(data) > flagsMax {
		return doc, fmt.Errorf("it has %d bytes, more than %d", len(data), flagsMax)
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(&doc); err != nil {
		return doc, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return doc, errors.New("something follows the document")
	}
	switch {
	case doc.Version != flagsVersion:
		return doc, fmt.Errorf("its version is %d, not %d", doc.Version, flagsVersion)
	case doc.AllowCloudFallback == nil:
		return doc, errors.New("it lacks allow_cloud_fallback")
	}
	return doc, nil
}

// Flags are the flags as they are.
func (b *Broker) Flags() Flags {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.flagsNow()
}

// flagsNow holds mu.
func (b *Broker) flagsNow() Flags {
	if b.flags.stored != nil {
		return Flags{AllowCloudFallback: *b.flags.stored, Source: FromStore}
	}
	if g := b.current.Load(); g != nil && g.CloudSeed != nil {
		return Flags{AllowCloudFallback: *g.CloudSeed, Source: FromEnvironment}
	}
	return Flags{AllowCloudFallback: true, Source: FromDefault}
}

// AllowCloudFallback sets that flag, for good: requests that come later follow
// it, and so do later processes. After an error it is as it was.
func (b *Broker) AllowCloudFallback(ctx context.Context, yes bool) (Flags, error) {
	b.flags.io.Lock()
	defer b.flags.io.Unlock()
	if g := b.current.Load(); g != nil && g.FlagStore != nil {
		doc, err := json.MarshalIndent(flagsDoc{Version: flagsVersion, AllowCloudFallback: &yes}, "", "\t")
		if err != nil {
			return Flags{}, err
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout) // who leaves now must not make it half done
		defer cancel()
		if err := g.FlagStore.Save(ctx, doc); err != nil {
			return Flags{}, fmt.Errorf("the flags can't be saved, and are as they were: %w", err)
		}
	}
	b.flags.recalled = true // what is stored is older
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.flagsNow()
	b.flags.stored = &yes
	b.logger().Info("allow_cloud_fallback was set", zap.Bool("from", was.AllowCloudFallback), zap.Bool("to", yes))
	return b.flagsNow(), nil
}

// recallFlags reads what was stored before a restart, once. Trouble with it
// leaves the flags to the environment and the defaults.
func (b *Broker) recallFlags(g *Generation) {
	b.flags.io.Lock()
	defer b.flags.io.Unlock()
	if b.flags.recalled || g.FlagStore == nil {
		return
	}
	ctx, cancel := context.WithTimeout(b.ctx, storeTimeout)
	defer cancel()
	data, err := g.FlagStore.Load(ctx)
	if err != nil {
		g.Logger.Warn("the stored flags can't be read: those of the environment, or the defaults, hold", zap.Error(err))
		return
	}
	b.flags.recalled = true
	if data == nil {
		return
	}
	doc, err := decodeFlags(data)
	if err != nil {
		where, asideErr := g.FlagStore.SetAside(ctx, data)
		g.Logger.Warn("the stored flags are damaged and set aside: those of the environment, or the defaults, hold",
			zap.String("moved_to", where), zap.NamedError("damage", err), zap.Error(asideErr))
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.flags.stored = doc.AllowCloudFallback
}
