package e2e

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// manyNames is a site in which one ollama with the models m, n and o stands under several names, in this order, beside the server tts.
func manyNames(t *testing.T, names ...[2]string) *site {
	t.Helper()
	var global, routes strings.Builder
	last := names[len(names)-1]
	for _, c := range names[:len(names)-1] {
		fmt.Fprintf(&global, "consumer %s {\npreset ollama\nupstream UPSTREAM_OF_%s\nvram 5GiB\n%s\n}\n", c[0], last[0], c[1])
		fmt.Fprintf(&routes, "handle_path /%s/* {\ngpu_broker %s\nreverse_proxy {http.gpu_broker.upstream}\n}\n", c[0], c[0])
	}
	return start(t, layout{
		Consumers: []consumer{
			shelf(last[0], modelserver.Ollama, "vram 5GiB\n"+last[1], map[string]float64{"m": 5, "n": 5, "o": 5}),
			{Options: modelserver.Options{Name: "tts", VRAM: gib(8)}},
		},
		Global: global.String(), Routes: routes.String(),
	})
}

// probed waits until each consumer of the server has asked it what it holds.
func (s *site) probed(server string, consumers int) {
	s.t.Helper()
	asked := s.servers[server].Stats().Requests["/api/ps"]
	s.until("all have asked", func() bool { return s.servers[server].Stats().Requests["/api/ps"] > asked+2*consumers })
}

func (s *site) slotNames(consumers ...string) (out []string) {
	status := s.status()
	for _, name := range consumers {
		for _, sl := range status.Consumers[name].Slots {
			out = append(out, name+"/"+sl.Model)
		}
	}
	return slices.Sorted(slices.Values(out))
}

func TestK7_OfThreeNamesForOneServerNoneTakesWhatAnotherPins(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		names [][2]string
		chat  [2]string // whose pinned model
		slots []string
	}{
		"three with models":    {[][2]string{{"two", "model n"}, {"three", "model o {\npin\n}"}, {"one", "model m"}}, [2]string{"three", "o"}, []string{"one/m", "three/o", "two/n"}},
		"one of them without":  {[][2]string{{"aaa", ""}, {"two", "model n"}, {"one", "model m {\npin\n}"}}, [2]string{"one", "m"}, []string{"one/m", "two/n"}},
		"one model, two names": {[][2]string{{"two", "model n\nmodel m"}, {"one", "model o\nmodel m {\npin\n}"}}, [2]string{"two", "m"}, []string{"one/o", "two/m", "two/n"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := manyNames(t, tc.names...)
			a := s.chat(tc.chat[0], tc.chat[1])
			require.Equal(t, 200, a.status, "%s", a.body)
			s.probed("one", len(tc.names))
			var names []string
			for _, c := range tc.names {
				if c[1] != "" {
					names = append(names, c[0])
				}
			}
			assert.Equal(t, tc.slots, s.slotNames(names...))
			a = s.post("/tts/work", "{}")
			assert.Equal(t, 200, a.status, "%s", a.body)
			assert.Zero(t, s.servers["one"].Stats().Unloads)
			assert.Empty(t, s.decisions("evicted"))
		})
	}
}

func TestK7_ANameWithoutModelsSharesNoServerThatIsSwitchedOff(t *testing.T) {
	t.Parallel()
	s := manyNames(t, [2]string{"aaa", ""}, [2]string{"zzz", ""}, [2]string{"one", "model m {\npin\n}"})
	a := s.chat("one", "m")
	require.Equal(t, 200, a.status, "%s", a.body)
	for _, name := range []string{"aaa", "zzz"} {
		a := s.chat(name, "n")
		assert.Equal(t, 503, a.status, "%s", a.body)
		assert.Contains(t, string(a.body), `consumer \"`+name+`\" is switched off`)
	}
	a = s.post("/tts/work", "{}")
	require.Equal(t, 200, a.status, "%s", a.body)
	assert.Zero(t, s.servers["one"].Stats().Unloads)
	log := s.log()
	for _, name := range []string{"aaa", "zzz"} {
		assert.Contains(t, log, "Write a model line at one for what "+name+" stands for. Until then requests for "+name+" are refused")
	}

	shared := manyNames(t, [2]string{"aaa", ""}, [2]string{"zzz", ""}, [2]string{"one", ""})
	for _, name := range []string{"aaa", "zzz", "one"} {
		a := shared.chat(name, "m")
		assert.Equal(t, 200, a.status, "%s: %s", name, a.body)
	}
	for _, name := range []string{"zzz", "one"} {
		assert.Equal(t, "aaa", shared.status().Consumers[name].Shares, name)
	}
}

func TestK7_AServerIsOneByWhateverNameItsMachineGoes(t *testing.T) {
	t.Parallel()
	own, err := os.Hostname()
	require.NoError(t, err)
	s := start(t, layout{Consumers: []consumer{
		{Options: modelserver.Options{Name: "one", VRAM: gib(5)}, Lines: "pin"},
		{Options: modelserver.Options{Name: "tts", VRAM: gib(8)}},
	}})
	_, port, err := net.SplitHostPort(s.servers["one"].Addr())
	require.NoError(t, err)
	names := []string{own, "ip6-loopback", "localhost.localdomain", "127.1", "127.0.1.1"}
	a := s.reload(func(text string) string {
		for i, name := range names {
			two := fmt.Sprintf("consumer two%d {\nupstream %s:%s\nvram 5GiB\n%s\n}\n", i, name, port, manners[""])
			text = strings.Replace(text, "consumer tts {", two+"consumer tts {", 1)
		}
		return text
	})
	require.Equal(t, 200, a.status, "%s", a.body)
	for i, name := range names {
		assert.Equal(t, "one", s.status().Consumers[fmt.Sprintf("two%d", i)].Shares, name)
	}
	a = s.post("/one/work", "{}")
	require.Equal(t, 200, a.status, "%s", a.body)
	a = s.post("/tts/work", "{}")
	require.Equal(t, 200, a.status, "%s", a.body)
	assert.Zero(t, s.servers["one"].Stats().UnloadCalls)
}
