// Package config holds the JSON configuration of the broker: its types, whose
// comments are the user manual, their defaults and their validation.
package config

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Broker is the configuration of the app: what the GPUs are, which model
// servers share them, and the rules of service.
type Broker struct {
	// Where GPU facts come from: a module of the namespace `gpu_broker.samplers`,
	// chosen by `driver`: `auto`, `nvml`, `nvidia_smi`, `amdgpu`, `static` or `simulated`.
	// Default: `auto`, the first of nvml, nvidia_smi and amdgpu that works.
	GPURaw json.RawMessage `json:"gpu,omitempty" caddy:"namespace=gpu_broker.samplers inline_key=driver"`

	// What the scheduler does: `evicting` (queue, lock, loads and evictions),
	// `locked` (queue and lock only) or `passthrough` (nothing; requests are
	// passed on at once). Default: `evicting`.
	Scheduler string `json:"scheduler,omitempty"`
	// What the lock guards: `exclusive` lets one server compute at a time on each GPU,
	// `global` one on all GPUs together. Default: `exclusive`.
	Lock string `json:"lock,omitempty"`
	// Memory that a load must find free beyond its claim. Default: 256MiB, and
	// 4GiB on a GPU that shares its memory with the CPU.
	Cushion *gpu.Bytes `json:"cushion,omitempty"`
	// Memory on each GPU that is kept free for others' growth; 1GiB is wise on a desktop. Default: 0.
	Reserve gpu.Bytes `json:"reserve,omitempty"`

	// Whether what nobody uses is unloaded: `on`, `off`, or `observe`, which says what would be unloaded and
	// does nothing. Default: `on`.
	IdleUnload string `json:"idle_unload,omitempty"`
	// After how long without use; 0 stands for never. A consumer's own wins. Default: 15m.
	IdleTimeout *caddy.Duration `json:"idle_timeout,omitempty"`
	// Whether models are unloaded for others: `on`, or `observe`, which says what would be unloaded and does
	// nothing: what does not fit beside the others is refused. Default: `on`.
	Eviction string `json:"eviction,omitempty"`

	// How many requests may wait in all; one more gets 503 queue_full. Default: 512.
	MaxQueue int `json:"max_queue,omitempty"`
	// How long a request may wait for its turn and its model, before it gets 504
	// budget_exceeded. A consumer's or route's own wins. Default: 10m.
	Budget caddy.Duration `json:"budget,omitempty"`
	// How long a request may run, once it is admitted; then it gets 504 budget_exceeded, or, where its answer has
	// begun, its connection is cut. 0 stands for no bound. A consumer's or route's own wins. Default: 0.
	MaxRun caddy.Duration `json:"max_run,omitempty"`
	// The largest request body that is read ahead; above it 413. Default: 256MiB.
	MaxBody gpu.Bytes `json:"max_body,omitempty"`
	// How much of request bodies above 64 KiB may be held ahead in all; above it 503. One client may hold as
	// much as it leaves to others, so half at most. Default: 2GiB.
	MaxBuffered gpu.Bytes `json:"max_buffered,omitempty"`
	// How long an upload may make no progress; then it gets 408 upload_stalled. 0 stands for no bound. Default: 30s.
	UploadIdle *caddy.Duration `json:"upload_idle,omitempty"`
	// How long a client may take nothing of its answer while other requests wait for the same GPU; then the answer is cut.
	// A server that is silent while its client reads is never cut. 0 stands for no bound. Default: 30s.
	StallTimeout *caddy.Duration `json:"stall_timeout,omitempty"`
	// How long a WebSocket or another tunnel may carry no byte either way while other requests wait for the same GPU; then it
	// is cut, unless its server has a busy route that says that it works. 0 stands for no bound. Default: 5m.
	TunnelIdle *caddy.Duration `json:"tunnel_idle,omitempty"`
	// Whether responses carry `Server-Timing` and `X-GPU-Broker-Consumer`: `on` or `off`. Default: `on`.
	Headers string `json:"headers,omitempty"`

	// Pages of which origins may send requests to servers that do not run, such as `https://app.example`, or `*` for all: the broker answers their
	// preflight requests where no running server is known. Default: the site's own host, localhost, and those that the server last allowed.
	CORSOrigins []string `json:"cors_origins,omitempty"`

	// How often a server is asked for its health and residency. Default: 5s.
	ProbeInterval caddy.Duration `json:"probe_interval,omitempty"`
	// How long one probe may take. Default: 2s.
	ProbeTimeout caddy.Duration `json:"probe_timeout,omitempty"`
	// How long a load may take, until the server says that it is ready. Default: 5m.
	LoadTimeout caddy.Duration `json:"load_timeout,omitempty"`
	// How long an unload may take, until the server says that it is done. Default: 30s.
	UnloadTimeout caddy.Duration `json:"unload_timeout,omitempty"`
	// How long to wait for memory to come back after an unload. Default: 10s.
	EvictWait caddy.Duration `json:"evict_wait,omitempty"`
	// How long a server that is to be unloaded may take to finish its running work; with a longer max_run, that long. Default: 10m.
	DrainTimeout caddy.Duration `json:"drain_timeout,omitempty"`
	// How long running requests may go on when Caddy stops; then their connections are closed. Default: 30s.
	StopGrace *caddy.Duration `json:"stop_grace,omitempty"`
	// How long a load that nobody waits for any more keeps its memory from others. Default: 10s.
	AbandonAfter caddy.Duration `json:"abandon_after,omitempty"`
	// How long to wait for memory that is not ours to take, before 503 vram_exhausted. Default: 10s.
	OutsiderWait caddy.Duration `json:"outsider_wait,omitempty"`
	// How many unloads beyond the plan are tried where memory does not come back. Default: 5.
	MaxEvictions int `json:"max_evictions,omitempty"`

	// How far requests for loaded models may overtake one for a model that is not, in multiples of the
	// time that a switch takes; 0 stands for the least time. Default: 15.
	Overtake *float64 `json:"overtake,omitempty"`
	// The least and the most of that in time. Defaults: 30s, 10m; never above half the budget. Where only
	// one is given, the other's default gives way to it.
	OvertakeMin *caddy.Duration `json:"overtake_min,omitempty"`
	OvertakeMax *caddy.Duration `json:"overtake_max,omitempty"`
	// How long an idle model is kept against another, in multiples of the time that a switch takes. Default: 0.25.
	Hold *float64 `json:"hold,omitempty"`
	// By how much a later request of the model that computes may go before an earlier one of another
	// loaded model. Default: 20s.
	LockOvertake *caddy.Duration `json:"lock_overtake,omitempty"`
	// For how long the wait of a client that gave up still counts for its model, so that clients that give up early
	// do not starve it; 0 stands for not at all. Default: twice as long as loaded models may overtake it, at least 60s.
	Credit *caddy.Duration `json:"credit,omitempty"`
	// The least time between two starts of one client at one consumer; its next request waits. Default: 0.
	ClientCooldown caddy.Duration `json:"client_cooldown,omitempty"`
	// Places of the queue that are kept for urgent requests. Default: none.
	ReservedInteractive *Reserved `json:"reserved_interactive,omitempty"`
	// Whose models may be unloaded for a request: `any`, or `lower`, only those that were last used at a lower
	// priority than the request's. Default: `any`.
	VictimPriority string `json:"victim_priority,omitempty"`
	// After how long without use consumers of a category are unloaded, by category; 0 stands for never. A
	// consumer's own idle_timeout wins; other categories have the broker's. Defaults: diffusion 900s, llm 300s, vision 60s.
	StayWarm map[string]caddy.Duration `json:"stay_warm,omitempty"`
	// What is loaded again, after it has made way for others, once its card has had nothing to do for a while.
	Restore []Restore `json:"restore,omitempty"`

	// A file to which each request that needed the GPU is added as a line of CSV, which the simulator can replay. Default: none.
	RequestLog string `json:"request_log,omitempty"`

	// The model servers, in the order in which unexplained memory is given to them.
	Consumers []*Consumer `json:"consumers,omitempty"`

	// Where its settings stand, `file:line`, each by its name here: the Caddyfile's adapter writes it, so that errors
	// can name the place. It has no effect.
	Sources map[string]string `json:"sources,omitempty"`

	warnings []Warning // of Resolve
}

