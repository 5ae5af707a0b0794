package process

import (
	"bufio"
	"bytes"
	"io"
	"strings"
	"sync"
	"unicode"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

const (
	maxLine = 4 << 10 // of a line of output, in bytes; the rest of a longer one is dropped
	// maxLogging bounds the lines that wait for a slow log: more are dropped, since the server must not wait.
	maxLogging = 1024
	// maxLast bounds the line that says why a server ended, in bytes.
	maxLast = 200
)

// output keeps the last lines of a server and logs them all. It never makes the server wait.
type output struct {
	redact  func(string) string
	longest int // of what redact hides
	log     *zap.Logger

	readers sync.WaitGroup
	queue   chan line
	written chan struct{} // closed once the log has them all

	mu      sync.Mutex
	kept    []string // the last ones; a ring once it is full
	oldest  int
	last    string // the last that is not blank
	dropped int    // not logged, as the log is too slow
}

type line struct{ stream, text string }

func newOutput(p *plan, log *zap.Logger) *output {
	return &output{redact: p.redact, longest: p.longest, log: log, queue: make(chan line, maxLogging), written: make(chan struct{})}
}

// read starts to read the streams. done is closed at the end of all of them.
func (o *output) read(streams map[string]io.Reader) (done <-chan struct{}) {
	for name, r := range streams {
		o.readers.Go(func() { o.lines(name, r) })
	}
	ended := make(chan struct{})
	go func() {
		o.readers.Wait()
		close(ended)
		close(o.queue)
	}()
	go o.write()
	return ended
}

// lines reads a stream to its end. A carriage return takes the line back to
// its beginning, as on a screen: of a progress bar only the last state is kept.
func (o *output) lines(stream string, r io.Reader) {
	in := bufio.NewReaderSize(r, 64<<10)
	// A secret must not be cut before it is found.
	most := maxLine + o.longest
	current := make([]byte, 0, most)
	returned := false
	for {
		b, err := in.ReadByte()
		switch {
		case err != nil:
			if len(current) > 0 {
				o.add(stream, current)
			}
			return
		case b == '\n':
			o.add(stream, current)
			current, returned = current[:0], false
			continue
		case returned && b != '\r':
			current = current[:0]
		}
		if returned = b == '\r'; !returned && len(current) < most {
			current = append(current, b)
		}
	}
}

// add takes in a line.
func (o *output) add(stream string, raw []byte) {
	text := o.redact(strings.ToValidUTF8(string(bytes.TrimRight(raw, " \t")), "?"))
	most := maxLine
	if len(raw) == maxLine+o.longest { // it was cut, perhaps within a secret, and what is hidden before that has made it shorter
		most = min(most, max(0, len(text)-o.longest))
	}
	text = strings.Map(func(r rune) rune {
		if r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return -1 // what would move the cursor of who reads it
	}, shortened(text, most))
	o.mu.Lock()
	if len(o.kept) < lifecycle.MaxOutput {
		o.kept = append(o.kept, text)
	} else {
		o.kept[o.oldest] = text
		o.oldest = (o.oldest + 1) % lifecycle.MaxOutput
	}
	if strings.TrimSpace(text) != "" {
		o.last = text
	}
	o.mu.Unlock()
	select {
	case o.queue <- line{stream, text}:
	default:
		o.mu.Lock()
		o.dropped++
		o.mu.Unlock()
	}
}

// write logs the lines.
func (o *output) write() {
	defer close(o.written)
	for l := range o.queue {
		o.log.Info("output of the server", zap.String("stream", l.stream), zap.String("line", l.text))
		if len(o.queue) == 0 {
			o.tellDropped()
		}
	}
	o.tellDropped()
}

func (o *output) tellDropped() {
	o.mu.Lock()
	n := o.dropped
	o.dropped = 0
	o.mu.Unlock()
	if n > 0 {
		o.log.Warn("the log is slower than the server's output: lines are left out", zap.Int("lines", n))
	}
}

// lastLine is the last line that is not blank, short.
func (o *output) lastLine() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return shortened(o.last, maxLast)
}

func shortened(text string, most int) string {
	if len(text) > most {
		return strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

// tail is the last lines, oldest first.
func (o *output) tail() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append(append(make([]string, 0, len(o.kept)), o.kept[o.oldest:]...), o.kept[:o.oldest]...)
}
