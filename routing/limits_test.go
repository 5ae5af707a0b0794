package routing

import (
	"testing"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bounds"
)

func TestLimitsAreThoseOfThePage(t *testing.T) {
	bounds.Documented(t, "routing", map[string]any{
		"MaxName":       MaxName,
		"maxCapture":    maxCapture,
		"maxEscaped":    maxEscaped,
		"MaxClient":     MaxClient,
		"MaxDuration":   MaxDuration,
		"maxDepth":      maxDepth,
		"maxPlaces":     maxPlaces,
		"maxPartHeader": maxPartHeader,
		"maxCodings":    maxCodings,
		"freeSize":      freeSize,
		"maxRatio":      maxRatio,
		"maxWindow":     maxWindow,
		"SmallBody":     SmallBody,
		"largestKept":   largestKept,
		"memoryBody":    memoryBody,
		"MaxUnloadBody": MaxUnloadBody,
		"MaxServerList": MaxServerList,
		"maxPatterns":   maxPatterns,
	})
}
