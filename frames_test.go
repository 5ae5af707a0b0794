package gpubroker

import (
	"bytes"
	"encoding/binary"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

// frame is one of a WebSocket.
func frame(fromClient bool, first byte, payload int) []byte {
	mask := byte(0)
	if fromClient {
		mask = 0x80
	}
	b := []byte{first}
	switch {
	case payload < 126:
		b = append(b, mask|byte(payload))
	case payload < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, mask|126), uint16(payload))
	default:
		b = binary.BigEndian.AppendUint64(append(b, mask|127), uint64(payload))
	}
	if fromClient {
		b = append(b, 0x89, 0x8A, 0x81, 0x88)
	}
	return append(b, bytes.Repeat([]byte{0x89}, payload)...)
}

const (
	fin, rsv1                       = 0x80, 0x40
	proceeds, textual, binaryOpcode = 0, 1, 2
	closes, pings, pongs            = 8, 9, 10
)

func TestH6_OnlyFramesThatAreNoControlFramesAreUse(t *testing.T) {
	for _, fromClient := range []bool{false, true} {
		var stream []byte
		use := 0
		for _, c := range []struct {
			first   byte
			payload int
		}{
			{fin | pings, 0}, {fin | textual, 5}, {fin | pongs, 125}, {textual, 0}, {fin | pings, 4}, {proceeds, 126},
			{fin | proceeds, 300}, {fin | rsv1 | binaryOpcode, 70000},
			{fin | pings, 1}, {fin | textual, 1}, {fin | closes, 2},
		} {
			f := frame(fromClient, c.first, c.payload)
			if stream = append(stream, f...); c.first&0xF < 8 {
				use += len(f)
			}
		}
		require.Equal(t, use, (&frames{fromClient: fromClient}).used(stream))
		for at := range stream {
			if at > 2000 && at < len(stream)-100 {
				continue
			}
			f := &frames{fromClient: fromClient}
			require.Equal(t, use, f.used(stream[:at])+f.used(stream[at:]), at)
		}
		f, n := &frames{fromClient: fromClient}, 0
		for i := range stream {
			n += f.used(stream[i : i+1])
		}
		require.Equal(t, use, n, "byte by byte")
		require.Zero(t, testing.AllocsPerRun(10, func() { f.used(stream) }))
	}
}

func TestH6_WhatIsNoFrameCountsWhole(t *testing.T) {
	ping := frame(false, fin|pings, 3)
	for name, c := range map[string]struct {
		fromClient bool
		stream     []byte
		ignored    int
	}{
		"text":                          {false, []byte("HTTP/1.1 200 OK"), 0},
		"after a ping":                  {false, append(bytes.Clone(ping), 0xFF, 0, 0), len(ping)},
		"a ping in two pieces":          {false, []byte{pings, 1, 0}, 0},
		"a ping of an extension":        {false, []byte{fin | rsv1 | pings, 1, 0}, 0},
		"a control frame of no kind":    {false, []byte{fin | 11, 1, 0}, 0},
		"a frame of no kind":            {false, []byte{fin | 3, 1, 0}, 0},
		"a long ping":                   {false, frame(false, fin|pings, 126), 1},
		"a masked ping of the server":   {false, frame(true, fin|pings, 1), 1},
		"a ping of the client unmasked": {true, ping, 1},
		"a length of 64 bits":           {false, []byte{fin | textual, 127, 0x80, 0, 0, 0, 0, 0, 0, 0, fin | pings, 0}, 0},
	} {
		f := &frames{fromClient: c.fromClient}
		require.Equal(t, len(c.stream)-c.ignored, f.used(c.stream), name)
		require.Equal(t, len(ping), f.used(ping), "%s: nothing after it is a frame", name)
	}
}

func FuzzFramesAreTheSameHoweverTheyAreSplit(f *testing.F) {
	f.Add(append(frame(true, fin|pings, 4), frame(true, fin|textual, 130)...), true, uint16(7))
	f.Add(frame(false, fin|textual, 70000), false, uint16(9))
	f.Fuzz(func(t *testing.T, stream []byte, fromClient bool, at uint16) {
		whole := (&frames{fromClient: fromClient}).used(stream)
		require.LessOrEqual(t, whole, len(stream))
		split, one := &frames{fromClient: fromClient}, &frames{fromClient: fromClient}
		cut := min(int(at), len(stream))
		require.Equal(t, whole, split.used(stream[:cut])+split.used(stream[cut:]))
		n := 0
		for i := range stream {
			n += one.used(stream[i : i+1])
		}
		require.Equal(t, whole, n)
	})
}

func TestH6_AWebSocketOverHTTP2AndHTTP3IsKnown(t *testing.T) {
	connect := func(proto string, h http.Header) *http.Request {
		return &http.Request{Method: http.MethodConnect, Proto: proto, Header: h}
	}
	require.True(t, isWebSocket(connect("HTTP/2.0", http.Header{":protocol": {"websocket"}})))
	require.True(t, isWebSocket(connect("websocket", nil)))
	require.False(t, isWebSocket(connect("HTTP/2.0", nil)))
	require.False(t, isWebSocket(connect("HTTP/2.0", http.Header{":protocol": {"connect-udp"}})))
	require.False(t, isWebSocket(&http.Request{Method: http.MethodGet, Proto: "websocket"}))
}
