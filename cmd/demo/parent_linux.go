package main

import (
	"runtime"
	"syscall"
)

// A child's Pdeathsig is tied to the thread that started it: that is the main thread, which lives as long as we do.
func init() { runtime.LockOSThread() }

// apart keeps the terminal's Ctrl-C from a child, which is the demo's to stop,
// and ends the child should the demo be killed.
func apart() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
