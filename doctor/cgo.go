//go:build cgo

package doctor

// builtWithCgo says whether this program can use a library such as NVML.
const builtWithCgo = true
