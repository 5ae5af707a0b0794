package scheduler

// Knows reports whether a job waits or runs.
func (s *State) Knows(id JobID) bool { return s.jobs.get(id) != nil }

// maxPosition bounds what Position counts.
const maxPosition = 1000

// Position is the place of a waiting job among all that wait, by (priority,
// submitted at): 1 is next, and from 1000 on it stays 1000. 0: the job does not wait. It changes nothing.
func (s *State) Position(id JobID) int {
	j := s.jobs.get(id)
	if j == nil || j.state == jobRunning {
		return 0
	}
	n := 1
	for _, sl := range s.slots {
		for i := range sl.queue.levels {
			for o := sl.queue.levels[i].first; o != nil && o != j && order(o, j) <= 0; o = o.next {
				if n++; n >= maxPosition {
					return maxPosition
				}
			}
		}
	}
	return n
}
