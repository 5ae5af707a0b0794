package broker

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func names(c *clients) (out []string) {
	for _, k := range c.list() {
		out = append(out, k.Client)
	}
	return out
}

func TestClientsAreCountedAndTheLastSeenComesFirst(t *testing.T) {
	var c clients
	at := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	c.asked("", at)
	require.Equal(t, []Client{}, c.list(), "an empty id is nobody")
	c.asked("a", at)
	c.asked("b", at.Add(time.Second))
	c.asked("a", at.Add(2*time.Second))
	require.Equal(t, []string{"a", "b"}, names(&c))
	c.ended("b", at.Add(3*time.Second), 100*time.Millisecond, 2*time.Second)
	c.ended("b", at.Add(4*time.Second), 300*time.Millisecond, 4*time.Second)
	c.ended("", at, time.Hour, time.Hour)
	c.ended("nobody knows", at, time.Hour, time.Hour)
	require.Equal(t, []Client{
		{Client: "b", Requests: 1, MeanWaitMS: 200, MeanRunMS: 3000, LastSeen: "2026-03-01T00:00:04Z"},
		{Client: "a", Requests: 2, LastSeen: "2026-03-01T00:00:02Z"},
	}, c.list())
}

func TestClientsAreBoundedAndTheOneSeenLongestAgoGoes(t *testing.T) {
	var c clients
	at := time.Now()
	for i := range maxClients {
		c.asked(fmt.Sprint(i), at)
	}
	c.asked("0", at)
	c.ended("1", at, 0, 0)
	long := strings.Repeat("x", 2*maxClientName)
	c.asked(long, at)
	require.Len(t, c.list(), maxClients)
	require.Len(t, c.known, maxClients)
	all := names(&c)
	require.Equal(t, []string{long[:maxClientName], "1", "0"}, all[:3])
	require.NotContains(t, all, "2", "0 and 1 were seen after it")
	require.Contains(t, all, "3")
	c.asked(long+"more", at)
	require.EqualValues(t, 2, c.list()[0].Requests, "so much of an id counts")
}

func TestKnownClientCostsNoMemory(t *testing.T) {
	var c clients
	at := time.Now()
	c.asked("a", at)
	c.asked("b", at)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		c.asked("a", at)
		c.asked("b", at)
		c.ended("a", at, 1, 1)
	}))
}

func TestTheFirstClientGoesFirstWhereNoneCameAgain(t *testing.T) {
	var c clients
	for i := range 256 {
		c.asked(fmt.Sprint(i), time.Unix(int64(i), 0))
	}
	require.Len(t, c.list(), 256)
	for i := range 3 {
		c.asked(fmt.Sprint("new", i), time.Unix(1000, 0))
		require.Len(t, c.list(), 256)
		require.NotContains(t, names(&c), fmt.Sprint(i))
		require.Contains(t, names(&c), fmt.Sprint(i+1))
	}
}

func Test128BytesOfAClientsNameTellItFromOthers(t *testing.T) {
	var c clients
	long := strings.Repeat("x", 127)
	for _, id := range []string{long + "a", long + "b", long + "b" + "more"} {
		c.asked(id, time.Unix(0, 0))
	}
	require.Equal(t, []string{long + "b", long + "a"}, names(&c))
}
