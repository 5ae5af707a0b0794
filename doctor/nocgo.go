//go:build !cgo

package doctor

// builtWithCgo reports whether this program can use a library such as NVML.
const builtWithCgo = false
