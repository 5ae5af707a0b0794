package httplife

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// look is one probe after an accepted load.
type look struct {
	at     time.Duration
	absent bool
	listed string
	still  time.Duration // -1: not known
	over   bool
}

func TestK1_WhenALoadHasComeToNothing(t *testing.T) {
	const s, ms = time.Second, time.Millisecond
	for name, c := range map[string]struct {
		waits, whole, blind bool
		looks               []look
	}{
		"a call that waits: the list is stable over two looks":     {waits: true, looks: []look{{at: 0, absent: true, listed: "b"}, {at: 100 * ms, absent: true, listed: "b"}, {at: 300 * ms, absent: true, listed: "b", over: true}}},
		"… for a quarter of a second":                              {waits: true, looks: []look{{at: 0, absent: true}, {at: 250*ms - 1, absent: true}, {at: 250 * ms, absent: true, over: true}}},
		"a call that does not wait: the list for ten seconds, too": {looks: []look{{at: 0, absent: true, still: 60 * s}, {at: 10*s - 1, absent: true, still: 60 * s}, {at: 10 * s, absent: true, still: 10*s - 1}, {at: 10 * s, absent: true, still: 10 * s, over: true}}},
		"the list changes":                                  {waits: true, looks: []look{{at: 0, absent: true, listed: "b"}, {at: 300 * ms, absent: true, listed: "c"}, {at: 500 * ms, absent: true, listed: "c"}, {at: 600 * ms, absent: true, listed: "c", over: true}}},
		"the server does not say in between":                {waits: true, looks: []look{{at: 0, absent: true, listed: "b"}, {at: 300 * ms}, {at: 400 * ms, absent: true, listed: "b"}, {at: 700 * ms, absent: true, listed: "b", over: true}}},
		"a server as a whole":                               {waits: true, whole: true, looks: []look{{at: 0, absent: true}, {at: 300 * ms, absent: true, over: true}}},
		"a call that does not wait: the memory still moves": {looks: []look{{at: 0, absent: true}, {at: 30 * s, absent: true, still: 9 * s}, {at: 31 * s, absent: true, still: 10 * s, over: true}}},
		"… and it stood still before the call":              {looks: []look{{at: 0, absent: true, still: 60 * s}, {at: 9 * s, absent: true, still: 69 * s}, {at: 10 * s, absent: true, still: 70 * s, over: true}}},
		"… and the memory is not known":                     {looks: []look{{at: 0, absent: true, still: -1}, {at: 60 * s, absent: true, still: -1}}},
		"… nor can it be":                                   {blind: true, looks: []look{{at: 0, absent: true}, {at: 60 * s, absent: true}}},
		"… and a server as a whole may take its time":       {whole: true, looks: []look{{at: 0, absent: true, still: 60 * s}, {at: 60 * s, absent: true, still: 120 * s}}},
	} {
		var still time.Duration
		o := outcome{waits: c.waits, model: !c.whole, still: func() (time.Duration, bool) { return still, still >= 0 }}
		if c.blind {
			o.still = nil
		}
		began := time.Unix(1e9, 0)
		for _, l := range c.looks {
			still = l.still
			require.Equal(t, l.over, o.toNothing(began.Add(l.at), l.absent, []lifecycle.Model{{Name: l.listed}}), "%s, at %s", name, l.at)
		}
	}
}

func TestTheMemoryOfAllModelsIsKnownOnlyIfThatOfEachIs(t *testing.T) {
	for _, c := range []struct {
		holds []gpu.Bytes
		want  gpu.Bytes
	}{
		{nil, -1}, {[]gpu.Bytes{5}, 5}, {[]gpu.Bytes{5, 7}, 12}, {[]gpu.Bytes{0}, 0}, {[]gpu.Bytes{0, 7}, 7}, {[]gpu.Bytes{5, -1}, -1}, {[]gpu.Bytes{-1, 5}, -1},
	} {
		var models []lifecycle.Model
		for _, holds := range c.holds {
			models = append(models, lifecycle.Model{Resident: holds})
		}
		require.Equal(t, c.want, sumOf(models), "%v", c.holds)
	}
}
