package process

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bootid"
)

const (
	reapGrace    = 2 * time.Second  // between asking and killing
	reapPatience = 10 * time.Second // for those that were killed to be gone
	firstLook    = 2 * time.Millisecond
	lastLook     = 50 * time.Millisecond
)

// Reap ends what a Caddy that was killed has left running, of which it kept
// records in dir, and returns how many processes that were. It touches no
// process of a Caddy that lives, and none that only has the number of one of
// them. It returns when they are gone.
func Reap(dir string, logger *zap.Logger) (reaped int, err error) {
	if dir == "" {
		return 0, nil
	}
	all, err := records(dir)
	faults := []error{err}
	var orphaned []*record
	for _, r := range all {
		switch {
		case r.Boot != bootid.Get(): // nothing of it can be left
			faults = append(faults, r.remove(dir))
		case !r.Owner.alive():
			orphaned = append(orphaned, r)
		}
	}
	if len(orphaned) == 0 {
		return 0, errors.Join(faults...)
	}
	seen := map[identity]bool{}
	if err := endOrphans(orphaned, seen, logger); err != nil {
		return len(seen), errors.Join(append(faults, err)...) // the records are kept for the next time
	}
	for _, r := range orphaned {
		faults = append(faults, r.remove(dir))
	}
	return len(seen), errors.Join(faults...)
}

// endOrphans asks all that is left of these servers to end, then kills it. It fails if something is left even then.
func endOrphans(orphaned []*record, seen map[identity]bool, logger *zap.Logger) error {
	began := time.Now()
	asked := map[identity]bool{}
	var refused error
	for wait := firstLook; ; wait = min(2*wait, lastLook) {
		living, err := processes()
		if err != nil {
			return err
		}
		marks := markCache{}
		left := false
		for _, r := range orphaned {
			for _, p := range r.owned(living, r.groupLives(living), marks.of) {
				id := p.identity()
				left = true
				if !seen[id] {
					seen[id] = true
					logger.Warn("a process that an earlier Caddy has left is ended", zap.String("consumer", r.Consumer), zap.Int("pid", p.pid))
				}
				if time.Since(began) >= reapGrace {
					refused = errors.Join(refused, id.signal(syscall.SIGKILL))
				} else if !asked[id] {
					asked[id] = true
					refused = errors.Join(refused, id.signal(syscall.SIGTERM))
				}
			}
		}
		for id := range seen { // one that is about to end has lost its mark already, and what it held of a GPU not yet
			left = left || id.alive()
		}
		switch {
		case !left:
			return nil
		case refused != nil:
			return fmt.Errorf("processes that an earlier Caddy has left can't be ended: %w: end them by hand", refused)
		case time.Since(began) >= reapGrace+reapPatience:
			return errors.New("processes that an earlier Caddy has left do not end, even killed: they may hold GPU memory until the host is restarted")
		}
		time.Sleep(wait) // nothing tells of the end of a process that is not a child
	}
}

// markCache keeps marks for one look at all processes.
type markCache map[int]string

func (m markCache) of(pid int) string {
	value, ok := m[pid]
	if !ok {
		value = mark(pid)
		m[pid] = value
	}
	return value
}
