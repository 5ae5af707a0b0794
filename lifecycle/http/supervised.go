package httplife

import "strings"

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

// Redactor returns what hides these values in a text, in the forms in which a
// server may write them, and the length of the longest of these, in bytes. Very
// short ones are not hidden: half of the text would be.
func Redactor(values []string) (hide func(string) string, longest int) {
	var secret secretSet
	for _, v := range values {
		secret.addPart(v)
		for _, line := range strings.Split(v, "\n") {
			secret.addPart(strings.TrimSpace(line))
		}
	}
	for form := range secret {
		longest = max(longest, len(form))
	}
	return secret.redactor().replacer.Replace, longest
}
