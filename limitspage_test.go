package gpubroker

import (
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bounds"
)

func TestLimitsAreThoseOfThePage(t *testing.T) {
	bounds.Documented(t, "gpubroker", map[string]any{
		"maxNamedBody":    maxNamedBody,
		"onePacketBody":   onePacketBody,
		"maxOrigins":      maxOrigins,
		"maxOrigin":       maxOrigin,
		"maxAllowHeaders": maxAllowHeaders,
		"maxReason":       maxReason,
		"keptAnswer":      keptAnswer,
		"toldAnswer":      toldAnswer,
		"stuckAfter":      stuckAfter,
		"lastWrite":       lastWrite,
		"cutAgain":        cutAgain,
		"minLook":         minLook,
		"maxLook":         maxLook,
		"startWait":       startWait,
		"logWaiting":      logWaiting,
		"adminWait":       adminWait,
		"maxLend":         maxLend,
		"maxConfig":       maxConfig,
		"followQuiet":     followQuiet,
		"doctorTimeout":   doctorTimeout,
		"maxTold":         maxTold,
		"retireTime":      retireTime,
		"exitPoll":        exitPoll,
		"idTries":         idTries,
		"idPause":         idPause,
	})
}
