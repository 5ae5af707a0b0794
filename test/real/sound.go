//go:build linux

package real

import (
	"bytes"
	"encoding/binary"
	"io"
	"math"
	"mime/multipart"
)

const samplesASecond = 16000 // what whisper hears

// Sound gives seconds of a rising tone as a WAV file.
func Sound(seconds float64) []byte {
	samples := make([]int16, int(seconds*samplesASecond))
	for i := range samples {
		at := float64(i) / samplesASecond
		samples[i] = int16(9000 * math.Sin(2*math.Pi*(200+100*at)*at))
	}
	size := uint32(2 * len(samples))
	var file bytes.Buffer
	for _, part := range []any{
		[]byte("RIFF"), 36 + size, []byte("WAVEfmt "),
		uint32(16), uint16(1), uint16(1), // PCM, one channel
		uint32(samplesASecond), uint32(2 * samplesASecond), uint16(2), uint16(16),
		[]byte("data"), size, samples,
	} {
		_ = binary.Write(&file, binary.LittleEndian, part) // a buffer takes all
	}
	return file.Bytes()
}

// Form gives a multipart form with a file, if there is one, and fields (names and values in turn),
// and its Content-Type.
func Form(file []byte, fields ...string) (io.Reader, string) {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	if file != nil {
		if part, err := form.CreateFormFile("file", "sound.wav"); err == nil {
			_, _ = part.Write(file) // a buffer takes all
		}
	}
	for i := 0; i+1 < len(fields); i += 2 {
		_ = form.WriteField(fields[i], fields[i+1])
	}
	_ = form.Close()
	return &body, form.FormDataContentType()
}
