package modelserver

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
)

// driver is the simulated GPU's own lock: of the servers of one process, one
// at a time takes or frees memory, so that two loads can't both see the same
// free memory. Between processes see memory.take.
var driver sync.Mutex

// holders are the memories of this process's living servers, guarded by driver.
var holders = map[*memory]bool{}

// maxGPUs bounds Options.GPU.
const maxGPUs = 64

// memory is what one life holds on the simulated GPU. Its fields are guarded
// by driver, which may be held while Server.mu is taken, never the reverse.
type memory struct {
	l       *life
	index   int
	sampler gpu.Sampler
	holder  *simulated.Holder
	models  map[string]gpu.Bytes // held for each model
	gen     map[string]int       // raised whenever a model takes memory anew: a late release is then void
	leaked  gpu.Bytes
	context bool // a model was loaded once: Residue is held
	total   gpu.Bytes
	dropped bool
}

func newMemory(l *life) (*memory, error) {
	holder, err := simulated.NewHolder(l.s.dir, l.s.name)
	if err != nil {
		return nil, err
	}
	mem := &memory{
		l: l, index: l.s.options().GPU, holder: holder,
		models: map[string]gpu.Bytes{}, gen: map[string]int{},
	}
	if mem.sampler, err = openSampler(l.s.dir); err != nil {
		return nil, err
	}
	driver.Lock()
	defer driver.Unlock()
	holders[mem] = true
	return mem, nil
}

// take makes model hold size and returns what it got, less than size only if
// spilling is on. It fails with errOOM if the GPU would be overfull.
func (mem *memory) take(model string, size gpu.Bytes) (gpu.Bytes, error) {
	opts := mem.l.s.options()
	if opts.OnCPU {
		return 0, nil
	}
	driver.Lock()
	defer driver.Unlock()
	if mem.dropped {
		return 0, errDead
	}
	before, hadContext := mem.models[model], mem.context
	mem.context = true
	mem.models[model] = size
	if opts.Total > 0 {
		others, err := mem.others()
		if err != nil {
			return 0, errors.Join(err, mem.back(model, before, hadContext))
		}
		if over := others + mem.sum() - opts.Total; over > 0 && opts.Spill {
			over = min(over, size)
			size -= over // may be all of it: then it runs on the CPU
			mem.models[model] = size
		} else if over > 0 {
			return 0, errors.Join(outOfMemory(size, opts.Total, others+mem.sum()-size), mem.back(model, before, hadContext))
		}
	}
	if err := mem.write(); err != nil {
		return 0, errors.Join(err, mem.back(model, before, hadContext))
	}
	if opts.Total > 0 && !opts.Spill {
		// Another process may have taken memory since we looked. Both have
		// written before they look again, so at least one of them sees it.
		others, err := mem.others()
		if err == nil && others+mem.sum() > opts.Total {
			err = outOfMemory(size, opts.Total, others+mem.sum()-size)
		}
		if err != nil {
			return 0, errors.Join(err, mem.back(model, before, hadContext))
		}
	}
	mem.gen[model]++
	return size, nil
}

// back undoes what take began.
func (mem *memory) back(model string, before gpu.Bytes, hadContext bool) error {
	mem.models[model], mem.context = before, hadContext
	return mem.write()
}

// free gives back what model holds. With a generation other than the present
// one it does nothing: the model has taken memory anew meanwhile.
func (mem *memory) free(model string, gen int) {
	driver.Lock()
	defer driver.Unlock()
	if mem.dropped || mem.gen[model] != gen {
		return
	}
	delete(mem.models, model)
	mem.writeOrNote()
}

// renew frees everything, as the end of a worker process does that another takes the place of.
func (mem *memory) renew() {
	driver.Lock()
	defer driver.Unlock()
	clear(mem.models)
	mem.leaked, mem.context = 0, false
	mem.writeOrNote()
}

// leak makes b stay for the rest of the life.
func (mem *memory) leak(b gpu.Bytes) {
	if b <= 0 {
		return
	}
	driver.Lock()
	defer driver.Unlock()
	mem.leaked += b
	mem.writeOrNote()
}

func (mem *memory) generation(model string) int {
	driver.Lock()
	defer driver.Unlock()
	return mem.gen[model]
}

// refresh writes what is held after a fault has changed.
func (mem *memory) refresh() {
	driver.Lock()
	defer driver.Unlock()
	mem.writeOrNote()
}

// drop frees everything, as the end of a process does.
func (mem *memory) drop() {
	driver.Lock()
	defer driver.Unlock()
	if mem.dropped {
		return
	}
	mem.dropped = true
	delete(holders, mem)
	if err := mem.holder.Close(); err != nil {
		mem.l.note(Event{Kind: EventMemory, Detail: "could not be freed: " + err.Error()})
	}
	mem.total = 0
	mem.l.held(0)
}

// pool is what this process holds beyond its context: torch's pool, say.
func (mem *memory) pool() gpu.Bytes {
	residue := mem.l.s.options().Residue
	driver.Lock()
	defer driver.Unlock()
	return max(0, mem.total-residue)
}

// gpuFree is the free memory of a GPU of the given total.
func (mem *memory) gpuFree(total gpu.Bytes) (gpu.Bytes, error) {
	driver.Lock()
	defer driver.Unlock()
	others, err := mem.others()
	return max(0, total-others-mem.total), err
}

func (mem *memory) sum() gpu.Bytes {
	opts, faults := mem.l.s.options(), mem.l.faults()
	var models gpu.Bytes
	for _, b := range mem.models {
		models += b
	}
	if models > 0 {
		models += faults.Extra
	}
	if mem.context {
		models = max(models, opts.Residue)
	}
	return models + mem.leaked
}

func (mem *memory) write() error {
	if mem.dropped {
		return errDead
	}
	total := mem.sum()
	if total == mem.total {
		return nil
	}
	if err := mem.holder.Set(mem.index, total); err != nil {
		return err
	}
	mem.total = total
	mem.l.held(total)
	return nil
}

// writeOrNote is write where nobody can be told of an error.
func (mem *memory) writeOrNote() {
	if err := mem.write(); err != nil && !errors.Is(err, errDead) {
		mem.l.note(Event{Kind: EventMemory, Detail: "could not be written: " + err.Error()})
	}
}

// others is what everybody else holds on the GPU.
func (mem *memory) others() (gpu.Bytes, error) {
	sample, err := mem.sampler.Sample(mem.l.ctx, gpu.Memory)
	if err != nil {
		// The folder may say that telemetry is lost. The memory is still as
		// full as before; of the servers of this process we know it anyway.
		var sum gpu.Bytes
		for other := range holders {
			if other != mem && other.index == mem.index && other.l.s.dir == mem.l.s.dir {
				sum += other.total
			}
		}
		return sum, nil
	}
	device := sample.Devices[mem.index]
	if device.Health == gpu.Lost {
		return 0, fmt.Errorf("CUDA error: GPU %d is lost", mem.index)
	}
	return max(0, device.Total-device.Free-mem.total), nil
}

// openSampler opens a look at the folder that shows any amount of use on any
// of 64 GPUs.
func openSampler(dir string) (gpu.Sampler, error) {
	totals := make([]gpu.Bytes, maxGPUs)
	for i := range totals {
		totals[i] = 1 << 20 * gpu.GiB
	}
	guest := simulated.Simulated{Totals: totals, Dir: dir}
	return guest.Open(context.Background(), zap.NewNop())
}
