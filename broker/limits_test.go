package broker

import (
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bounds"
)

func TestLimitsAreThoseOfThePage(t *testing.T) {
	bounds.Documented(t, "broker", map[string]any{
		"sampleInterval":   sampleInterval,
		"fastInterval":     fastInterval,
		"fullShare":        fullShare,
		"openRetry":        openRetry,
		"jitter":           jitter,
		"maxAdopted":       maxAdopted,
		"maxMissing":       maxMissing,
		"missingFor":       missingFor,
		"catalogRest":      catalogRest,
		"maxOutliving":     maxOutliving,
		"maxClients":       maxClients,
		"maxClientName":    maxClientName,
		"ringSize":         ringSize,
		"maxUnlisted":      maxUnlisted,
		"maxUnlistedRoute": maxUnlistedRoute,
		"learntMax":        learntMax,
		"flagsMax":         flagsMax,
		"storeTimeout":     storeTimeout,
	})
}
