package amdgpu

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// fileLimit bounds what is read of one file. Those of the kernel that count
// here are of one page at most.
const fileLimit = 64 << 10

// files are the machine's files, below some folder.
type files struct{ root string }

func (f files) path(parts ...string) string {
	return filepath.Join(append([]string{f.root}, parts...)...)
}

// read is the text of a file, without the blanks around it.
func read(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, fileLimit))
	if err != nil {
		return "", err
	}
	return string(bytes.TrimSpace(text)), nil
}

// number is a file that holds one whole number of at least zero.
func number(path string) (int64, error) {
	text, err := read(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s: %q is no number of bytes or units: the driver tells it otherwise than expected", path, cut(text))
	}
	return n, nil
}

// words are the pairs of a file with lines of a key, a separator and a value.
func words(path, separator string) (map[string]string, error) {
	text, err := read(path)
	if err != nil {
		return nil, err
	}
	return pairs(text, separator), nil
}

func pairs(text, separator string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, separator)
		if ok {
			out[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
	}
	return out
}

// available is how much of the system's memory programs can still get.
func (f files) available() (gpu.Bytes, error) {
	path := f.path("proc", "meminfo")
	values, err := words(path, ":")
	if err != nil {
		return 0, err
	}
	kib, err := strconv.ParseInt(strings.TrimSuffix(values["MemAvailable"], " kB"), 10, 48)
	if err != nil || kib < 0 {
		return 0, fmt.Errorf("%s has no MemAvailable that can be read", path)
	}
	return gpu.Bytes(kib) * gpu.KiB, nil
}

// advise says what to do about a file that cannot be read.
func advise(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: let Caddy's user read it; a unit or container must not hide /sys", err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: the driver does not show it: a newer kernel may be needed", err)
	default:
		return fmt.Errorf("%w: look at the kernel's log", err)
	}
}

// cut shortens a text for logs.
func cut(text string) string {
	if len(text) > 100 {
		return strings.ToValidUTF8(text[:100], "") + "…"
	}
	return text
}
