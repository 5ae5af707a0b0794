package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// themes follow one another, so that what each kind of trouble does can be told apart.
var themes = []struct {
	name string
	acts []string
}{
	{"reloads", []string{"good reload", "good reload", "bad reload", "look"}},
	{"servers", []string{"kill", "fault", "fault", "fault", "look"}},
	{"started", []string{"kill process", "kill process", "kill process", "fault of a process", "fault of a process", "slow start", "bad command", "good reload", "look"}},
	{"calm", []string{"look"}},
	{"memory", []string{"outsider", "outsider", "telemetry", "gpu", "past the broker"}},
	{"by hand", []string{"load", "unload", "drain", "drain all", "good reload", "look"}},
	{"queue", []string{"lend", "pin", "guard", "guard", "explain", "good reload", "look"}},
	{"all", []string{"good reload", "bad reload", "kill", "fault", "fault", "outsider", "telemetry", "gpu", "load", "unload", "drain", "drain all", "lend", "pin", "guard", "look",
		"kill process", "fault of a process", "slow start", "bad command", "past the broker"}},
}

// themeLasts is how long each of them does.
const themeLasts = 6 * time.Second

// chaos does things until ctx ends, and returns once all of them are undone.
// What it does follows from the seed; when, also from how long it takes.
func (k *soak) chaos(ctx context.Context, rng *rand.Rand) {
	began := time.Now()
	for ctx.Err() == nil {
		theme := themes[int(time.Since(began)/themeLasts)%len(themes)]
		act := theme.acts[rng.IntN(len(theme.acts))]
		dice := rand.New(rand.NewPCG(rng.Uint64(), 0))
		pause := slowly(time.Duration(100+rng.IntN(500)) * time.Millisecond)
		k.acts[act](k, ctx, dice)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	k.pending.Wait()
}

// acts are what chaos can do, by name. Those that last go on in the background, one for each subject.
func soakActs() map[string]func(k *soak, ctx context.Context, dice *rand.Rand) {
	return map[string]func(k *soak, ctx context.Context, dice *rand.Rand){
		"good reload": (*soak).goodReload,
		"bad reload":  (*soak).badReload,
		"look":        (*soak).lookByAdmin,
		"kill":        (*soak).kill,
		"fault":       (*soak).fault,
		"outsider":    (*soak).outsiderComes,
		"telemetry": func(k *soak, ctx context.Context, dice *rand.Rand) {
			k.gpuState(ctx, dice, spellTelemetry, "telemetry lost")
		},
		"gpu":    func(k *soak, ctx context.Context, dice *rand.Rand) { k.gpuState(ctx, dice, spellGPU, "lost 0") },
		"load":   func(k *soak, _ context.Context, dice *rand.Rand) { k.byHand(dice, "load") },
		"unload": func(k *soak, _ context.Context, dice *rand.Rand) { k.byHand(dice, "unload") },
		"drain": func(k *soak, ctx context.Context, dice *rand.Rand) {
			k.drain(ctx, dice, soakNames[dice.IntN(len(soakNames))])
		},
		"drain all": func(k *soak, ctx context.Context, dice *rand.Rand) { k.drain(ctx, dice, "") },
		"lend":      (*soak).lend,
		"pin":       (*soak).pinByHand,
		"guard":     (*soak).guard,
		"explain":   (*soak).explain,

		"kill process": (*soak).killProcess, "fault of a process": (*soak).faultOfProcess, "slow start": (*soak).slowStart,
		"bad command": (*soak).badCommand, "past the broker": (*soak).pastTheBroker,
	}
}

// soakInside are the consumers whose servers are this process's; soakNames those with a slot of their own, soakServers all that there are.
var (
	soakInside  = []string{"text", "voice", "lazy", "llm", "image", "embed", "pinned", "guest", "library", "sky"}
	soakNames   = append(slices.Clone(soakInside[:len(soakInside)-1]), soakProcesses...)
	soakServers = append(slices.Clone(soakNames), "sky", "twin")
)

// lasting does something in the background for a while and undoes it, unless the subject has trouble already.
func (k *soak) lasting(ctx context.Context, subject string, d time.Duration, begin func() (end func())) {
	if _, busy := k.subjects.LoadOrStore(subject, true); busy {
		return
	}
	end := begin()
	k.pending.Go(func() {
		defer k.subjects.Delete(subject)
		defer end()
		select {
		case <-ctx.Done():
		case <-time.After(d):
		}
	})
}

// someTime is between from and to.
func someTime(dice *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(dice.Int64N(int64(to-from)))
}

func (k *soak) kill(ctx context.Context, dice *rand.Rand) {
	name := soakInside[dice.IntN(len(soakInside))]
	srv := k.servers[name]
	k.lasting(ctx, name, someTime(dice, 50*time.Millisecond, 1500*time.Millisecond), func() func() {
		end := k.spells.begin(spellServer, name, "killed")
		k.rec.count("chaos", "kill")
		srv.Kill()
		return func() {
			k.revive(srv)
			end()
		}
	})
}

func (k *soak) revive(srv *modelserver.Server) {
	if err := srv.Restart(); err != nil {
		k.rec.violation("the soak itself: %s could not be restarted: %v", srv.Name(), err)
	}
}

// faults are the ways in which servers misbehave, each with the longest time.
var soakFaults = []struct {
	name string
	most time.Duration
	set  func(f *modelserver.Faults)
}{
	{"hang health", 3 * time.Second, func(f *modelserver.Faults) { f.HangHealth = true }},
	{"health 500", time.Second, func(f *modelserver.Faults) { f.HealthStatus = 500 }},
	{"hang load", 3 * time.Second, func(f *modelserver.Faults) { f.HangLoad = true }},
	{"hang unload", 3 * time.Second, func(f *modelserver.Faults) { f.HangUnload = true }},
	{"fail unload", 2 * time.Second, func(f *modelserver.Faults) { f.FailUnload = true }},
	{"refuse load", time.Second, func(f *modelserver.Faults) { f.RefuseLoad = true }},
	{"load out of memory", time.Second, func(f *modelserver.Faults) { f.OOMLoads = 1 }},
	{"die on load", 2 * time.Second, func(f *modelserver.Faults) { f.DieOnLoad = true }},
	{"lie unloaded", 3 * time.Second, func(f *modelserver.Faults) { f.LieUnloaded = true }},
	{"lie still loaded", 3 * time.Second, func(f *modelserver.Faults) { f.LieStillLoaded = true }},
	{"never release", 3 * time.Second, func(f *modelserver.Faults) { f.NeverRelease = true }},
	{"hold more", 3 * time.Second, func(f *modelserver.Faults) { f.Extra = gpu.GiB }},
	{"leak", 3 * time.Second, func(f *modelserver.Faults) { f.LeakPerCycle = 300 * gpu.MiB }},
	{"die mid body", 2 * time.Second, func(f *modelserver.Faults) { f.DieMidBody = true }},
	{"abort mid body", time.Second, func(f *modelserver.Faults) { f.AbortMidBody = true }},
	{"die on request", 2 * time.Second, func(f *modelserver.Faults) { f.DieOnRequest = true }},
	{"hang work", 2 * time.Second, func(f *modelserver.Faults) {
		f.HangPaths = []string{"/proof", "/proof/stream", "/prompt", "/api/generate"}
	}},
	{"fail work", time.Second, func(f *modelserver.Faults) { f.FailPaths = map[string]int{"/proof": 500, "/prompt": 500} }},
}

func (k *soak) fault(ctx context.Context, dice *rand.Rand) {
	name := soakInside[dice.IntN(len(soakInside))]
	fault := soakFaults[dice.IntN(len(soakFaults))]
	srv := k.servers[name]
	k.lasting(ctx, name, someTime(dice, fault.most/4, fault.most), func() func() {
		end := k.spells.begin(spellServer, name, fault.name)
		k.rec.count("chaos", "fault")
		k.rec.count("fault", fault.name)
		srv.SetFaults(fault.set)
		return func() {
			srv.SetFaults(func(f *modelserver.Faults) { *f = modelserver.Faults{} })
			if fault.name == "leak" || !srv.Stats().Alive {
				k.revive(srv)
			}
			end()
		}
	})
}

func (k *soak) outsiderComes(ctx context.Context, dice *rand.Rand) {
	amount := gpu.Bytes(1+dice.IntN(12)) * gpu.GiB
	k.lasting(ctx, "outsider", someTime(dice, 300*time.Millisecond, 3*time.Second), func() func() {
		end := k.spells.begin(spellMemory, "", "outsider of "+amount.String())
		k.rec.count("chaos", "outsider")
		h, err := simulated.NewOutsider(k.sim, "game")
		if err == nil {
			err = h.Set(0, amount)
		}
		if err != nil {
			k.rec.violation("the soak itself: %v", err)
		}
		return func() {
			_ = h.Close()
			end()
		}
	})
}

func (k *soak) gpuState(ctx context.Context, dice *rand.Rand, kind, line string) {
	k.lasting(ctx, "gpu", someTime(dice, 300*time.Millisecond, 2500*time.Millisecond), func() func() {
		end := k.spells.begin(kind, "", line)
		k.rec.count("chaos", kind)
		k.mustWrite(simulated.WriteState(k.sim, line))
		return func() {
			k.mustWrite(simulated.WriteState(k.sim))
			end()
		}
	})
}

func (k *soak) mustWrite(err error) {
	if err != nil {
		k.rec.violation("the soak itself: %v", err)
	}
}

// byHand loads or unloads by the admin API. What it answers depends on the storm; it must be one of its answers.
func (k *soak) byHand(dice *rand.Rand, act string) {
	name := soakNames[dice.IntN(len(soakNames))]
	status, body := k.adminPost(fmt.Sprintf("/gpu_broker/consumers/%s/%s?wait=%dms", name, act, dice.IntN(1500)))
	k.rec.count("chaos", act+" by hand")
	k.rec.count("by hand", fmt.Sprintf("%s %d", act, status))
	switch status {
	case 200, 202, 404, 409, 500, 503, 504:
	default:
		k.rec.violation("%s of %s by hand: %d %s", act, name, status, body)
	}
}

func (k *soak) drain(ctx context.Context, dice *rand.Rand, name string) {
	path, most := "/gpu_broker/", time.Second
	if name != "" {
		path, most = "/gpu_broker/consumers/"+name+"/", 2*time.Second
	}
	k.lasting(ctx, "drain", someTime(dice, 200*time.Millisecond, most), func() func() {
		end := k.spells.begin(spellDrain, name, "drain")
		k.rec.count("chaos", "drain")
		there := k.adminAct(path + "drain?wait=1ms")
		return func() {
			if there && !k.adminAct(path+"resume") && name != "guest" { // which may have gone meanwhile
				k.rec.violation("%s could not be resumed", path)
			}
			end()
		}
	})
}

func (k *soak) adminAct(path string) bool {
	status, body := k.adminPost(path)
	if status != 200 && status != 202 && !(status == 404 && strings.Contains(path, "/guest/")) {
		k.rec.violation("%s: %d %s", path, status, body)
	}
	return status == 200 || status == 202
}

func (k *soak) adminPost(path string) (int, string) {
	k.adminTurn.RLock()
	defer k.adminTurn.RUnlock()
	return k.admin0("POST", path, "", nil)
}

// lend lends the GPU for a second, or for as long as it is wanted.
func (k *soak) lend(ctx context.Context, dice *rand.Rand) {
	early := dice.IntN(2) == 0
	k.lasting(ctx, "lend", someTime(dice, 600*time.Millisecond, 900*time.Millisecond), func() func() {
		sent := time.Now()
		k.rec.count("chaos", "lend")
		if status, body := k.adminPost("/gpu_broker/lend?for=1s"); status != 200 {
			k.rec.violation("lend: %d %s", status, body)
		}
		end := k.spells.begin(spellLent, "", "for 1s")
		over := time.AfterFunc(time.Until(sent.Add(950*time.Millisecond)), end)
		return func() {
			if over.Stop() {
				end()
			}
			if early {
				k.returned()
			}
		}
	})
}

// returned ends a lend.
func (k *soak) returned() {
	if status, body := k.adminPost("/gpu_broker/lend?for=0"); status != 200 {
		k.rec.violation("lend for 0: %d %s", status, body)
	}
}

// pinByHand pins a consumer for a while that no configuration pins.
func (k *soak) pinByHand(ctx context.Context, dice *rand.Rand) {
	name := []string{"voice", "embed"}[dice.IntN(2)]
	k.lasting(ctx, "pin", someTime(dice, 500*time.Millisecond, 2*time.Second), func() func() {
		end := k.spells.begin(spellPin, name, "pinned by hand")
		k.rec.count("chaos", "pin")
		k.adminAct("/gpu_broker/consumers/" + name + "/pin")
		loosen := k.spells.begin(spellPinned, name, "")
		return func() {
			loosen()
			k.adminAct("/gpu_broker/consumers/" + name + "/unpin")
			end()
		}
	})
}

// guard keeps requests from the cloud for a while.
func (k *soak) guard(ctx context.Context, dice *rand.Rand) {
	k.lasting(ctx, "guard", someTime(dice, 500*time.Millisecond, 3*time.Second), func() func() {
		k.rec.count("chaos", "guard")
		k.allowCloud(false)
		end := k.spells.begin(spellGuard, "", "no cloud")
		return func() {
			end()
			k.allowCloud(true)
		}
	})
}

func (k *soak) allowCloud(yes bool) {
	k.adminTurn.RLock()
	defer k.adminTurn.RUnlock()
	status, body := k.admin0("PUT", "/gpu_broker/config", "application/json", strings.NewReader(fmt.Sprintf(`{"allowCloudFallback": %t}`, yes)))
	if status != 200 || !strings.Contains(body, fmt.Sprintf(`"allowCloudFallback":%t`, yes)) {
		k.rec.violation("PUT config %t: %d %s", yes, status, body)
	}
}

// explain asks what would happen, which must have no effect that anybody could see.
func (k *soak) explain(_ context.Context, dice *rand.Rand) {
	name := soakServers[dice.IntN(len(soakServers))]
	if name == "library" { // what would happen depends on the model
		name = broker.SlotName(name, []string{"small", "large"}[dice.IntN(2)])
	}
	k.adminTurn.RLock()
	defer k.adminTurn.RUnlock()
	status, body := k.admin0("GET", fmt.Sprintf("/gpu_broker/explain?consumer=%s&priority=%d", name, dice.IntN(200)), "", nil)
	if status != 200 && !(status == 404 && name == "guest") || status == 200 && !strings.Contains(body, `"reason"`) {
		k.rec.violation("explain %s: %d %s", name, status, body)
	}
	k.rec.count("chaos", "explain")
}

// lookByAdmin scrapes.
func (k *soak) lookByAdmin(_ context.Context, dice *rand.Rand) {
	k.adminTurn.RLock()
	defer k.adminTurn.RUnlock()
	path := []string{"/metrics", "/gpu_broker/status", "/gpu_broker/decisions"}[dice.IntN(3)]
	if status, body := k.admin0("GET", path, "", nil); status != 200 {
		k.rec.violation("%s: %d %.200s", path, status, body)
	}
	k.rec.count("looks", "by the admin API")
}

func (k *soak) goodReload(_ context.Context, dice *rand.Rand) {
	k.changed(func(next *settings) { change(next, dice) })
}

// change changes one of them, or none.
func change(next *settings, dice *rand.Rand) {
	switch dice.IntN(15) {
	case 0:
		next.concurrency = 6 - next.concurrency
	case 1:
		next.vram = []float64{7, 7.5, 8}[dice.IntN(3)]
	case 2:
		next.idle = []string{"1s", "2s", "4s"}[dice.IntN(3)]
	case 3:
		next.pin = !next.pin
	case 4:
		next.guest = !next.guest
	case 5:
		next.cooldown = !next.cooldown
	case 6:
		next.heartbeat = !next.heartbeat
	case 7:
		next.ladder = !next.ladder
	case 8:
		next.alias = !next.alias
	case 9:
		next.reserved = !next.reserved
	case 10:
		next.log = 1 - next.log
	case 11:
		next.child++
	case 12:
		next.fork++
	}
}

// reloadTo gives Caddy a configuration that it must take.
func (k *soak) reloadTo(next settings) { k.changed(func(s *settings) { *s = next }) }

// changed gives Caddy the present configuration with a change.
func (k *soak) changed(change func(*settings)) {
	k.adminTurn.Lock()
	defer k.adminTurn.Unlock()
	next := k.settings()
	next.edit++
	change(&next)
	end := k.spells.begin(spellReload, "", "good reload")
	defer end()
	if !next.guest && k.gone == nil {
		k.gone = k.spells.begin(spellGone, "guest", "taken away")
	}
	k.rec.count("chaos", "good reload")
	ruling := k.rule(next)
	status, body := k.admin0("POST", "/load", "text/caddyfile", strings.NewReader(next.apply(k.base)))
	if status != 200 {
		k.rec.violation("a good configuration was refused: %d %s", status, body)
	}
	ruling()
	if next.guest && k.gone != nil {
		k.gone()
		k.gone = nil
	}
}

// badReload gives Caddy a configuration that it must refuse, with changes that must never show.
func (k *soak) badReload(_ context.Context, dice *rand.Rand) {
	next := k.settings()
	next.vram = []float64{7, 7.5, 8, 7}[indexOf(next.vram)+1]
	next.pin = !next.pin
	how := spoilings[dice.IntN(len(spoilings))]
	if how == "bad consumer" {
		next.guest = true
	}
	k.adminTurn.Lock()
	defer k.adminTurn.Unlock()
	defer k.spells.begin(spellReload, "", "bad reload: "+how)()
	k.rec.count("chaos", "bad reload")
	k.rec.count("bad reload", how)
	status, body := k.admin0("POST", "/load", "text/caddyfile", strings.NewReader(spoil(next.apply(k.base), how, k.taken.Addr().String())))
	if status == 200 || status == 0 {
		k.rec.violation("a bad configuration (%s): %d %s", how, status, body)
	}
}

func indexOf(vram float64) int { return int((vram - 7) * 2) }
