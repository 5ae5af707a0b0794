package process

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
)

// outputOf reads all that a server writes on one stream.
func outputOf(t *testing.T, text string, log zapcore.Core) *output {
	t.Helper()
	o := newOutput(&plan{redact: func(s string) string { return s }, longest: 0}, zap.New(log))
	<-o.read(map[string]io.Reader{"stdout": strings.NewReader(text)})
	<-o.written
	return o
}

func TestOutputIsKeptAsAScreenWouldShowIt(t *testing.T) {
	whole := strings.Repeat("x", maxLine)
	for text, want := range map[string][]string{
		"":                        nil,
		"a\nb\n":                  {"a", "b"},
		"a\nb":                    {"a", "b"},
		"\n":                      {""},
		"a\n\nb\n":                {"a", "", "b"},
		"50%\r100%\r\nb\n":        {"100%", "b"},
		"50%\r100%":               {"100%"},
		"50%\r":                   {"50%"},
		"a\r\r\n":                 {"a"},
		"\r\n":                    {""},
		"a\tb \t\n":               {"a\tb"},
		"\x1b[31mred\x1b[0m\a\n":  {"[31mred[0m"},
		"\xff\n":                  {"?"},
		whole + "\n":              {whole},
		whole + "y\n":             {whole},
		whole[1:] + "ü\n":         {whole[1:] + "?"}, // a character that does not fit is not shown in halves
		whole + "y\r" + whole[2:]: {whole[2:]},
	} {
		require.Equal(t, want, append([]string(nil), outputOf(t, text, zapcore.NewNopCore()).tail()...), "%.40q", text)
	}
}

func TestTheLastLinesOfOutputAreKeptInOrder(t *testing.T) {
	for _, more := range []int{0, 1, lifecycle.MaxOutput + 3} {
		var text strings.Builder
		for i := range lifecycle.MaxOutput + more {
			fmt.Fprintln(&text, i)
		}
		tail := outputOf(t, text.String(), zapcore.NewNopCore()).tail()
		require.Len(t, tail, lifecycle.MaxOutput)
		for i, line := range tail {
			require.Equal(t, fmt.Sprint(i+more), line)
		}
	}
}

func TestTheLineThatTellsWhyAServerEndedIsNotBlankAndShort(t *testing.T) {
	long := strings.Repeat("x", maxLast)
	for text, want := range map[string]string{
		"":                     "",
		"a\nb\n":               "b",
		"no memory\n \n\t\n\n": "no memory",
		long + "\n":            long,
		long + "y\n":           long + "…",
		long[1:] + "ü\n":       long[1:] + "…",
	} {
		require.Equal(t, want, outputOf(t, text, zapcore.NewNopCore()).lastLine(), "%.40q", text)
	}
}

// held is a log that takes no line of a server before it is released.
type held struct {
	zapcore.Core
	release chan struct{}
}

func (h held) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return c.AddCore(e, h)
}

func (h held) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if e.Level == zapcore.InfoLevel {
		<-h.release
	}
	return h.Core.Write(e, fields)
}

func TestLinesThatALogIsTooSlowForAreCounted(t *testing.T) {
	core, logs := observer.New(zapcore.InfoLevel)
	log := held{core, make(chan struct{})}
	o := newOutput(&plan{redact: func(s string) string { return s }}, zap.New(log))
	const written = 3 * maxLogging
	<-o.read(map[string]io.Reader{"stdout": strings.NewReader(strings.Repeat("line\n", written))}) // though the log hangs
	close(log.release)
	<-o.written
	told := logs.FilterMessageSnippet("lines are left out").All()
	require.Len(t, told, 1, "once, and not after every line")
	require.Equal(t, zapcore.WarnLevel, logs.All()[logs.Len()-1].Level, "when those that were kept are logged")
	dropped := int(told[0].ContextMap()["lines"].(int64))
	require.Equal(t, written, dropped+logs.FilterMessage("output of the server").Len())
	require.InDelta(t, written-maxLogging, dropped, 1, "one may be on its way to the log")

	core, logs = observer.New(zapcore.InfoLevel)
	outputOf(t, "a\nb\n", core)
	require.Equal(t, 2, logs.Len(), "where all is logged, nothing is said of it")
}

func TestALineThatWasCutWithinASecretShowsNothingOfIt(t *testing.T) {
	secret := strings.Repeat("s", 1000)
	o := newOutput(&plan{redact: func(s string) string { return strings.ReplaceAll(s, secret, "*") }, longest: len(secret)}, zap.NewNop())
	o.add("stdout", []byte(strings.Repeat("s", maxLine+len(secret)))) // five whole ones, and the beginning of another
	require.Equal(t, []string{"…"}, o.kept)
}
