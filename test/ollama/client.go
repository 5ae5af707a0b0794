//go:build linux

package ollama

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/test/scripts"
)

// A Client runs client/chat.mjs, a chat through OpenAI's Node SDK.
type Client struct {
	folder string
}

// NewClient installs the SDK if it is not cached.
func NewClient(t testing.TB) *Client {
	t.Helper()
	return &Client{folder: scripts.Run(t, "test/ollama/setup.sh")}
}

// A Chat is what to ask and how.
type Chat struct {
	BaseURL     string            // with its /v1, or whatever stands for it
	CACert      string            // file of a certificate authority to trust besides Node's own; may be empty
	Model       string            // name of the model
	Prompt      string            // "hello" if empty
	MaxTokens   int               // tokens of the answer; 16 if 0
	Temperature *float64          // the server's own if nil
	Seed        int               // the server's own if 0
	Header      map[string]string // sent besides the SDK's own
	MaxRetries  int               // retries by the SDK; none if 0 (the SDK's own default is 2)
	Whole       bool              // one answer instead of a stream
}

// A Chunk is one event of a streamed answer.
type Chunk struct {
	Text         string
	FinishReason string // of the last chunk: "stop" or "length"
	At           time.Time
}

// An Answer is what the SDK made of the server's answer. Chunks is empty if the chat asked for one
// whole answer.
type Answer struct {
	Chunks       []Chunk
	Text         string
	FinishReason string
	At           time.Time // when it was complete
}

// An SDKError is an error that the SDK has thrown, in the SDK's own words.
type SDKError struct {
	Class      string          `json:"class"`  // for example RateLimitError
	Status     int             `json:"status"` // HTTP status; 0 if there was no answer
	Code       string          `json:"code"`
	Type       string          `json:"type"`
	Message    string          `json:"message"`
	Cause      string          `json:"cause"`
	RetryAfter string          `json:"retry_after"` // header of the answer
	Body       json.RawMessage `json:"body"`        // the answer's "error", as JSON
}

// Error tells class, status, code and message.
func (e *SDKError) Error() string {
	text := fmt.Sprintf("openai sdk: %s, status %d, code %q: %s", e.Class, e.Status, e.Code, e.Message)
	if e.Cause != "" {
		text += " (" + e.Cause + ")"
	}
	return text
}

// NodeChat asks and waits for the whole answer. The error is an [*SDKError] if the SDK has thrown
// one; the answer then holds the chunks that had come before.
func (c *Client) NodeChat(ctx context.Context, chat Chat) (Answer, error) {
	running, err := c.Start(ctx, chat)
	if err != nil {
		return Answer{}, err
	}
	return running.Wait()
}

// A RunningChat is a chat whose answer may still be coming.
type RunningChat struct {
	first    chan struct{}
	openOnce sync.Once
	done     chan struct{}
	answer   Answer // these two are settled when done is closed
	err      error
}

// Start asks and returns while the answer comes. The end of ctx kills the client, as a user who
// closes the window would.
func (c *Client) Start(ctx context.Context, chat Chat) (*RunningChat, error) {
	command := exec.CommandContext(ctx, "node", append([]string{filepath.Join(c.folder, "chat.mjs")}, chat.arguments()...)...)
	command.Env = append(os.Environ(), "NODE_EXTRA_CA_CERTS="+chat.CACert)
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var complaints bytes.Buffer
	command.Stderr = &complaints
	lines, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("starting the node client: %w", err)
	}
	running := &RunningChat{first: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(running.done)
		defer running.open()
		running.err = running.read(bufio.NewScanner(lines))
		if running.err != nil {
			_ = command.Process.Kill() // it may wait for us to read on
		}
		ended := command.Wait()
		var thrown *SDKError
		if ended != nil && !errors.As(running.err, &thrown) {
			running.err = fmt.Errorf("node client: %w: %s", errors.Join(ended, running.err), complaints.Bytes())
		}
	}()
	return running, nil
}

// First is closed when the first chunk with text has come, or when the chat has ended without one.
func (r *RunningChat) First() <-chan struct{} { return r.first }

// Done is closed when the chat has ended.
func (r *RunningChat) Done() <-chan struct{} { return r.done }

// Wait waits until the chat has ended and gives what [Client.NodeChat] gives.
func (r *RunningChat) Wait() (Answer, error) {
	<-r.done
	return r.answer, r.err
}

func (r *RunningChat) open() { r.openOnce.Do(func() { close(r.first) }) }

// line is one line of what chat.mjs prints.
type line struct {
	Event        string `json:"event"`
	Time         int64  `json:"time"`
	Text         string `json:"text"`
	FinishReason string `json:"finish_reason"`
}

func (r *RunningChat) read(lines *bufio.Scanner) error {
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return fmt.Errorf("want a JSON line, found %q: %w", lines.Text(), err)
		}
		at := time.UnixMilli(l.Time)
		switch l.Event {
		case "chunk":
			r.answer.Chunks = append(r.answer.Chunks, Chunk{Text: l.Text, FinishReason: l.FinishReason, At: at})
			if l.Text != "" {
				r.open()
			}
		case "done":
			r.answer.Text, r.answer.FinishReason, r.answer.At = l.Text, l.FinishReason, at
			return nil
		case "error":
			thrown := new(SDKError)
			if err := json.Unmarshal(lines.Bytes(), thrown); err != nil {
				return fmt.Errorf("want an error as JSON, found %q: %w", lines.Text(), err)
			}
			return thrown
		default:
			return fmt.Errorf("want event chunk, done or error, found %q", lines.Text())
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return errors.New("it ended without a last word")
}

func (c Chat) arguments() []string {
	arguments := []string{"--base-url", c.BaseURL, "--model", c.Model, "--max-retries", strconv.Itoa(c.MaxRetries)}
	if c.Prompt != "" {
		arguments = append(arguments, "--prompt", c.Prompt)
	}
	if c.MaxTokens != 0 {
		arguments = append(arguments, "--max-tokens", strconv.Itoa(c.MaxTokens))
	}
	if c.Temperature != nil {
		arguments = append(arguments, "--temperature", strconv.FormatFloat(*c.Temperature, 'g', -1, 64))
	}
	if c.Seed != 0 {
		arguments = append(arguments, "--seed", strconv.Itoa(c.Seed))
	}
	for name, value := range c.Header {
		arguments = append(arguments, "--header", name+": "+value)
	}
	if c.Whole {
		arguments = append(arguments, "--whole")
	}
	return arguments
}
