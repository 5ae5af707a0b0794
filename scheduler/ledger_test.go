package scheduler

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// Entries of the golden vectors; all amounts are MiB.
func ready(b, drop gpu.Bytes) Entry { return Entry{State: Ready, Booking: b, Drop: drop} }
func settledReady(b gpu.Bytes) Entry {
	return Entry{State: Ready, Booking: b, Settled: true}
}
func measuredReady(b, m gpu.Bytes) Entry {
	return Entry{State: Ready, Booking: b, Measured: m, HasMeasured: true}
}
func loading(b, drop gpu.Bytes) Entry { return Entry{State: Loading, Booking: b, Drop: drop} }
func unknown(b gpu.Bytes) Entry       { return Entry{State: Unknown, Booking: b} }
func stoppingAt(b gpu.Bytes) Entry    { return Entry{State: Stopping, Booking: b, Settled: true} }
func idle(r gpu.Bytes) Entry          { return Entry{State: Idle, Residue: r} }

// The golden vectors of accounting §1.
func TestGoldenVectorsOfTheLedger(t *testing.T) {
	for _, v := range []struct {
		name     string
		t, f, r  gpu.Bytes
		others   []Entry
		rt       gpu.Bytes
		u, o, sb gpu.Bytes
		a        gpu.Bytes
	}{
		{"1 empty", 24576, 24000, 0, nil, 0, 576, 576, 0, 24000},
		{"2 founding case", 16384, 2772, 0, []Entry{measuredReady(13312, 13312)}, 0, 13612, 300, 13312, 2772},
		{"3 lazy server", 24576, 22176, 0, []Entry{ready(13312, 2000)}, 0, 2400, 400, 13312, 10864},
		{"4 settled, unmeasured", 24576, 19576, 0, []Entry{settledReady(13312)}, 0, 5000, 0, 13312, 11264},
		{"5 loading", 24576, 20180, 0, []Entry{loading(10240, 4096)}, 0, 4396, 300, 10240, 14036},
		{"6 unknown and loaded", 24576, 15076, 0, []Entry{unknown(9216)}, 0, 9500, 284, 9216, 15076},
		{"7 unknown and not loaded", 24576, 24276, 0, []Entry{unknown(9216)}, 0, 300, 0, 9216, 15360},
		{"8 a game beside us", 24576, 4820, 0, []Entry{measuredReady(10240, 10240)}, 0, 19756, 9516, 10240, 4820},
		{"9 the target's own context", 16384, 2560, 0, []Entry{measuredReady(13312, 13312)}, 512, 13824, 0, 13312, 2560},
		{"10 grew above its claim", 24576, 15276, 0, []Entry{measuredReady(9000, 9000)}, 0, 9300, 300, 9000, 15276},
		{"11 overcommitted by adoption", 24576, 4576, 0, []Entry{settledReady(14336), settledReady(14336)}, 0, 20000, 0, 28672, -4096},
		{"12 reserve", 24576, 23200, 1024, nil, 0, 1376, 1376, 0, 22176},
		{"13 stopping", 24576, 11264, 0, []Entry{stoppingAt(13312)}, 0, 13312, 0, 13312, 11264},
		{"14 two others, one loading", 24576, 13736, 0, []Entry{measuredReady(6144, 5800), loading(8192, 4740)}, 0, 10840, 300, 14336, 9940},
		{"15 another's residue is booked", 24576, 17576, 0, []Entry{idle(1000), settledReady(10000)}, 0, 7000, 0, 11000, 13576},
		{"16 two unknown", 24576, 15076, 0, []Entry{unknown(9216), unknown(4096)}, 0, 9500, 0, 13312, 11264},
	} {
		t.Run(v.name, func(t *testing.T) {
			c := Card{Total: v.t, Free: v.f, Reserve: v.r, Known: true}
			for target := range len(v.others) + 1 { // wherever the target stands in the config
				var entries []Entry
				entries = append(entries, v.others[:target]...)
				entries = append(entries, idle(v.rt))
				entries = append(entries, v.others[target:]...)
				l := account(c, entries, nil)
				require.Equal(t, [4]gpu.Bytes{v.u, v.o, v.sb, v.a}, [4]gpu.Bytes{l.Used, l.Outsiders, l.Booked - v.rt, l.available(c, entries, target)}, "U, O, Σ b, A with the target at %d", target)
			}
			if v.rt == 0 { // a newcomer that isn't in the account yet
				require.Equal(t, v.a, account(c, v.others, nil).available(c, v.others, -1))
			}
		})
	}
}

