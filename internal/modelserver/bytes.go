package modelserver

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
)

// Audio is what GET /audio/big answers, without end. Each byte depends on its
// place, so that a hole or a swap shows.
func Audio() io.Reader { return newPattern(0) }

// AudioBytes is what GET /audio/big?bytes=N answers.
func AudioBytes(n int64) []byte {
	out := make([]byte, n)
	_, _ = io.ReadFull(Audio(), out) // it never ends and never fails
	return out
}

// SynthesizeBytes is what POST /synthesize answers to body: a quarter of a
// second of sound, as WAV, whose pitch depends on the body.
func SynthesizeBytes(body []byte) []byte {
	const rate, samples = 16000, 4000
	sum := sha256.Sum256(body)
	period := 40 + int(sum[0])%80
	pcm := make([]byte, 0, 2*samples)
	for i := range samples {
		phase := i % period
		level := int16(phase*16000/period - 8000)
		pcm = binary.LittleEndian.AppendUint16(pcm, uint16(level))
	}
	out := []byte("RIFF")
	out = binary.LittleEndian.AppendUint32(out, uint32(36+len(pcm)))
	out = append(out, "WAVEfmt "...)
	out = binary.LittleEndian.AppendUint32(out, 16)
	out = binary.LittleEndian.AppendUint16(out, 1) // PCM
	out = binary.LittleEndian.AppendUint16(out, 1) // mono
	out = binary.LittleEndian.AppendUint32(out, rate)
	out = binary.LittleEndian.AppendUint32(out, 2*rate)
	out = binary.LittleEndian.AppendUint16(out, 2)
	out = binary.LittleEndian.AppendUint16(out, 16)
	out = append(out, "data"...)
	out = binary.LittleEndian.AppendUint32(out, uint32(len(pcm)))
	return append(out, pcm...)
}

// StreamBytes is what /stream?events=N answers.
func StreamBytes(events int) []byte {
	var out []byte
	for i := range events {
		out = append(out, streamEvent(i)...)
	}
	return append(out, streamEnd...)
}

const streamEnd = "data: [DONE]\n\n"

func streamEvent(i int) string {
	sum := sha256.Sum256([]byte{byte(i), byte(i >> 8), byte(i >> 16)})
	return fmt.Sprintf("id: %d\nevent: token\ndata: {\"index\":%d,\"text\":\"%s\"}\n\n", i, i, hex.EncodeToString(sum[:8]))
}

// pattern is an endless Reader of deterministic bytes (splitmix64).
type pattern struct {
	state uint64
	rest  []byte
}

func newPattern(seed uint64) *pattern { return &pattern{state: seed} }

func (p *pattern) Read(out []byte) (int, error) {
	n := copy(out, p.rest)
	p.rest = p.rest[n:]
	state := p.state
	for ; len(out)-n >= 8; n += 8 {
		state += step
		binary.LittleEndian.PutUint64(out[n:], mixed(state))
	}
	if n < len(out) {
		state += step
		p.rest = binary.LittleEndian.AppendUint64(p.rest[:0], mixed(state))
		p.rest = p.rest[copy(out[n:], p.rest):]
	}
	p.state = state
	return len(out), nil
}

const step = 0x9e3779b97f4a7c15

func mixed(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
