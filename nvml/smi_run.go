package nvml

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

const (
	// outputLimit bounds what is kept of a run: thousands of processes.
	outputLimit = 4 << 20
	// killDelay is how long the pipes of a killed run may stay open.
	killDelay = time.Second
)

// smiError is a run of nvidia-smi that ended with another status than zero.
// The program prints its errors on standard output.
type smiError struct {
	code int
	text string
}

func (e *smiError) Error() string {
	said := firstLine(e.text)
	for line := range strings.Lines(e.text) { // the error may stand behind warnings
		if line = strings.TrimSpace(line); line != "" && !isWarning(line) {
			said = firstLine(line)
			break
		}
	}
	advice := ""
	lower := strings.ToLower(e.text)
	switch {
	case strings.Contains(lower, "version mismatch") || e.code == 18:
		advice = "the driver was upgraded while the old one runs: reboot, or reload its kernel module"
	case strings.Contains(lower, "no devices were found"):
		advice = "the driver sees no GPU: look at the kernel's log"
	case strings.Contains(lower, "couldn't communicate with the nvidia driver") || e.code == 9:
		advice = "load the NVIDIA kernel module"
	case strings.Contains(lower, "insufficient permissions") || e.code == 4:
		advice = "Caddy's user may not use the GPU"
	case strings.Contains(lower, "is lost") || e.code == 15:
		advice = "a GPU fell off the bus: reboot, and look at its power and seat"
	case strings.Contains(lower, "not a valid field") || e.code == 2:
		advice = "this nvidia-smi does not understand the question: its driver is too old"
	case strings.Contains(lower, "failed to initialize nvml: unknown error"):
		advice = "in a container, its device cgroup may have been lost: make it anew"
	case e.code == 14 || strings.Contains(lower, "inforom"):
		advice = "the card's infoROM is damaged: it can still compute"
	case e.code == 12:
		advice = "libnvidia-ml.so.1 is not found: install the driver whole"
	}
	if said == "" {
		said = "it said nothing"
	}
	text := fmt.Sprintf("nvidia-smi ended with status %d: %s", e.code, said)
	if advice != "" {
		text += ": " + advice
	}
	return text
}

// runSMI runs the program once and returns what it printed, its errors last. The caller has
// the turn.
func runSMI(ctx context.Context, path string, arguments ...string) (string, error) {
	command := exec.CommandContext(ctx, path, arguments...)
	command.Env = smiEnvironment()
	command.WaitDelay = killDelay
	var stdout, stderr bounded
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	if errors.Is(err, exec.ErrWaitDelay) { // it has ended well, and left a child with its pipes
		err = nil
	}
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", fmt.Errorf("nvidia-smi has not answered in time (a sick GPU can make it hang): %w", ctx.Err())
	case errors.As(err, &exit):
		return "", &smiError{code: exit.ExitCode(), text: stdout.String() + "\n" + stderr.String()}
	case err != nil:
		return "", fmt.Errorf("running nvidia-smi: %w", err)
	case stdout.full:
		return "", fmt.Errorf("nvidia-smi wrote more than %d bytes", outputLimit)
	}
	return stdout.String() + "\n" + stderr.String(), nil
}

// bounded keeps the first outputLimit bytes and drops the rest, so that a
// program which never stops talking is still read to its end.
type bounded struct {
	kept bytes.Buffer // not embedded: its ReadFrom would go past the bound
	full bool
}

func (b *bounded) Write(p []byte) (int, error) {
	room := outputLimit - b.kept.Len()
	if len(p) > room {
		b.full = true
	}
	b.kept.Write(p[:min(len(p), room)])
	return len(p), nil
}

func (b *bounded) String() string { return b.kept.String() }

var (
	fieldPattern = regexp.MustCompile(`Field "([^"]*)" is not a valid field to query`)
	busIDPattern = regexp.MustCompile(`(?i)\bGPU ?(?:[0-9]+: ?)?([0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-9A-F])`)
)

// unknownField is the field of which an error text says that there is none.
func unknownField(text string) string {
	if match := fieldPattern.FindStringSubmatch(text); match != nil {
		return match[1]
	}
	return ""
}

// lostBusID is the PCI address of the GPU of which an error text says that it
// can't be opened, in the eight-digit form of the query.
func lostBusID(text string) string {
	lower := strings.ToLower(text)
	for _, sign := range []string{"is lost", "fallen off the bus", "requires reset", "unable to determine the device handle"} {
		if strings.Contains(lower, sign) {
			return anyBusID(text)
		}
	}
	return ""
}

// anyBusID is the PCI address of the GPU that a text names, in the eight-digit form of the query.
func anyBusID(text string) string {
	match := busIDPattern.FindStringSubmatch(text)
	if match == nil {
		return ""
	}
	domain, rest, _ := strings.Cut(match[1], ":")
	return strings.Repeat("0", 8-len(domain)) + domain + ":" + rest
}

// firstLine is the first line that says something, cut to a length for logs.
func firstLine(text string) string {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			if len(line) > 200 {
				line = strings.ToValidUTF8(line[:200], "") + "…"
			}
			return line
		}
	}
	return ""
}
