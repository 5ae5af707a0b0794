package amdgpu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

const (
	// wholeMachine is the PID namespace that holds every process, by its number in the kernel's sources.
	wholeMachine = "pid:[4026531836]"
	// descriptorLimit bounds one look at all processes together.
	descriptorLimit = 1 << 17
)

// client is an open connection to a card. Processes share one after a fork,
// and have several descriptors for it.
type client struct{ address, id string }

// processes tells who holds memory on each card, by address. A part of the list
// would pass for the whole: a server that is not on it would seem to hold
// nothing. So it is an error if there may be processes that are not seen.
func (f files) processes(ctx context.Context, nodes []node, unified map[string]bool) (map[string][]gpu.Process, error) {
	space, err := os.Readlink(f.path("proc", "1", "ns", "pid"))
	if err != nil {
		return nil, fmt.Errorf("%w: to see the processes of others give Caddy the capability CAP_SYS_PTRACE", err)
	}
	if space != wholeMachine {
		return nil, fmt.Errorf("%s is %s and not the host's: give the container the host's PID namespace, or mount the host's /proc and name it with the option root", f.path("proc"), space)
	}
	entries, err := os.ReadDir(f.path("proc"))
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids) // a parent mostly comes before the children that share its clients

	seen := map[client]bool{}
	drawn := map[string]map[int]gpu.Bytes{}
	left := descriptorLimit
	for _, pid := range pids {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err := f.clients(pid, &left, func(c client, held map[string]gpu.Bytes) {
			if seen[c] {
				return
			}
			seen[c] = true
			used := held["vram"]
			if unified[c.address] {
				used += held["gtt"]
			}
			put(drawn, c.address, pid, used)
		}); err != nil {
			return nil, err
		}
	}
	// The part for computing keeps an account of its own, which older kernels leave out of the clients'.
	computed := map[string]map[int]gpu.Bytes{}
	f.computing(nodes, func(address string, pid int, used gpu.Bytes) { put(computed, address, pid, used) })
	for address, byPID := range computed {
		for pid, used := range byPID {
			if more := used - drawn[address][pid]; more > 0 {
				put(drawn, address, pid, more)
			}
		}
	}
	return f.lists(drawn), nil
}

func put(to map[string]map[int]gpu.Bytes, address string, pid int, used gpu.Bytes) {
	if to[address] == nil {
		to[address] = map[int]gpu.Bytes{}
	}
	to[address][pid] += min(used, math.MaxInt64-to[address][pid])
}

// lists are the processes that hold something, by address and ordered by PID.
func (f files) lists(byAddress map[string]map[int]gpu.Bytes) map[string][]gpu.Process {
	out := map[string][]gpu.Process{}
	for address, byPID := range byAddress {
		for pid, used := range byPID {
			if used > 0 {
				out[address] = append(out[address], gpu.Process{PID: pid, Name: f.processName(pid), Used: used})
			}
		}
		slices.SortFunc(out[address], func(a, b gpu.Process) int { return a.PID - b.PID })
	}
	return out
}

// clients calls found for each descriptor of a process that is one of a card.
func (f files) clients(pid int, left *int, found func(client, map[string]gpu.Bytes)) error {
	number := strconv.Itoa(pid)
	entries, err := os.ReadDir(f.path("proc", number, "fdinfo"))
	if err != nil {
		return gone(err)
	}
	for _, entry := range entries {
		// To follow the link needs more than to read what it is about, so this is only for speed.
		if to, err := os.Readlink(f.path("proc", number, "fd", entry.Name())); err == nil && !strings.HasPrefix(to, "/dev/dri/") {
			continue
		}
		if *left--; *left < 0 {
			return fmt.Errorf("the machine's processes have more than %d open files: too many to look at", descriptorLimit)
		}
		text, err := read(f.path("proc", number, "fdinfo", entry.Name()))
		if err != nil {
			if err := gone(err); err != nil {
				return err
			}
			continue
		}
		if c, held, ok := parseClient(text); ok {
			found(c, held)
		}
	}
	return nil
}

// gone is nil for the error of a process or descriptor that has ended meanwhile.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return fmt.Errorf("%w: to see the processes of others give Caddy the capability CAP_SYS_PTRACE", err)
}

// parseClient reads what the kernel tells of a descriptor, if it is one of
// amdgpu: what its client holds in each kind of memory.
func parseClient(text string) (client, map[string]gpu.Bytes, bool) {
	if !strings.Contains(text, "drm-driver:") {
		return client{}, nil, false
	}
	facts := pairs(text, ":")
	c := client{strings.ToLower(facts["drm-pdev"]), facts["drm-client-id"]}
	if facts["drm-driver"] != "amdgpu" || !addressPattern.MatchString(c.address) || c.id == "" {
		return client{}, nil, false
	}
	held := map[string]gpu.Bytes{}
	for _, kind := range []string{"vram", "gtt"} {
		// What is there now; total counts what was moved out, too. Older kernels have the second name alone.
		for _, key := range []string{"drm-resident-", "drm-memory-", "drm-total-"} {
			if size, ok := amount(facts[key+kind]); ok {
				held[kind] = size
				break
			}
		}
	}
	return c, held, true
}

// amount reads a number with a unit of the kernel's; without one it is bytes.
func amount(text string) (gpu.Bytes, bool) {
	digits, unit, _ := strings.Cut(text, " ")
	factor, ok := map[string]gpu.Bytes{"": 1, "KiB": gpu.KiB, "MiB": gpu.MiB}[strings.TrimSpace(unit)]
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || !ok || n < 0 || n > math.MaxInt64/int64(factor) {
		return 0, false
	}
	return gpu.Bytes(n) * factor, true
}

// processName is the program as it was called, or as it calls itself.
func (f files) processName(pid int) string {
	number := strconv.Itoa(pid)
	if line, err := read(f.path("proc", number, "cmdline")); err == nil {
		if name, _, _ := strings.Cut(line, "\x00"); name != "" {
			return name
		}
	}
	comm, err := read(f.path("proc", number, "comm"))
	if err != nil {
		return ""
	}
	return comm
}
