package config

import (
	"bufio"
	"cmp"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// ownHost stands for every name and address of this machine.
const ownHost = "localhost"

// loopbackNames are what distributions call the loopback, besides what this machine's hosts file says.
var loopbackNames = []string{
	ownHost, "localhost.localdomain", "localhost4", "localhost4.localdomain4", "localhost6", "localhost6.localdomain6",
	"ip6-localhost", "ip6-loopback",
}

// ServerAddress returns address, `host:port`, in a form that is the same for
// every way to write it: `127.0.0.1:8188`, `LOCALHOST:8188`, `[::1]:8188`, `:8188` and this machine's own name or
// address with that port are all one server. Other loopback addresses (`127.0.0.2:8188`) stand for themselves. It asks no other
// machine: of names it knows those of the hosts file. What is no address is returned as it is.
func ServerAddress(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	host = plainHost(host)
	switch ip := hostAddress(host); {
	case slices.Contains(machineNames(), host): // its hosts file may give it 127.0.0.2, as SUSE's does, or the address of a NAT
		host = ownHost
	case ip.IsValid() && !isOwnAddress(ip), isOtherLoopback(ip):
		host = ip.String()
	case IsOwnHost(host):
		host = ownHost
	}
	if n, err := net.LookupPort("tcp", port); err == nil && n != 0 {
		port = strconv.Itoa(n)
	}
	return net.JoinHostPort(host, port)
}

// IsOwnHost reports whether a host, without a port, is this machine.
func IsOwnHost(host string) bool {
	host = plainHost(host)
	if host == "" || slices.Contains(loopbackNames, host) || strings.HasSuffix(host, "."+ownHost) {
		return true
	}
	if ip := hostAddress(host); ip.IsValid() && isOwnAddress(ip) {
		return true
	}
	return slices.Contains(machineNames(), host)
}

// plainHost is a host in lower case, without the dot at the end.
func plainHost(host string) string { return strings.ToLower(strings.TrimSuffix(host, ".")) }

// hostAddress is the address that a host is, or that the hosts file gives it; the zero Addr: neither.
func hostAddress(host string) netip.Addr {
	if ip, err := netip.ParseAddr(host); err == nil {
		return plainAddress(ip)
	}
	if ip := shortAddress(host); ip.IsValid() {
		return ip
	}
	return hosts()[host]
}

func plainAddress(ip netip.Addr) netip.Addr { return ip.Unmap().WithZone("") }

// isOtherLoopback reports whether an address is one of the loopback at which a second server may use the port of a first. Debian
// gives 127.0.1.1 to the machine's own name.
func isOtherLoopback(ip netip.Addr) bool {
	return ip.Is4() && ip.IsLoopback() && ip != netip.AddrFrom4([4]byte{127, 0, 0, 1}) && ip != netip.AddrFrom4([4]byte{127, 0, 1, 1})
}

func isOwnAddress(ip netip.Addr) bool {
	return ip.IsLoopback() || ip.IsUnspecified() || ownAddresses()[ip]
}

// shortAddress is an IPv4 address in the other forms that the C library takes, and with it a Caddy that resolves names by it: up to four
// numbers, decimal, octal or hexadecimal, of which the last fills what is left: 127.1, 0x7f000001. The zero Addr: it is none.
func shortAddress(host string) netip.Addr {
	parts := strings.Split(host, ".")
	if len(parts) > 4 {
		return netip.Addr{}
	}
	var whole uint64
	for i, part := range parts {
		bits := 8
		if i == len(parts)-1 {
			bits = 8 * (4 - i)
		}
		if strings.Contains(part, "_") || strings.HasPrefix(part, "0b") || strings.HasPrefix(part, "0o") { // Go's own
			return netip.Addr{}
		}
		n, err := strconv.ParseUint(part, 0, bits)
		if err != nil {
			return netip.Addr{}
		}
		whole = whole<<bits | n
	}
	return netip.AddrFrom4([4]byte{byte(whole >> 24), byte(whole >> 16), byte(whole >> 8), byte(whole)})
}

// machineNames are what this machine calls itself.
var machineNames = sync.OnceValue(func() []string {
	name, err := os.Hostname()
	name = plainHost(name)
	if err != nil || name == "" {
		return nil
	}
	short, _, _ := strings.Cut(name, ".")
	return []string{name, short, name + ".local", short + ".local"}
})

// hosts are the addresses in this machine's hosts file, as it was when it was first wanted.
var hosts = sync.OnceValue(func() map[string]netip.Addr {
	path := "/etc/hosts"
	if runtime.GOOS == "windows" {
		path = filepath.Join(cmp.Or(os.Getenv("SystemRoot"), `C:\Windows`), `System32\drivers\etc\hosts`)
	}
	return readHosts(path)
})

// maxHosts bounds what is read of a hosts file, in bytes.
const maxHosts = 1 << 20

// readHosts reads a hosts file: the address of each name. Of several it is one of this machine's, if there is one, else the first.
func readHosts(path string) map[string]netip.Addr {
	out := map[string]netip.Addr{}
	file, err := os.Open(path)
	if err != nil { // without one no name has an address
		return out
	}
	defer func() { _ = file.Close() }()
	lines := bufio.NewScanner(io.LimitReader(file, maxHosts))
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		ip, err := netip.ParseAddr(fields[0])
		if err != nil {
			continue
		}
		ip = plainAddress(ip)
		for _, name := range fields[1:] {
			name = plainHost(name)
			if old, known := out[name]; !known || isOwnAddress(ip) && !isOwnAddress(old) {
				out[name] = ip
			}
		}
	}
	return out
}

// ownAddresses are those of this machine's interfaces, as they were when they were first wanted.
var ownAddresses = sync.OnceValue(func() map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	list, err := net.InterfaceAddrs()
	if err != nil {
		return out
	}
	for _, a := range list {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			out[plainAddress(prefix.Addr())] = true
		}
	}
	return out
})
