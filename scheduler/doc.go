// Package scheduler decides: which job runs, which model is loaded, which one
// is unloaded for it, who waits and who is refused.
//
// It is a pure reducer. State.Step takes in one Event at a given time, and
// returns what is to be done about it; nothing else changes the state. There is
// no goroutine, no clock, no lock and no I/O in here: package broker is the
// driver that supplies them.
//
// The rules are those of the project's contract; where a function follows one
// of them, its comment names it: "accounting" (VRAM arithmetic, slot states,
// wait or refuse, transitions) and "policy" (the order of service).
package scheduler