// Consumer is a model server that may hold GPU memory.
type Consumer struct {
	// The name by which routes, metrics and the admin API speak of it: letters, digits, `-`, `_` and `.`,
	// at most 64 of them.
	Name string `json:"name"`
	// Other names by which requests may ask for it, such as `qwen2.5:7b`.
	Alias []string `json:"alias,omitempty"`
	// Whether its names, and those of its models, stay out of lists of models. It serves those who ask for it all the same. Default: false.
	Unlisted bool `json:"unlisted,omitempty"`
	// The model's name that its server gets, in place of the one that the client sent: for a server that knows one name only. `client`: always the
	// client's. Default: the client's, and where it serves as another consumer's fallback on a route with model_from, its first alias. For consumers without models.
	SendAs string `json:"send_as,omitempty"`
	// What is known of a kind of server, such as `ollama` or `comfyui`: `caddy gpu-broker presets` lists them all. With a
	// slash or a dot in it, it is the path of a file of your own, in the same form. Everything in a preset can be overridden here:
	// objects are merged, lists and single values replace the preset's, and a route of the lifecycle with another
	// path replaces the preset's route whole.
	Preset string `json:"preset,omitempty"`
	// Whether it is served: `on` or `off`. `off` keeps it in status and refuses its requests. Default: `on`.
	Enabled string `json:"enabled,omitempty"`
	// Its address, `host:port`: for probes, loads and unloads, and behind the
	// placeholder `{http.gpu_broker.upstream}`.
	Upstream string `json:"upstream,omitempty"`
	// How much GPU memory it takes when loaded; of a consumer with models, what one takes that is not named here, which without it gets 404.
	// Required, unless it has models, or the scheduler is `locked` or `passthrough`.
	VRAM gpu.Bytes `json:"vram,omitempty"`
	// Its models, each of which is loaded and unloaded by itself, for a server that can do so by a model's name (ollama,
	// llama.cpp's router, LM Studio …). The request says which it wants, see model_from. Models that the server holds
	// and that are not named here are taken in with the size that it states. Default: none; then the server is loaded and unloaded as a whole.
	Models []*Model `json:"models,omitempty"`
	// Whether what the server lists is served without being named: a model gets its place at its first request, or when it is seen loaded. It is taken to
	// need what was measured, else what the server states, else the consumer's vram. Needs a lifecycle with a catalog, which presets of such servers have.
	AutoModels bool `json:"auto_models,omitempty"`
	// Where its requests name the model: `body`, `query NAME`, `header NAME`, `path`, as the route's setting of the same name. Default: `body`.
	ModelFrom []ModelFrom `json:"model_from,omitempty"`
	// The server takes the fields of a JSON body in any case, as encoding/json does for servers that are written in Go: `MODEL`
	// names the model, too. Requests that name it in another case, and not alike, get 400, since the broker and the server could
	// read different models. Default: false.
	FoldKeys bool `json:"fold_keys,omitempty"`
	// Another consumer in the same process, such as the speech recognition beside this speech synthesis. Both are loaded and
	// unloaded together, and what is measured is split between them by their vram. How it is probed, loaded and unloaded is told at the other.
	Shares string `json:"shares,omitempty"`
	// The index of the GPU that it runs on. Default: 0.
	GPU int `json:"gpu,omitempty"`
	// How many of its requests run at once. Default: 1.
	Concurrency int `json:"concurrency,omitempty"`
	// How many of these are kept for requests that the broker's reserved_interactive counts as urgent. Default: 0.
	ReservedInteractive int `json:"reserved_interactive,omitempty"`
	// The priority of its requests, where their route names none: 0 to 1000000, lower is more urgent. Default: 100.
	Priority *int `json:"priority,omitempty"`
	// `none` for a server that needs its memory but may compute beside any other, such as a small embedder.
	Lock string `json:"lock,omitempty"`
	// Consumers that are never unloaded for this one.
	CanCoexistWith []string `json:"can_coexist_with,omitempty"`
	// Consumers that are never loaded together with this one, though they would fit. It holds both ways.
	ConflictsWith []string `json:"conflicts_with,omitempty"`
	// Consumers that may serve its requests instead, while it can't be used without unloading another: the first that is loaded does.
	Fallback []string `json:"fallback,omitempty"`
	// The model's name that a fallback gets with this consumer's requests, by the fallback's name. Default: the fallback's send_as, else, on a route with model_from, its first alias.
	FallbackAs map[string]string `json:"fallback_as,omitempty"`
	// Its requests never go to a fallback.
	PinPrimary bool `json:"pin_primary,omitempty"`
	// It runs elsewhere and needs nothing of this host: no memory, no lock, no waiting, no loads.
	Cloud bool `json:"cloud,omitempty"`
	// Never unloaded for others, and never when idle.
	Pin bool `json:"pin,omitempty"`
	// Never unloaded for others.
	NoEvict bool `json:"no_evict,omitempty"`
	// The server frees memory by its own rules; it is never unloaded by the broker, but room is made for it.
	VRAMManaged bool `json:"vram_managed,omitempty"`
	// How long after its last request it is not unloaded for others. Default: 0.
	KeepAlive caddy.Duration `json:"keep_alive,omitempty"`
	// What kind of work it does: `llm`, `diffusion`, `vision`, or a word of your own that stay_warm names. Default: none.
	Category string `json:"category,omitempty"`
	// After how long without use it is unloaded; 0 stands for never. A server with `vram_managed` is unloaded only
	// if it has one of its own. Default: that of its category, else the broker's.
	IdleTimeout *caddy.Duration `json:"idle_timeout,omitempty"`
	// What to take for the time that a switch to it costs, until it is measured. Default: 20s.
	SwitchCost caddy.Duration `json:"switch_cost,omitempty"`
	// GPU memory that its process keeps after an unload and uses again, such as a CUDA context. Default: 0.
	Residual gpu.Bytes `json:"residual,omitempty"`
	// Its answer comes before its work is done: the GPU is held until its busy route says that it is idle.
	Async bool `json:"async,omitempty"`
	// The requests of which that is so, in the form of gpu_routes; the work of others is done with their answer. Default: all that need the GPU.
	AsyncRoutes []string `json:"async_routes,omitempty"`
	// Whether its server stops working on a request when the client leaves: `on` or `off`. Where a busy route tells, that is asked
	// instead. With `off` and no busy route the GPU is held for `drain_timeout` after a client has left. Default: `on`.
	StopsWhenLeft string `json:"stops_when_left,omitempty"`
	// Requests that need no GPU, in the same form, but that start a server which the broker has stopped, such as its page. Others get 503 not_running then.
	StartOn []string `json:"start_on,omitempty"`
	// Names of processes whose GPU memory is its, as the driver shows them; with them its use is measured.
	Processes []string `json:"processes,omitempty"`

	// Requests that need the GPU, each as `METHOD /path` or `/path`, where `*` at the end of the path stands for
	// anything. HEAD counts as GET. What no list names is decided by unlisted_requests. Default: all but OPTIONS and HEAD.
	GPURoutes []string `json:"gpu_routes,omitempty"`
	// Requests that need no GPU, in the same form. They win over gpu_routes.
	Bypass []string `json:"bypass,omitempty"`
	// Requests that need no GPU unless gpu_routes names them, in the same form: a preset's own list, such as an upload of a model's files.
	FreeRoutes []string `json:"free_routes,omitempty"`
	// Requests that need no GPU and whose JSON body names a model, in the same form: a preset's own list, such as `POST /api/show`. There, too, the
	// server gets the name that it knows in place of an alias. Bodies of at most 64 KiB are read for that, larger ones pass as they come.
	NamedRoutes []string `json:"named_routes,omitempty"`
	// What requests need that no list names: `gpu`, all but GET, HEAD and OPTIONS need the GPU, and so does each WebSocket,
	// or `free`, they are passed on at once, but those that `gpu` would hold back only while the server is loaded. Default: `free` if gpu_routes names any, else all need it.
	UnlistedRequests string `json:"unlisted_requests,omitempty"`
	// How its server matches paths, beyond comparing them as they are, so that no spelling of a path gets past a list:
	// `suffix` (by their end), `caseless`, `trim_slash` (slashes at the end do not count), `merge_slashes` (several are one), `query` (it counts as the path's end). Default: as they are.
	PathMatch []string `json:"path_match,omitempty"`
	// Requests that need no GPU but count as use, in the same form.
	Touch []string `json:"touch,omitempty"`

	// Requests that clients must not send, in the same form: they are refused with 403, such as those that make the
	// server unload its model, or run code of the sender's.
	Blocked []string `json:"blocked,omitempty"`
	// Requests that give a model's memory back, such as ComfyUI's `POST /free`, or ollama's with `keep_alive` 0 and no prompt. They
	// load nothing and unload nothing else: a loaded model is unloaded once its running work has ended, a pinned one gets 403. Default: the preset's.
	UnloadRequests []UnloadRequest `json:"unload_requests,omitempty"`
	// Fields at the top of JSON bodies that get this value in requests that compute with a pinned model, where the client sent one: such as ollama's
	// `keep_alive`, with which a client would have the model unloaded behind its work. Default: the preset's.
	PinnedSet map[string]json.RawMessage `json:"pinned_set,omitempty"`

	// As the broker's settings of the same name.
	Budget caddy.Duration `json:"budget,omitempty"`
	// As the broker's setting of the same name. 0 stands for no bound. Default: the broker's.
	MaxRun        *caddy.Duration `json:"max_run,omitempty"`
	LoadTimeout   caddy.Duration  `json:"load_timeout,omitempty"`
	UnloadTimeout caddy.Duration  `json:"unload_timeout,omitempty"`

	// How it is probed, loaded and unloaded: a module of the namespace `gpu_broker.lifecycles`, chosen by `protocol`. Default: `http`.
	LifecycleRaw json.RawMessage `json:"lifecycle,omitempty" caddy:"namespace=gpu_broker.lifecycles inline_key=protocol"`

	// Where it is defined, `file:line`: the Caddyfile's adapter writes it, so that errors can name the place. It has no effect.
	Source string `json:"source,omitempty"`

	// Fields given with a zero value, which "omitempty" would lose: they override a preset's. See Explicit.
	explicit map[string]bool
	// Whether IdleTimeout is its category's or the broker's.
	sharedIdle bool
	// The other consumers with models that stand for the same server, and whether one of them, not this one, has the models that none names.
	// See LeavesToDouble.
	doubles   []*Consumer
	onlyNamed bool
}

