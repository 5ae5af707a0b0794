package routing

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// ErrEncoding is the error of a body whose content coding can't be decoded.
var ErrEncoding = errors.New("the request body has an unknown Content-Encoding")

// Bounds of encoded bodies.
const (
	// maxCodings is how many codings may be applied to one body.
	maxCodings = 3
	// A body may decode to freeSize bytes, and beyond that to maxRatio times its size. Text that repeats itself comes to
	// 10 to 50 times; what is made to fill memory to 1,000 times and more.
	freeSize = 1 << 20
	maxRatio = 200
	// maxWindow is how much memory a decoder of zstd may take for what it has decoded, in bytes: what RFC 8878 asks
	// decoders to support.
	maxWindow = 8 << 20
)

// decoders bounds how many bodies are decoded at once: each takes some MiB of memory, and one core.
var decoders = make(chan struct{}, max(2, runtime.GOMAXPROCS(0)))

// contentCodings are the codings of a body in the order in which they were applied. Its error is an ErrEncoding.
func contentCodings(h http.Header) (codings []string, _ error) {
	for _, line := range h["Content-Encoding"] {
		for coding := range strings.SplitSeq(line, ",") {
			switch coding = strings.ToLower(strings.TrimSpace(coding)); coding {
			case "", "identity":
			case "gzip", "x-gzip", "deflate", "zstd", "br":
				codings = append(codings, coding)
			default:
				return nil, fmt.Errorf("%w: %.64q; gzip, deflate, zstd and br are known", ErrEncoding, coding)
			}
		}
	}
	if len(codings) > maxCodings {
		return nil, fmt.Errorf("%w: it is encoded %d times, at most %d are decoded", ErrEncoding, len(codings), maxCodings)
	}
	return codings, nil
}

// decode is the body without its codings.
//
// Errors: *BadBody, ErrTooLarge, ErrNoRoom, ErrSpill, or that ctx has ended.
func (y *Body) decode(ctx context.Context, codings []string) (*Body, error) {
	select {
	case decoders <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { <-decoders }()
	most := min(y.limits.Body, max(freeSize, y.size*maxRatio))
	from := io.MultiReader(y.part(0, y.size)...)
	for i := len(codings) - 1; i >= 0; i-- {
		layer, err := newDecoder(ctx, codings[i], from)
		if err != nil {
			return nil, codingError(codings[i], err)
		}
		defer layer.close()
		layer.left = most
		from = layer
	}
	out := bodies.Get().(*Body)
	out.buffers, out.limits = y.buffers, y.limits
	err := out.fill(from, Limits{Body: most, Total: y.limits.Total, Client: y.limits.Client})
	switch {
	case err == nil:
		return out, nil
	case errors.Is(err, ErrTooLarge) && most < y.limits.Body:
		err = fmt.Errorf("%w: its %d bytes decode to more than %d", ErrTooLarge, y.size, most)
	}
	out.Recycle()
	return nil, err
}

// decoder takes one coding off.
type decoder struct {
	io.Reader
	coding string
	in     *bufio.Reader // what it decodes
	left   int64         // how much may come out
	close  func()
	ended  func() error // reports why the request has ended; nil while it goes on
}

func newDecoder(ctx context.Context, coding string, from io.Reader) (*decoder, error) {
	d := &decoder{coding: coding, in: bufio.NewReader(from), close: func() {}, ended: ctx.Err}
	var err error
	switch coding {
	case "gzip", "x-gzip":
		d.Reader, err = gzip.NewReader(d.in)
	case "deflate": // which is zlib's form, though some send it without
		start, _ := d.in.Peek(2)
		if len(start) == 2 && start[0]&0xF == 8 && (int(start[0])<<8|int(start[1]))%31 == 0 {
			d.Reader, err = zlib.NewReader(d.in)
		} else {
			d.Reader = flate.NewReader(d.in)
		}
	case "br":
		d.Reader = brotli.NewReader(d.in)
	case "zstd":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(d.in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow)); err == nil {
			d.Reader, d.close = z, z.Close
		}
	}
	return d, err
}

// Read bounds what comes out, and refuses what follows the end.
func (d *decoder) Read(p []byte) (int, error) {
	if err := d.ended(); err != nil {
		return 0, err
	}
	n, err := d.Reader.Read(p)
	if d.left -= int64(n); d.left < 0 {
		return 0, fmt.Errorf("%w: it decodes to more than can be taken", ErrTooLarge)
	}
	if err == io.EOF {
		if _, more := d.in.ReadByte(); more != io.EOF {
			return n, codingError(d.coding, errors.New("something follows its end"))
		}
		return n, io.EOF
	}
	if err != nil {
		err = codingError(d.coding, err)
	}
	return n, err
}

// codingError is the error of a body that is not encoded as it says.
func codingError(coding string, err error) error {
	var fault *BadBody
	switch {
	case errors.As(err, &fault), errors.Is(err, ErrTooLarge), errors.Is(err, ErrSpill):
		return err
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return bad("it is no valid %s: it ends too soon", coding)
	}
	return bad("it is no valid %s: %v", coding, err)
}
