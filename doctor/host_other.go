//go:build !linux

package doctor

// writable is not asked here: Caddy itself will say so.
func writable(string) error { return nil }

// tryDevice is not asked here: the device files that are looked for are Linux's.
func tryDevice(path string) deviceFile { return deviceFile{path: path} }
