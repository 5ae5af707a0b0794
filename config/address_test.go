package config

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOneServerHasOneAddressHoweverItIsWritten(t *testing.T) {
	own, err := os.Hostname()
	require.NoError(t, err)
	for _, address := range []string{
		"127.0.0.1:8188", "localhost:8188", "LocalHost:8188", "[::1]:8188", ":8188", "0.0.0.0:8188", "[::]:8188", "127.0.1.1:8188",
		"localhost.:8188",
		"comfy.localhost:8188", "[::ffff:127.0.0.1]:8188", "127.0.0.1:08188",
		"ip6-loopback:8188", "IP6-localhost:8188", "localhost.localdomain:8188", "localhost4:8188", "localhost6:8188",
		"localhost6.localdomain6.:8188",
		"127.1:8188", "127.0.1:8188", "2130706433:8188", "0x7f000001:8188", "0X7F.1:8188", "0177.0.0.1:8188", "127.0.0.01:8188", "0:8188",
		"[::1%lo]:8188", "[0:0:0:0:0:0:0:1]:8188", own + ":8188", strings.ToUpper(own) + ":8188",
	} {
		assert.Equal(t, "localhost:8188", ServerAddress(address), address)
	}
	assert.Equal(t, "localhost:80", ServerAddress("localhost:http"))
	assert.Equal(t, "10.0.0.1:80", ServerAddress("10.1:80"))
	for _, other := range []string{
		"128.1", "127", "1.2.3.4.5", "127.256.1.1", "0b1.1", "0x", "1_0.1", "08.1", "127.0.0.256", "4294967296",
		"localhost5", "notlocalhost", "{env.NONE}",
	} {
		assert.False(t, IsOwnHost(other), other)
	}
	for a, b := range map[string]string{
		"127.0.0.1:8188": "127.0.0.1:8189", "gpu1:80": "gpu2:80", "10.255.255.1:80": "localhost:80", "GPU1:80": "gpu2:80",
		"127.0.0.2:80": "localhost:80", "127.0.0.3:80": "127.0.0.2:80",
	} {
		assert.NotEqual(t, ServerAddress(a), ServerAddress(b))
	}
	assert.Equal(t, ServerAddress("GPU1:80"), ServerAddress("gpu1.:80"))
	assert.Equal(t, "no address", ServerAddress("no address"))
}

func TestTheHostsFileSaysWhichNamesAreThisMachine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hosts")
	require.NoError(t, os.WriteFile(path, []byte(`# 127.0.0.1 comment
127.0.0.1	localhost
127.0.1.1 Box.example.com box # rest
::1 six
fe80::1%lo0 zoned
10.255.255.7 gpu1 gpu1.lan
10.255.255.8 both
127.0.0.1 both
10.255.255.9 both
127.0.0.1
nonsense name
`), 0o600))
	got := readHosts(path)
	for name, want := range map[string]string{
		"localhost": "127.0.0.1", "box.example.com": "127.0.1.1", "box": "127.0.1.1", "six": "::1", "zoned": "fe80::1",
		"gpu1": "10.255.255.7", "gpu1.lan": "10.255.255.7", "both": "127.0.0.1",
	} {
		assert.Equal(t, want, got[name].String(), name)
		delete(got, name)
	}
	assert.Empty(t, got)
	assert.Empty(t, readHosts(filepath.Join(t.TempDir(), "none")), "a machine without the file knows no names")

	require.NoError(t, os.WriteFile(path, []byte("127.0.0.1 early\n"+strings.Repeat("#\n", maxHosts)+"127.0.0.1 late\n"), 0o600))
	assert.Len(t, readHosts(path), 1, "what is read is bounded")

	old := hosts
	t.Cleanup(func() { hosts = old })
	known := map[string]netip.Addr{"box": netip.MustParseAddr("127.0.1.1"), "gpu1": netip.MustParseAddr("10.255.255.7")}
	hosts = func() map[string]netip.Addr { return known }
	own, err := os.Hostname()
	require.NoError(t, err)
	for _, ip := range []string{"127.0.0.2", "203.0.113.9"} {
		hosts()[strings.ToLower(own)] = netip.MustParseAddr(ip)
		assert.Equal(t, "localhost:80", ServerAddress(own+":80"), ip)
	}
	assert.Equal(t, "localhost:80", ServerAddress("BOX.:80"))
	assert.Equal(t, ServerAddress("10.255.255.7:80"), ServerAddress("gpu1:80"), "another machine's name and address are one, too")
	assert.False(t, IsOwnHost("gpu1"))
}
