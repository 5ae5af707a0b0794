package httplife

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestNetworkErrorsAreClassified(t *testing.T) {
	d := newDriver(&plan{secrets: new(secretSet).redactor()}, lifecycle.Deps{Upstream: "gpu-box:8766"})
	dial := func(err error) error {
		return &url.Error{Op: "Get", URL: "http://gpu-box:8766/?key=hidden", Err: &net.OpError{Op: "dial", Net: "tcp", Err: err}}
	}
	for name, c := range map[string]struct {
		err  error
		want lifecycle.Outcome
		is   error
	}{
		"refused":          {dial(os.NewSyscallError("connect", syscall.ECONNREFUSED)), lifecycle.Refused, lifecycle.ErrRefused},
		"host unreachable": {dial(os.NewSyscallError("connect", syscall.EHOSTUNREACH)), lifecycle.Unreachable, lifecycle.ErrUnreachable},
		"net unreachable":  {dial(os.NewSyscallError("connect", syscall.ENETUNREACH)), lifecycle.Unreachable, lifecycle.ErrUnreachable},
		"no such host":     {dial(&net.DNSError{Name: "gpu-box", IsNotFound: true}), lifecycle.Unreachable, lifecycle.ErrUnreachable},
		"no name server":   {dial(&net.DNSError{UnwrapErr: syscall.ECONNREFUSED}), lifecycle.Unreachable, lifecycle.ErrUnreachable},
		"name server slow": {dial(&net.DNSError{Err: "i/o timeout", Name: "gpu-box", IsTimeout: true}), lifecycle.TimedOut, context.DeadlineExceeded},
		"connect slow":     {dial(os.ErrDeadlineExceeded), lifecycle.TimedOut, context.DeadlineExceeded},
		"reset":            {dial(os.NewSyscallError("read", syscall.ECONNRESET)), lifecycle.Wrong, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got := d.broken(t.Context(), "health route GET /", time.Now(), c.err)
			assert.Equal(t, c.want, got.outcome)
			assert.Equal(t, c.is, errors.Unwrap(got))
			assert.NotContains(t, got.Error(), "hidden")
		})
	}
}

func TestAnAnswerIsReadNoFurtherThanItIsNeeded(t *testing.T) {
	full := strings.Repeat("x", maxAnswer)
	for name, c := range map[string]struct {
		reads reads
		body  io.Reader
		want  string
		err   error
	}{
		"where the status says all": {readStatus, iotest.ErrReader(errors.New("it is read")), "", nil},
		"an empty one":              {readJSON, strings.NewReader(""), "", nil},
		"up to the bound":           {readJSON, strings.NewReader(full), full, nil},
		"above it":                  {readJSON, strings.NewReader(full + "y"), "", errTooLarge},
		"that breaks off":           {readJSON, io.MultiReader(strings.NewReader("half"), iotest.ErrReader(io.ErrUnexpectedEOF)), "half", io.ErrUnexpectedEOF},
		"a text up to the bound":    {readToEnd, strings.NewReader(full), full, nil},
		"a text above it":           {readToEnd, strings.NewReader(full + "yy"), full, nil},
		"a text that breaks off":    {readToEnd, io.MultiReader(strings.NewReader(full+"y"), iotest.ErrReader(io.ErrUnexpectedEOF)), full, io.ErrUnexpectedEOF},
		"a text that is waited for": {readToEnd, io.MultiReader(strings.NewReader("a"), strings.NewReader("b")), "ab", nil},
	} {
		got, err := (&route{reads: c.reads}).read(c.body)
		assert.True(t, c.want == string(got), "%s: %d bytes", name, len(got))
		assert.Equal(t, c.err, err, name)
	}
}

// The bounds of an exchange are wide enough for an honest server, and none may take Caddy's memory or connections.
func TestAnExchangeIsBounded(t *testing.T) {
	transport := newClient().Transport.(*http.Transport)
	assert.Equal(t, 8, transport.MaxConnsPerHost)
	assert.EqualValues(t, 64<<10, transport.MaxResponseHeaderBytes)
	assert.EqualValues(t, 1<<20, maxAnswer)
	assert.Equal(t, 10*time.Second, dialTimeout, "the system tries again after 1, 3 and 7 seconds")
	assert.True(t, transport.DisableKeepAlives, "a connection that is kept would outlive the server that is ended")
	assert.True(t, transport.DisableCompression)
}

// Of a name with two addresses, the first may refuse while the other takes no connection in time: net tells of the first alone.
func TestARefusalThatTookAsLongAsATimeOutIsOne(t *testing.T) {
	d := newDriver(&plan{secrets: new(secretSet).redactor()}, lifecycle.Deps{Upstream: "localhost:8766"})
	for waited, want := range map[time.Duration]lifecycle.Outcome{time.Second: lifecycle.Refused, dialTimeout + time.Second: lifecycle.TimedOut} {
		f := d.broken(t.Context(), "GET /health", time.Now().Add(-waited), syscall.ECONNREFUSED)
		assert.Equal(t, want, f.outcome, "%s: %s", waited, f.text)
	}
}

func TestWithoutAcceptAStatusOfSuccessIsAccepted(t *testing.T) {
	for status, want := range map[int]bool{199: false, 200: true, 299: true, 300: false} {
		assert.Equal(t, want, (&route{}).accepts(status), status)
		assert.Equal(t, status == 300, (&route{accept: []int{300}}).accepts(status), status)
	}
}
