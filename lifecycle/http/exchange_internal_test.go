package httplife

import (
	"context"
	"errors"
	"net"
	"net/url"
	"os"
	"syscall"
	"testing"
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
		"host unreachable": {dial(os.NewSyscallError("connect", syscall.EHOSTUNREACH)), lifecycle.Refused, lifecycle.ErrRefused},
		"no such host":     {dial(&net.DNSError{Err: "no such host", Name: "gpu-box", IsNotFound: true}), lifecycle.Refused, lifecycle.ErrRefused},
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
