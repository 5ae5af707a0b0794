package config

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
)

// ownHost stands for every name and address of this machine.
const ownHost = "localhost"

// ServerAddress returns address, `host:port`, in a form that is the same for
// every way to write it: `127.0.0.1:8188`, `LOCALHOST:8188`, `[::1]:8188`, `:8188` and this machine's own name or
// address with that port are all one server. It looks nothing up on a network. What is no address is returned as it is.
func ServerAddress(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if IsOwnHost(host) {
		host = ownHost
	} else if ip, err := netip.ParseAddr(host); err == nil {
		host = ip.Unmap().WithZone("").String()
	}
	if trimmed := strings.TrimLeft(port, "0"); trimmed != "" {
		port = trimmed
	}
	return net.JoinHostPort(host, port)
}

// IsOwnHost reports whether a host, without a port, is this machine.
func IsOwnHost(host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "" || host == ownHost || strings.HasSuffix(host, "."+ownHost) || host == "ip6-localhost" {
		return true
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		ip = ip.Unmap().WithZone("")
		return ip.IsLoopback() || ip.IsUnspecified() || ownAddresses()[ip]
	}
	name, err := os.Hostname()
	return err == nil && name != "" && (host == strings.ToLower(name) || host == strings.ToLower(name)+".local")
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
			out[prefix.Addr().Unmap().WithZone("")] = true
		}
	}
	return out
})
