package httplife

import (
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bounds"
)

func TestLimitsAreThoseOfThePage(t *testing.T) {
	bounds.Documented(t, "lifecycle/http", map[string]any{
		"maxAnswer":      maxAnswer,
		"maxExcerpt":     maxExcerpt,
		"minPart":        minPart,
		"maxCatalog":     maxCatalog,
		"maxModels":      maxModels,
		"maxConnections": maxConnections,
		"dialTimeout":    dialTimeout,
		"maxJobs":        maxJobs,
		"jobsAtOnce":     jobsAtOnce,
		"firstPoll":      firstPoll,
		"lastPoll":       lastPoll,
		"askAgain":       askAgain,
		"stableList":     stableList,
		"stillWait":      stillWait,
	})
}
