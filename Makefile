# What each target is for: `make help`. Programs go to bin/, results of tests to .cache/.

SHELL       := bash
.SHELLFLAGS := -o pipefail -c

GO     ?= go
MODULE := github.com/gpu-broker/caddy-gpu-broker
TAGS_XCADDY := nobadger,nomysql,nopgx

# go-nvml's C declarations are deprecated by themselves: thirty warnings a build.
export CGO_CFLAGS := -O2 -g -Wno-deprecated-declarations
# Caddy is built once for all end-to-end tests.
export GPU_BROKER_CADDY := $(CURDIR)/bin/caddy

RESULTS := .cache/tests
TEST     = mkdir -p $(RESULTS) && bin/gotestsum --format pkgname --hide-summary skipped --jsonfile $(RESULTS)/$@.json --

UNIT = $$($(GO) list ./... | grep -v /test/) ./test/readme/... ./test/gpu/...

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: run
run: build ## the four-consumer example with pretending servers, over HTTPS on localhost
	@exec bin/demo

.PHONY: build
build: ## Caddy with the module, the pretending servers and the demo, into bin/
	$(GO) build -o bin/ ./cmd/...

.PHONY: test
test: ## everything, installing what the tests need
	@scripts/test.sh tools vet lint examples unit cgo0 xcaddy e2e bench race real soak+mutants

# Half of its time would be links: without C and debug information they are quick, and one more at a time fills the waits.
.PHONY: test-fast
test-fast: export CGO_ENABLED := 0
test-fast: vet ## vet and the unit tests, without end to end and C
	$(GO) test -short -vet=off -ldflags='-s -w' -p $$(($$(getconf _NPROCESSORS_ONLN) + 1)) -skip '^(TestAlone|TestSoak)' $(UNIT)

.PHONY: vet
vet: ## go vet
	$(GO) vet ./...
	$(GO) vet -tags real ./test/ollama/... ./test/real/... ./test/e2e/... ./test/systemd/... ./test/docker/...

.PHONY: lint
lint: bin/golangci-lint ## golangci-lint: staticcheck, errcheck, revive, gocritic
	bin/golangci-lint run ./...

.PHONY: examples
examples: build ## the examples are well formatted, adapt and validate
	scripts/examples.sh bin/caddy

.PHONY: unit
unit: bin/gotestsum ## tests of the packages
	$(TEST) -skip '^(TestAlone|TestSoak)' $(UNIT)

.PHONY: e2e
e2e: build bin/gotestsum ## end to end through a real Caddy, the demo's own lines, and the clients that people use
	test/clients/setup.sh >/dev/null
	$(TEST) -count=1 -parallel 8 -skip '^(TestAlone|TestSoak)' ./test/e2e/... ./test/demo/... ./test/clients/... ./test/presets/... ./test/doctor/... ./test/examples/...

# Bounds on time run by themselves, one after the other; what they measured is shown.
.PHONY: bench
bench: build bin/gotestsum ## every bound on time, with the figures, and all benchmarks
	$(TEST) -count=1 -p 1 -parallel 1 -run '^TestAlone' . ./broker/... ./scheduler/... ./simulate/... ./lifecycle/process/... ./test/e2e/...
	@grep -hoE '"Output":" +[a-z]+_test.go:[^"]*' $(RESULTS)/$@.json | cut -d'"' -f4 | sed 's/\\n$$//; s/\\t/ /g'
	$(GO) test -run '^$$' -bench . -benchmem -benchtime 0.3s $$(grep -rl --include='*_test.go' '^func Benchmark' . | xargs dirname | sort -u) | grep -E '^(Benchmark|FAIL|panic)'

# With the race detector: make soak GPU_BROKER_RACE=1 GPU_BROKER_CADDY=$PWD/bin/caddy-race, once make race has built it.
SOAK ?= 3m
.PHONY: soak
soak: export SOAK := $(SOAK)
soak: build bin/gotestsum ## a storm over one site: clients, reloads, dying servers; SOAK=30m, SOAK_SEED=1
	mkdir -p $(RESULTS)
	bin/gotestsum --format standard-verbose --jsonfile $(RESULTS)/$@.json -- -count=1 -timeout 0 -run '^TestSoak$$' ./test/e2e

