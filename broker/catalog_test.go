package broker

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// lister is a supervised server that has a list of its models.
type lister struct {
	*supervised
	asked atomic.Int32
	holds atomic.Pointer[string]
}

func (d *lister) Open(deps lifecycle.Deps) (lifecycle.Driver, error) { d.deps = deps; return d, nil }
func (d *lister) Elsewhere(name string) bool                         { return name == "cloud" }
func (d *lister) Catalog(context.Context) ([]lifecycle.Model, error) {
	d.asked.Add(1)
	return []lifecycle.Model{{Name: "x"}}, nil
}
func (d *lister) Load(ctx context.Context, t lifecycle.Target) error {
	if err := d.supervised.Load(ctx, t); err != nil {
		return err
	}
	d.holds.Store(&t.Model)
	return nil
}

func (d *lister) Probe(context.Context) lifecycle.Report {
	models := []lifecycle.Model{}
	if name := d.holds.Load(); name != nil {
		models = append(models, lifecycle.Model{Name: *name, Resident: -1})
	}
	return lifecycle.Report{Loaded: lifecycle.TriOf(len(models) > 0), Resident: -1, Models: models}
}

// listing is a broker with one server, of the model a, that has a list of its models.
func listing(t *testing.T, starts bool) (*world, *lister) {
	t.Helper()
	w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
	c := server("m", 2*gpu.GiB)
	c.Models = []*config.Model{{Name: "a"}}
	w.gen = w.generation(t, nil, c)
	traits := everything
	traits.LoadModel, traits.UnloadModel, traits.Models, traits.Catalog, traits.Starts = true, true, true, true, starts
	w.servers["m"].traits = traits
	d := &lister{supervised: &supervised{fakeServer: w.servers["m"]}}
	w.gen.Lifecycles["m"] = d
	require.NoError(t, w.Push(w.gen))
	return w, d
}

// Only a name that is none of ours, with a digest by which it may be one, is worth a question.
func TestWhichLoadedModelsTheCatalogIsAskedAbout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := listing(t, false)
		defer w.Close()
		for name, c := range map[string]struct {
			m    lifecycle.Model
			asks bool
		}{
			"one of ours":                {lifecycle.Model{Name: "a"}, false},
			"one of ours, with a digest": {lifecycle.Model{Name: "a", Digest: "1"}, false},
			"another":                    {lifecycle.Model{Name: "b"}, false},
			"another, with a digest":     {lifecycle.Model{Name: "b", Digest: "1"}, true},
		} {
			require.Equal(t, c.asks, w.strange("m", []lifecycle.Model{c.m}), name)
		}
		require.False(t, w.strange("nobody", []lifecycle.Model{{Name: "b", Digest: "1"}}))
	})
}

// impatient notes how long its unload may take.
type impatient struct {
	*supervised
	may time.Duration
}

func (d *impatient) Open(deps lifecycle.Deps) (lifecycle.Driver, error) { d.deps = deps; return d, nil }
func (d *impatient) Unload(ctx context.Context, t lifecycle.Target) (bool, error) {
	if until, ok := ctx.Deadline(); ok {
		d.may = time.Until(until)
	}
	return d.supervised.Unload(ctx, t)
}

// One that the driver starts is asked by its own route, then stopped: each may take its time.
func TestHowLongAnUnloadMayTake(t *testing.T) {
	for starts, want := range map[bool]time.Duration{false: 7 * time.Second, true: 2*7*time.Second + time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
			defer w.Close()
			c := server("m", 2*gpu.GiB)
			c.UnloadTimeout = caddy.Duration(7 * time.Second)
			w.gen = w.generation(t, nil, c)
			traits := everything
			traits.Starts = starts
			w.servers["m"].traits = traits
			d := &impatient{supervised: &supervised{fakeServer: w.servers["m"]}}
			w.gen.Lifecycles["m"] = d
			require.NoError(t, w.Push(w.gen))
			w.serves(t, "m")
			require.NoError(t, w.UnloadByHand(t.Context(), "m", false))
			require.Equal(t, want, d.may)
		})
	}
}

