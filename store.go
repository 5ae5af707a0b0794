package gpubroker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/certmagic"
)

// store keeps a document in Caddy's storage. Several Caddys may share
// that, each with servers of its own: so the document's place has the name of the instance.
type store struct {
	storage certmagic.Storage
	name    string
}

// The documents.
const (
	learntName = "learnt.json"
	flagsName  = "flags.json"
)

// How often, and after what pause, Caddy is asked for its instance ID. It keeps that in a file, which
// the first who asks in a new folder makes, empty at first: another part of Caddy may do so at the same moment.
const (
	idTries = 10
	idPause = 20 * time.Millisecond
)

func (s *store) key(ctx context.Context) (string, error) {
	for try := 1; ; try++ {
		id, err := caddy.InstanceID()
		switch {
		case err == nil:
			return path.Join("gpu_broker", id.String(), s.name), nil
		case try == idTries:
			return "", fmt.Errorf("finding this Caddy's instance ID: %w", err)
		}
		select {
		case <-time.After(idPause):
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// Load implements broker.Store.
func (s *store) Load(ctx context.Context) ([]byte, error) {
	key, err := s.key(ctx)
	if err != nil {
		return nil, err
	}
	data, err := s.storage.Load(ctx, key)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return data, err
}

// Save implements broker.Store. Caddy's storages write a file whole or not at all.
func (s *store) Save(ctx context.Context, doc []byte) error {
	key, err := s.key(ctx)
	if err != nil {
		return err
	}
	return s.storage.Store(ctx, key, doc)
}

// SetAside implements broker.Store.
func (s *store) SetAside(ctx context.Context, doc []byte) (where string, err error) {
	key, err := s.key(ctx)
	if err != nil {
		return "", err
	}
	aside := key + ".damaged-" + time.Now().UTC().Format("20060102T150405")
	if err := s.storage.Store(ctx, aside, doc); err != nil {
		return "", err
	}
	return aside, s.storage.Delete(ctx, key)
}
