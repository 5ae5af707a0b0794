//go:build unix && !linux

package main

import "syscall"

// apart keeps the terminal's Ctrl-C from a child, which is the demo's to stop.
func apart() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
