package scheduler

// Contended reports whether other jobs wait for a GPU that a running job keeps from them: for the lock, for the memory
// of its slot, or for its place on the slot. It changes nothing, and costs nothing while nobody waits.
func (s *State) Contended(id JobID) bool {
	j := s.jobs.get(id)
	if j == nil || j.state != jobRunning || s.waiting == 0 || j.slot.cfg.Cloud {
		return false
	}
	for _, sl := range s.slots {
		if sl.queue.head() != nil && (sl == j.slot || s.cfg.LockGlobal || sl.meets(j.slot)) {
			return true
		}
	}
	return false
}

// meets reports whether two slots are on a common GPU.
func (sl *slot) meets(other *slot) bool {
	for _, h := range sl.on {
		if other.hold(h.card) != nil {
			return true
		}
	}
	return false
}
