//go:build unix

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// lockDir makes the folder ours until the returned function is called or the
// process ends. The lock file says who has it.
func lockDir(dir string) (note func(text string) error, unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("making the demo's folder: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("opening the demo's lock file: %w", err)
	}
	switch err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); {
	case errors.Is(err, syscall.EWOULDBLOCK):
		who, _ := io.ReadAll(io.LimitReader(file, 1024)) // says less if it can't be read
		_ = file.Close()
		return nil, nil, fmt.Errorf("it runs already (%s): stop that one with Ctrl-C first, or give this one a folder of its own with -dir", strings.TrimSpace(string(who)))
	case err != nil:
		_ = file.Close()
		return nil, nil, fmt.Errorf("locking %s: %w", file.Name(), err)
	}
	note = func(text string) error {
		if err := file.Truncate(0); err != nil {
			return err
		}
		_, err := file.WriteAt([]byte(text+"\n"), 0)
		return err
	}
	return note, func() { _ = file.Close() }, nil
}
