// Package bootid tells one run of the machine from another.
package bootid

import (
	"os"
	"strings"
	"sync"
)

// Get returns what Linux calls its boot ID, which no two boots of a machine share. It is empty where it is not known, as on other systems.
var Get = sync.OnceValue(func() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
})
