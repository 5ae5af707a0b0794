package httplife

// SaysOutOfMemory tells whether a text that a server has written is about memory of the GPU that is lacking.
func SaysOutOfMemory(text string) bool { return saysOutOfMemory([]byte(text)) }

// Restarted is told by a supervisor: the server has been started anew. It has
// forgotten its jobs, and it is not unloaded any more.
func (d *driver) Restarted() {
	d.last.forget()
	d.jobs.mu.Lock()
	d.jobs.ids = nil
	d.jobs.mu.Unlock()
}
