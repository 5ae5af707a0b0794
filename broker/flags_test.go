package broker

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

func TestTheSeedIsReadFromTheEnvironment(t *testing.T) {
	yes, no := true, false
	for text, want := range map[string]*bool{"true": &yes, "1": &yes, "on": &yes, "TRUE": &yes, " On ": &yes, "false": &no, "0": &no, "off": &no, "Off": &no, "": nil, " ": nil} {
		got, err := CloudSeed(func(name string) (string, bool) {
			require.Equal(t, "GPU_BROKER_ALLOW_CLOUD_FALLBACK", name)
			return text, true
		})
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	got, err := CloudSeed(func(string) (string, bool) { return "", false })
	require.NoError(t, err)
	require.Nil(t, got)
	for _, text := range []string{"yes", "no", "2", "tru", "null"} {
		_, err := CloudSeed(func(string) (string, bool) { return text, true })
		require.ErrorContains(t, err, "GPU_BROKER_ALLOW_CLOUD_FALLBACK")
		require.ErrorContains(t, err, text)
	}
}

// flagged is a broker with that store and seed, and its log.
func flagged(t *testing.T, store Store, seed *bool) (*world, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.WarnLevel)
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	t.Cleanup(w.Close)
	w.gen = w.generation(t, nil, server("a", 4*gpu.GiB))
	w.gen.FlagStore, w.gen.CloudSeed, w.gen.Logger = store, seed, zap.New(core)
	require.NoError(t, w.Push(w.gen))
	return w, logs
}

func TestTheStoredFlagWinsOverTheEnvironmentAndThatOverTheDefault(t *testing.T) {
	yes, no := true, false
	for name, c := range map[string]struct {
		doc  string
		seed *bool
		want Flags
	}{
		"nothing said":           {"", nil, Flags{true, FromDefault}},
		"environment off":        {"", &no, Flags{false, FromEnvironment}},
		"environment on":         {"", &yes, Flags{true, FromEnvironment}},
		"stored off":             {`{"version":1,"allow_cloud_fallback":false}`, nil, Flags{false, FromStore}},
		"stored against seed":    {`{"version":1,"allow_cloud_fallback":false}`, &yes, Flags{false, FromStore}},
		"stored on against seed": {`{"version":1,"allow_cloud_fallback":true}`, &no, Flags{true, FromStore}},
	} {
		t.Run(name, func(t *testing.T) {
			store := &fakeStore{}
			if c.doc != "" {
				store.doc = []byte(c.doc)
			}
			w, logs := flagged(t, store, c.seed)
			require.Equal(t, c.want, w.Flags())
			require.Zero(t, logs.Len())
			require.Zero(t, store.saved(), "reading writes nothing")
		})
	}
}

func TestAFlagIsStoredAtOnceAndFoundByTheNextProcess(t *testing.T) {
	store := &fakeStore{}
	w, _ := flagged(t, store, nil)
	_, err := w.AllowCloudFallback(t.Context(), false)
	require.NoError(t, err)
	require.Equal(t, 1, store.saved())
	next, logs := flagged(t, store, nil)
	require.Equal(t, Flags{false, FromStore}, next.Flags())
	require.Zero(t, logs.Len())

	// A later configuration of the same process finds the value as it was set, not as it was read.
	_, err = next.AllowCloudFallback(t.Context(), true)
	require.NoError(t, err)
	yes := false
	again := next.generation(t, nil, server("a", 4*gpu.GiB))
	again.FlagStore, again.CloudSeed = store, &yes
	loads := store.loads
	require.NoError(t, next.Push(again))
	next.Pop(next.gen)
	require.Equal(t, Flags{true, FromStore}, next.Flags())
	require.Equal(t, loads, store.loads)
}

func TestAFlagThatCanNotBeStoredStaysAsItWas(t *testing.T) {
	store := &fakeStore{}
	w, _ := flagged(t, store, nil)
	store.set(errors.New("disk full"))
	_, err := w.AllowCloudFallback(t.Context(), false)
	require.ErrorContains(t, err, "disk full")
	require.Equal(t, Flags{true, FromDefault}, w.Flags())
	store.set(nil)
	gone, leave := context.WithCancel(t.Context())
	leave()
	f, err := w.AllowCloudFallback(gone, false) // that its client has left must not make it half done
	require.NoError(t, err)
	require.Equal(t, Flags{false, FromStore}, f)
	require.Contains(t, string(store.doc), "false")
}

func TestFlagsThatCanNotBeReadLeaveTheSeedInForceWithAWarning(t *testing.T) {
	no := false
	store := &fakeStore{doc: []byte(`{"version":1,"allow_cloud_fallback":true}`), broken: errors.New("no such host")}
	w, logs := flagged(t, store, &no)
	require.Equal(t, Flags{false, FromEnvironment}, w.Flags())
	require.Equal(t, 1, logs.Len())
	require.Empty(t, store.aside)
	for _, doc := range []string{`{`, `null`, `[]`, `{"version":1}`, `{"version":2,"allow_cloud_fallback":true}`, `{"version":1,"allow_cloud_fallback":"yes"}`, `{"version":1,"allow_cloud_fallback":true}{}`, string(make([]byte, flagsMax+1))} {
		store := &fakeStore{doc: []byte(doc)}
		w, logs := flagged(t, store, &no)
		require.Equal(t, Flags{false, FromEnvironment}, w.Flags(), doc)
		require.Equal(t, 1, logs.Len(), doc)
		require.Equal(t, [][]byte{[]byte(doc)}, store.aside)
		_, err := w.AllowCloudFallback(t.Context(), true)
		require.NoError(t, err)
	}
}
