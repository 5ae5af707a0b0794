package nvml

import (
	"strconv"
	"strings"
)

// processListBroken reports whether a driver's per-process figures are known
// to be garbage: drivers 535 before 535.104 changed a struct without saying so.
func processListBroken(driver string) bool {
	major, rest, _ := strings.Cut(driver, ".")
	if major != "535" {
		return false
	}
	minor, _, _ := strings.Cut(rest, ".")
	n, err := strconv.Atoi(minor)
	return err != nil || n < 104
}
