package scheduler

import (
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bounds"
)

func TestLimitsAreThoseOfThePage(t *testing.T) {
	bounds.Documented(t, "scheduler", map[string]any{
		"maxFootprints":  maxFootprints,
		"recent":         recent,
		"maxPast":        maxPast,
		"maxRests":       maxRests,
		"snapshotQueue":  snapshotQueue,
		"maxPosition":    maxPosition,
		"recheck":        recheck,
		"quiet":          quiet,
		"flushWait":      flushWait,
		"maxBackoff":     maxBackoff,
		"cutWait":        cutWait,
		"drainRetry":     drainRetry,
		"failedLoadOO":   failedLoadOO,
		"partlyLoaded":   partlyLoaded,
		"busyPoll":       busyPoll,
		"healthTimeouts": healthTimeouts,
		"defaultSwitch":  defaultSwitch,
		"defaultCushion": defaultCushion,
		"unifiedCushion": unifiedCushion,
	})
}
