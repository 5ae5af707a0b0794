package doctor

import (
	"os"
	"os/user"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// writable says why this user may not make files in a folder.
func writable(path string) error { return unix.Access(path, unix.W_OK|unix.X_OK) }

// tryDevice asks whether this user may read and write a device; it is not opened, as that may wake the card.
func tryDevice(path string) deviceFile {
	d := deviceFile{path: path, err: unix.Access(path, unix.R_OK|unix.W_OK)}
	info, err := os.Stat(path)
	if err != nil {
		return d
	}
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		d.group = strconv.FormatUint(uint64(s.Gid), 10)
		if g, err := user.LookupGroupId(d.group); err == nil {
			d.group = g.Name
		}
	}
	return d
}
