package broker

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

func TestTheRecordKeepsTheLatestDecisionsInBothOrders(t *testing.T) {
	for _, n := range []int{0, 1, ringSize - 1, ringSize, ringSize + 1, 2*ringSize + 7} {
		var r ring
		for i := range n {
			r.add(scheduler.Decision{Reason: strconv.Itoa(i)})
		}
		kept := min(n, ringSize)
		list := r.list()
		require.Len(t, list, kept)
		back := 0
		for d := range r.latest {
			require.Equal(t, strconv.Itoa(n-1-back), d.Reason)
			require.Equal(t, list[kept-1-back], *d)
			back++
		}
		require.Equal(t, kept, back)
	}
}

func TestTheLogOfADecisionHasWhatIsKnownOfItAtItsLevel(t *testing.T) {
	core, logs := observer.New(zapcore.DebugLevel)
	log := zap.New(core)
	logDecision(log, scheduler.Decision{Kind: "loaded", Slot: "a", GPU: 1, Reason: "it is wanted"})
	logDecision(log, scheduler.Decision{Kind: "refuse", Slot: "a", GPU: 0, Reason: "no room", Code: scheduler.VRAMExhausted, Target: "b", Took: 0.5})
	all := logs.TakeAll()
	require.Equal(t, map[string]any{"consumer": "a", "gpu": int64(1), "reason": "it is wanted"}, all[0].ContextMap(), "nothing else is known")
	require.Equal(t, map[string]any{"consumer": "a", "gpu": int64(0), "reason": "no room", "for": "b", "code": string(scheduler.VRAMExhausted), "took": 500 * time.Millisecond}, all[1].ContextMap())
	for kind, level := range map[string]zapcore.Level{
		"bug":    zapcore.ErrorLevel,
		"refuse": zapcore.WarnLevel, "short_budget": zapcore.WarnLevel, "claim_raised": zapcore.WarnLevel, "load_failed": zapcore.WarnLevel,
		"unload_failed": zapcore.WarnLevel, "unhealthy": zapcore.WarnLevel, "gpu_lost": zapcore.WarnLevel, "telemetry_lost": zapcore.WarnLevel,
		"load": zapcore.InfoLevel, "evicted": zapcore.InfoLevel,
	} {
		logDecision(log, scheduler.Decision{Kind: kind})
		said := logs.TakeAll()
		require.Len(t, said, 1)
		require.Equal(t, level, said[0].Level, kind)
		require.Equal(t, kind, said[0].Message)
	}
}