// Model is a model of a consumer that is loaded and unloaded by itself.
type Model struct {
	// The name by which the server knows it, `llama3.2:3b` for example.
	Name string `json:"name"`
	// Other names by which requests may ask for it. The server gets the model's own name instead.
	Alias []string `json:"alias,omitempty"`
	// Whether its names stay out of lists of models. It serves those who ask for it all the same. Default: false; it is so, too, where the
	// whole consumer is unlisted.
	Unlisted bool `json:"unlisted,omitempty"`
	// The name that the server gets in place of the one that the client sent. `client`: the client's own. Default: the model's name.
	SendAs string `json:"send_as,omitempty"`
	// Fields at the top of JSON bodies that get this value, whatever the client sent. Every other byte of the body stays. Default: none.
	Set map[string]json.RawMessage `json:"set,omitempty"`
	// Fields at the top of JSON bodies that get this value if the client sent none, or null. Default: none.
	Default map[string]json.RawMessage `json:"default,omitempty"`
	// Fields that are taken out of the top of JSON bodies. Default: none.
	Strip []string `json:"strip,omitempty"`
	// How much GPU memory it takes. Default: the consumer's.
	VRAM gpu.Bytes `json:"vram,omitempty"`
	// Never unloaded for others, and never when idle. Default: the consumer's.
	Pin bool `json:"pin,omitempty"`
	// As the consumer's setting of the same name, whose value is the default.
	KeepAlive caddy.Duration `json:"keep_alive,omitempty"`
	// As the consumer's setting of the same name, whose value is the default.
	IdleTimeout *caddy.Duration `json:"idle_timeout,omitempty"`
	// How many of its requests run at once. Default: the consumer's.
	Concurrency int `json:"concurrency,omitempty"`

	// Where it is defined, `file:line`: the Caddyfile's adapter writes it. It has no effect.
	Source string `json:"source,omitempty"`
}

// Reserved are places of the queue that are kept for urgent requests.
type Reserved struct {
	// How many of max_queue; fewer than that.
	Places int `json:"places"`
	// Requests of a priority lower than this number are the urgent ones.
	Below int `json:"below"`
}

// Restore is a consumer that is loaded again, after it has made way for others, once its card has had nothing to do
// for a while.
type Restore struct {
	// The consumer's name.
	Consumer string `json:"consumer"`
	// For how long nothing must have run or waited on its GPU.
	After caddy.Duration `json:"after"`

	// Where it stands, `file:line`: the Caddyfile's adapter writes it. It has no effect.
	Source string `json:"source,omitempty"`
}
