//go:build linux

package process_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

func TestOutputIsKeptBoundedAndLogged(t *testing.T) {
	long := strings.Repeat("x", 10_000)
	o := open(t, settings(onPort("-flood", "500", "-say", "50%\r100%\r\n\x1b[31mred\x1b[0m\n"+long+"\nno end")))
	o.load(t)
	o.output(t, "no end", 0)
	o.output(t, "xxx", 1)
	out := o.State().Output
	require.Len(t, out, lifecycle.MaxOutput)
	require.Equal(t, []string{"100%", "[31mred[0m"}, out[lifecycle.MaxOutput-3:lifecycle.MaxOutput-1])
	require.Less(t, len(out[lifecycle.MaxOutput-1]), 5000)
	require.GreaterOrEqual(t, len(out[lifecycle.MaxOutput-1]), 4<<10)
	require.Equal(t, "line 499", out[lifecycle.MaxOutput-4])
	require.Eventually(t, func() bool {
		return o.logs.FilterMessage("output of the server").Len() == 503
	}, patience, time.Millisecond)
	line := o.logs.FilterMessage("output of the server").All()[0]
	require.Equal(t, zapcore.InfoLevel, line.Level)
	require.Equal(t, map[string]any{"stream": "stdout", "line": "line 0"}, line.ContextMap())
	o.unload(t)
	require.Equal(t, "no end", o.State().Output[lifecycle.MaxOutput-1], "also a line without its end")
}

// stuck is a log that takes nothing until it is released.
type stuck struct {
	zapcore.Core
	release chan struct{}
}

func (s stuck) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return c.AddCore(e, s)
}

func (s stuck) Write(e zapcore.Entry, _ []zapcore.Field) error {
	if e.Message == "output of the server" {
		<-s.release
	}
	return nil
}

func TestALogThatHangsDoesNotHoldTheServer(t *testing.T) {
	log := stuck{zapcore.NewNopCore(), make(chan struct{})}
	o := open(t, settings(onPort("-flood", "20000", "-say", "done\n")), func(deps *lifecycle.Deps) { deps.Logger = zap.New(log) })
	o.load(t)
	o.output(t, "done", 1)
	o.unload(t)
	close(log.release)
}

func TestSecretsAreHiddenInOutputLogAndErrors(t *testing.T) {
	const secret = "s3cr3t-t0ken"
	t.Setenv("TEST_TOKEN", secret)
	// The second time it lies across the greatest length of a line, and the third across what is read of one that
	// is short once it is hidden there.
	say := "token " + secret + "\n" + strings.Repeat("y", 4090) + secret + "\n" + strings.Repeat(secret+"..", 400) + "\n"
	o := open(t, settings(onPort("-say", say, "-warn", secret+"\n", "-exit", "1", "--", "{env.TEST_TOKEN}")))
	err := o.Load(within(t), whole)
	require.ErrorContains(t, err, "exit status 1: ")
	shown := err.Error() + <-o.died + fmt.Sprintf("%+v", o.State())
	for _, l := range o.logs.All() {
		shown += fmt.Sprint(l.Message, l.ContextMap())
	}
	require.Contains(t, shown, "token [redacted]")
	require.NotContains(t, shown, secret)
	require.NotContains(t, shown, "s3cr3t")

	// As JSON it is longer.
	const odd = "0dd" + "\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"\"" + "s3cr3t"
	t.Setenv("TEST_TOKEN", odd)
	o = open(t, settings(onPort("-say", strings.Repeat("y", 4090)+strings.ReplaceAll(odd, `"`, `\"`)+"\n", "{env.TEST_TOKEN}")))
	o.load(t)
	require.NotContains(t, o.output(t, "yyy", 1)[0], "0dd")

	o = open(t, `{"command": ["/no/{env.TEST_TOKEN}", "{gpu_broker.port}"]}`)
	err = o.Load(within(t), whole)
	require.ErrorContains(t, err, "/no/{env.TEST_TOKEN} can't be started")
	require.NotContains(t, err.Error(), "s3cr3t")
}
