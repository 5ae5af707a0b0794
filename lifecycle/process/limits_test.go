//go:build linux

package process

import (
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bounds"
)

func TestLimitsAreThoseOfThePage(t *testing.T) {
	bounds.Documented(t, "lifecycle/process", map[string]any{
		"defaultGrace":       defaultGrace,
		"defaultMaxRestarts": defaultMaxRestarts,
		"killPatience":       killPatience,
		"drainTime":          drainTime,
		"firstLook":          firstLook,
		"lastLook":           lastLook,
		"slowLook":           slowLook,
		"knockTime":          knockTime,
		"maxLine":            maxLine,
		"maxLogging":         maxLogging,
		"maxLast":            maxLast,
		"reapGrace":          reapGrace,
		"reapPatience":       reapPatience,
	})
}
