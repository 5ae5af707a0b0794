package doctor

import (
	"bufio"
	"encoding/hex"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// listener is a TCP port that a program of this machine listens at.
type listener struct {
	address netip.AddrPort
	inode   string
	pids    []int // whose it is, as far as this user may know
}

// listeners are all of them.
type listeners struct {
	list []listener
	own  []netip.Addr // this machine's addresses
}

// readListeners reads them from /proc; elsewhere than on Linux there are none.
func readListeners() listeners {
	var l listeners
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		l.list = append(l.list, readSockets(file)...)
	}
	owners := socketOwners()
	for i := range l.list {
		l.list[i].pids = owners[l.list[i].inode]
	}
	addresses, _ := net.InterfaceAddrs() // without them only loopback addresses are known as ours
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			l.own = append(l.own, p.Addr().Unmap())
		}
	}
	return l
}

// listening is the state of a socket that listens, as the kernel writes it.
const listening = "0A"

func readSockets(file string) (out []listener) {
	in, err := os.Open(file)
	if err != nil {
		return nil
	}
	defer func() { _ = in.Close() }() // it was only read
	rows := bufio.NewScanner(in)
	for rows.Scan() {
		fields := strings.Fields(rows.Text())
		if len(fields) < 10 || fields[3] != listening {
			continue
		}
		if address, ok := parseSocket(fields[1]); ok {
			out = append(out, listener{address: address, inode: fields[9]})
		}
	}
	return out
}

// parseSocket reads an address as the kernel writes it: words of four bytes, each in the machine's order.
func parseSocket(text string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	number, portErr := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || portErr != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for word := range slices.Chunk(raw, 4) {
		slices.Reverse(word)
	}
	address, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(address.Unmap(), uint16(number)), ok
}

// socketOwners are the processes that hold sockets, by the sockets' inodes.
func socketOwners() map[string][]int {
	owners := map[string][]int{}
	folders, _ := filepath.Glob("/proc/[0-9]*/fd") // the pattern is sound
	for _, folder := range folders {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(folder)))
		if err != nil {
			continue
		}
		entries, _ := os.ReadDir(folder) // of another user's process
		for _, e := range entries {
			target, _ := os.Readlink(filepath.Join(folder, e.Name())) // it may be gone
			if inode, ok := strings.CutPrefix(target, "socket:["); ok {
				inode = strings.TrimSuffix(inode, "]")
				if !slices.Contains(owners[inode], pid) {
					owners[inode] = append(owners[inode], pid)
				}
			}
		}
	}
	return owners
}

// serving are those that answer at host:port, a name or address of this
// machine: one at that very address, else those at all addresses.
func (l listeners) serving(host, port string) (out []listener) {
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || !(config.IsOwnHost(host) || l.isOwn(host)) {
		return nil
	}
	address, err := netip.ParseAddr(host)
	named := err == nil
	var everywhere []listener
	for _, s := range l.list {
		switch {
		case s.address.Port() != uint16(number):
		case s.address.Addr().IsUnspecified():
			everywhere = append(everywhere, s)
		case named && s.address.Addr() == address.Unmap(), !named && s.address.Addr().IsLoopback():
			out = append(out, s)
		}
	}
	if len(out) > 0 {
		return out
	}
	return everywhere
}

// conflicting are those that keep another from listening at host:port; an empty host stands for all addresses.
func (l listeners) conflicting(host, port string) (out []listener) {
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil
	}
	address, err := netip.ParseAddr(host)
	everywhere := host == "" || err == nil && address.IsUnspecified()
	for _, s := range l.list {
		if s.address.Port() != uint16(number) {
			continue
		}
		if everywhere || s.address.Addr().IsUnspecified() || s.address.Addr() == address.Unmap() || err != nil && s.address.Addr().IsLoopback() && isLoopback(host) {
			out = append(out, s)
		}
	}
	return out
}

// isOwn reports whether host is an address of this machine.
func (l listeners) isOwn(host string) bool {
	address, err := netip.ParseAddr(host)
	return err == nil && slices.Contains(l.own, address.Unmap())
}

// isLoopback reports whether host is a loopback address, or the usual name of one.
func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	address, err := netip.ParseAddr(host)
	return err == nil && address.Unmap().IsLoopback()
}