func TestTheFoundingCaseOfTheVectorsMustEvict(t *testing.T) {
	const available = 2772
	require.Greater(t, gpu.Bytes(2868)-held(0, 0, false, true, 0)+256, gpu.Bytes(available))
}

func TestATargetsOwnContextCountsForIt(t *testing.T) {
	r := held(512*gpu.MiB, 0, false, true, 600*gpu.MiB)
	need := 2868*gpu.MiB - r + defaultCushion
	require.Equal(t, 2612*gpu.MiB, need)
	require.Greater(t, need, 2560*gpu.MiB, "vector 9 must evict all the same")
}

func TestSeenIsGivenOutByTheFirstRuleThatApplies(t *testing.T) {
	c := Card{Total: 24576, Free: 10576, Known: true} // U = 14000
	for _, v := range []struct {
		name    string
		entries []Entry
		seen    []gpu.Bytes
	}{
		{"measured goes before everything, in every state", []Entry{
			measuredReady(100, 70), {State: Idle, Residue: 9, Measured: 5, HasMeasured: true}, {State: Unknown, Booking: 100, Measured: 40, HasMeasured: true},
			{State: Loading, Booking: 100, Drop: 90, Measured: 30, HasMeasured: true}, {State: Stopping, Booking: 100, Measured: 20, HasMeasured: true},
		}, []gpu.Bytes{70, 5, 40, 30, 20}},
		{"a drop counts up to the booking, and never below nothing", []Entry{loading(100, 300), loading(100, -300), ready(100, 300), ready(100, -1)}, []gpu.Bytes{100, 0, 100, 0}},
		{"settled and stopping slots have what they are booked for", []Entry{settledReady(100), stoppingAt(200)}, []gpu.Bytes{100, 200}},
		{"idle slots have their residue", []Entry{idle(7)}, []gpu.Bytes{7}},
		{"unknown slots get what is left, in the order of the config", []Entry{unknown(5000), settledReady(4000), unknown(9000), unknown(100)}, []gpu.Bytes{5000, 4000, 5000, 0}},
	} {
		t.Run(v.name, func(t *testing.T) {
			require.Equal(t, v.seen, account(c, v.entries, nil).Seen)
		})
	}
}

func TestAGrowthOfAnotherIsKeptFreeForIt(t *testing.T) {
	c := Card{Total: 24576, Free: 24576, Known: true}
	entries := []Entry{loading(10240, 0)}
	require.Equal(t, gpu.Bytes(14336), account(c, entries, nil).available(c, entries, -1))
	entries = []Entry{measuredReady(8192, 9000)} // seen above its booking: nothing more is kept, nothing is given
	c.Free = 15576
	require.Equal(t, gpu.Bytes(15576), account(c, entries, nil).available(c, entries, -1))
}

func TestWithoutTelemetryBookingsAreAllThatIsKnown(t *testing.T) {
	c := Card{Total: 24576, Free: -1, Reserve: 1024} // Free is meaningless
	entries := []Entry{ready(8192, 0), unknown(4096), idle(512), idle(300)}
	l := account(c, entries, nil)
	require.Equal(t, gpu.Bytes(0), l.Outsiders)
	require.Equal(t, gpu.Bytes(8192+4096+512+300), l.Booked)
	require.Equal(t, l.Booked, l.Used)
	require.Equal(t, gpu.Bytes(24576-8192-4096-512-300-1024), l.available(c, entries, 3))
	require.Equal(t, gpu.Bytes(24576-1024), Ledger{}.available(Card{Total: 24576, Reserve: 1024}, nil, -1))
}

func TestOnlyALivingProcessUsesItsResidueAgain(t *testing.T) {
	for _, v := range []struct {
		name              string
		residue, measured gpu.Bytes
		hasMeasured       bool
		lives             bool
		residual          gpu.Bytes
		want              gpu.Bytes
	}{
		{"a dead process holds nothing for its successor", 512, 512, true, false, 600, 0},
		{"unmeasured, at most what the preset says", 900, 0, false, true, 600, 600},
		{"unmeasured, at most what is there", 400, 0, false, true, 600, 400},
		{"unmeasured, and the preset says nothing", 400, 0, false, true, 0, 0},
		{"measured, whatever the preset says", 900, 900, true, true, 600, 900},
	} {
		t.Run(v.name, func(t *testing.T) {
			require.Equal(t, v.want, held(v.residue, v.measured, v.hasMeasured, v.lives, v.residual))
		})
	}
}