.PHONY: stalls
stalls: export GPU_BROKER_CADDY := $(CURDIR)/bin/caddy
stalls: build ## end-to-end tests on a machine that stands still now and then; STALL=1.2 RUN=2 seconds
	scripts/stalls.sh

.PHONY: routes
routes: export GPU_BROKER_CADDY := $(CURDIR)/bin/caddy
routes: build ## random requests at every preset, ROUTES=10m, ROUTES_SEED=1, and at its lists without a site
	$(GO) test ./test/presets -count=1 -v -timeout 0 -run '^TestE2_' -routes.time $(or $(ROUTES),10m) -routes.seed $(or $(ROUTES_SEED),1)
	$(GO) test ./lifecycle/presets -run '^$$' -fuzz FuzzNothingComputesUnseen -fuzztime $(or $(ROUTES),10m)

.PHONY: race
race: export GPU_BROKER_RACE := 1
race: export GPU_BROKER_CADDY := $(CURDIR)/bin/caddy-race
race: export GORACE := atexit_sleep_ms=0# by default each program waits for a second at its end
# Without TestValidate…: dozens of commands that end before two goroutines of ours meet.
race: bin/gotestsum ## tests under the race detector, end to end too
	$(GO) build -race -o bin/caddy-race ./cmd/caddy
	$(TEST) -race -short -parallel 6 -skip '^(TestAlone|TestSoak|TestValidate)' $(UNIT) ./test/e2e/...

# With xcaddy's flags, so that its build finds most of the work done.
.PHONY: cgo0
cgo0: export CGO_ENABLED := 0
cgo0: bin/gotestsum ## tests of what differs without cgo
	$(TEST) -trimpath -tags $(TAGS_XCADDY) -skip '^(TestAlone|TestSoak)' . ./gpu/... ./nvml/... ./config/...

.PHONY: xcaddy
xcaddy: bin/xcaddy ## a build by xcaddy; with cgo: make xcaddy CGO_ENABLED=1
	CGO_ENABLED=$(or $(CGO_ENABLED),0) bin/xcaddy build "$$($(GO) list -m -f '{{.Version}}' github.com/caddyserver/caddy/v2)" \
		--output bin/caddy-xcaddy --with $(MODULE)@v0.0.0=.
	bin/caddy-xcaddy list-modules --packages | grep gpu_broker
	scripts/examples.sh bin/caddy-xcaddy

.PHONY: real
real: build bin/gotestsum ## with real servers, which it builds once: ollama, llama.cpp, whisper.cpp, Docker's model runner
	test/ollama/build.sh >/dev/null
	test/ollama/setup.sh >/dev/null
	test/real/whispercpp/build.sh >/dev/null
	test/real/modelrunner/build.sh >/dev/null
	$(TEST) -count=1 -tags real ./test/ollama/... ./test/real/...
	bin/gotestsum --format testname --jsonfile $(RESULTS)/$@-e2e.json -- -count=1 -parallel 4 -tags real -run '^TestReal' ./test/e2e/...
	bin/gotestsum --format pkgname --hide-summary skipped --jsonfile $(RESULTS)/$@-systemd.json -- -count=1 -parallel 6 -tags real -exec '$(CURDIR)/test/inside.sh $(CURDIR)/test/systemd/inside.sh' ./test/systemd/...
	bin/gotestsum --format pkgname --hide-summary skipped --jsonfile $(RESULTS)/$@-docker.json -- -count=1 -parallel 6 -tags real -exec '$(CURDIR)/test/inside.sh $(CURDIR)/test/docker/inside.sh' ./test/docker/...

.PHONY: mutants
mutants: ## planted faults must each make a test fail
	$(GO) run ./internal/mutants

SEED ?= 1
N    ?= 150
.PHONY: mutants-random
mutants-random: ## faults at random, and which of them no test finds: SEED=7, N=30, ONLY=routing
	$(GO) run ./internal/mutants -random $(N) -seed $(SEED) -only "$(ONLY)"

.PHONY: tools
tools: ## sees to the programs and packages that the tests need
	scripts/tools.sh

# The tools have a module of their own, so that the product's go.mod stays the product's.
bin/golangci-lint bin/gotestsum bin/xcaddy: tools/go.mod tools/go.sum
	$(GO) -C tools build -o ../bin/ $$($(GO) -C tools list -f '{{.ImportPath}}' tool | grep '/$(@F)$$')

.PHONY: clean
clean: ## removes what was built here
	rm -rf bin .cache