func TestWhatIsKnownOfAModelWithoutAskingItsServer(t *testing.T) {
	listed := map[string]lifecycle.Model{"x": {Name: "x"}, "twin": {Name: "twin", Digest: "1"}, "a": {Name: "a", Digest: "1"}}
	no := Offer{Known: lifecycle.No, Listed: []string{"x", "twin"}}
	silent := Offer{Silent: "no answer"}
	failed := time.Now().Add(-time.Hour)
	for name, c := range map[string]struct {
		starts, runs, loads bool
		told, list          bool
		old                 bool // the list was told so long ago that it is to be asked for again
		model               string
		want                Offer
		stale               bool
	}{
		"one of the configuration":                         {model: "a", want: Offer{Known: lifecycle.Yes, As: "a"}},
		"one that is listed":                               {model: "x", list: true, told: true, want: Offer{Known: lifecycle.Yes, As: "x"}},
		"one that was listed by a server that is silent":   {model: "x", list: true, want: Offer{Known: lifecycle.Yes, As: "x"}},
		"one that was listed long ago":                     {model: "x", list: true, told: true, old: true, want: Offer{Known: lifecycle.Yes, As: "x"}},
		"one that is not listed":                           {model: "y", list: true, told: true, want: no},
		"one that was not listed long ago":                 {model: "y", list: true, told: true, old: true, stale: true},
		"one that is served from elsewhere":                {model: "cloud", list: true, told: true, want: Offer{Elsewhere: true}},
		"a server that is silent":                          {model: "y", want: silent},
		"a server that is silent now":                      {model: "y", list: true, want: silent},
		"a started server that is silent":                  {starts: true, runs: true, model: "y", want: silent},
		"a started server that is silent now":              {starts: true, runs: true, list: true, model: "y", want: silent},
		"a started server that has told":                   {starts: true, runs: true, told: true, list: true, model: "y", want: no},
		"a server that stands still and never told":        {starts: true, model: "y", want: Offer{Starts: true, Failed: failed}},
		"the last list of one that stands still":           {starts: true, list: true, model: "y", want: no},
		"a server that is being started and never told":    {starts: true, loads: true, model: "y", want: Offer{Starts: true, Failed: failed}},
		"a server that runs, is loaded and never told":     {starts: true, runs: true, loads: true, model: "y", want: Offer{Starts: true, Failed: failed}},
		"a server that is being started and told once":     {starts: true, loads: true, list: true, model: "y", want: silent},
		"another name of one of the configuration":         {model: "twin", list: true, told: true, want: Offer{Known: lifecycle.Yes, As: "a"}},
		"a server that is being started, and its old list": {starts: true, loads: true, list: true, model: "x", want: Offer{Known: lifecycle.Yes, As: "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, d := listing(t, c.starts)
				defer w.Close()
				pass(time.Minute)
				if c.loads {
					d.load = time.Hour
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					go func() { _ = w.LoadByHand(ctx, "m/a") }()
					pass(time.Second)
				}
				d.run.Store(c.runs)
				w.mu.Lock()
				cat := &w.consumers["m"].catalog
				*cat = catalog{at: time.Now(), told: c.told, failed: failed}
				if !c.told {
					cat.fault = "no answer"
				}
				if c.list {
					cat.byKey, cat.models = listed, []lifecycle.Model{listed["x"], listed["twin"]}
				}
				if c.old {
					cat.at = time.Now().Add(-catalogRest)
				}
				w.mu.Unlock()
				asked := d.asked.Load()
				got, stale := w.offered("m", c.model)
				require.Equal(t, c.want, got)
				require.Equal(t, c.stale, stale)
				require.Equal(t, asked, d.asked.Load())
			})
		})
	}
}

func TestAModelThatWasOnlyEverAskedForIsKnownByItsServersList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := listing(t, false)
		defer w.Close()
		pass(time.Minute)
		adopted := func(model string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.adopt(time.Now(), w.consumers["m"], lifecycle.Model{Name: model, Resident: -1}, true)
		}
		known := func(model string) lifecycle.Tri { return w.Offer(t.Context(), "m", model).Known }
		adopted("y")
		require.Equal(t, lifecycle.No, known("y"), "its slot alone says nothing")

		l, err := w.Acquire(t.Context(), Request{Consumer: "m", Model: "y"})
		require.NoError(t, err)
		require.Equal(t, lifecycle.Yes, known("y"), "it is at work")
		w.mu.Lock()
		w.consumers["m"].miss(time.Now(), "y")
		w.mu.Unlock()
		require.Equal(t, lifecycle.No, known("y"), "its server says that it has none")
		l.Release(scheduler.Served)
	})
}

func TestAServersModelsAreThoseOfWhoSharesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		part := server("part", gpu.GiB)
		part.Shares, part.Upstream = "whole", "whole.test:1"
		w := newWorld(t, nil, server("whole", 2*gpu.GiB), part)
		defer w.Close()
		w.serves(t, "whole")
		require.Equal(t, Held{Slot: "whole", Loaded: true}, w.Held("part", ""))
	})
}

// busyServer has something to say of whether it works.
type busyServer struct {
	*fakeServer
	busy bool
	err  error
}

func (d *busyServer) Open(lifecycle.Deps) (lifecycle.Driver, error) { return d, nil }
func (d *busyServer) Busy(context.Context, lifecycle.Target) (bool, error) {
	return d.busy, d.err
}

func TestAServerThatCannotBeAskedIsBusyAndOneThatIsGoneIsNot(t *testing.T) {
	for name, c := range map[string]struct {
		busy, cannot bool
		err          error
		idles        bool
	}{
		"busy":             {busy: true},
		"idle":             {idles: true},
		"no answer":        {err: errors.New("a timeout")},
		"no server":        {err: lifecycle.ErrRefused, idles: true},
		"no way to it":     {err: lifecycle.ErrUnreachable},
		"no way to ask it": {cannot: true, busy: true, idles: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{Broker: New(), gpu: &fakeGPU{total: 16 * gpu.GiB}, servers: map[string]*fakeServer{}}
				w.gen = w.generation(t, nil, server("a", gpu.GiB))
				w.servers["a"].traits.Busy = !c.cannot
				w.gen.Lifecycles["a"] = &busyServer{fakeServer: w.servers["a"], busy: c.busy, err: c.err}
				require.NoError(t, w.Push(w.gen))
				l, err := w.Acquire(t.Context(), Request{Consumer: "a"})
				require.NoError(t, err)
				require.Equal(t, c.idles, w.Idles(l))
				l.Release(scheduler.Served)
				w.Close()
				require.False(t, w.Idles(l), "the broker is closed")
			})
		})
	}
}

func TestTheRequestLogIsThatOfTheConfigurationThatRules(t *testing.T) {
	b := New()
	defer b.Close()
	require.Empty(t, b.RequestLog())
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *config.Broker) { c.RequestLog = "/var/log/one" }, server("a", gpu.GiB))
		defer w.Close()
		require.Equal(t, "/var/log/one", w.RequestLog())
		w.reload(t, w.generation(t, nil, server("a", gpu.GiB)))
		require.Empty(t, w.RequestLog())
	})
}
