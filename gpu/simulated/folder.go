package simulated

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// fileLimit bounds what is read of one file; a real one has a line a GPU.
const fileLimit = 64 << 10

// holding is what one file of the folder says.
type holding struct {
	file string
	pid  int // 0 for an outsider
	name string
	held map[int]gpu.Bytes
}

// state is what the control file says.
type state struct {
	telemetryLost bool
	lost          map[int]bool
	baseline      map[int]gpu.Bytes
}

// WriteState replaces the control file of a simulated folder (empty dir:
// DefaultDir). Each line is one of
//
//	lost INDEX             the GPU is lost
//	telemetry lost         looks fail
//	baseline INDEX SIZE    the GPU uses so much by itself
//
// No lines mean that all is well.
func WriteState(dir string, lines ...string) error {
	if dir == "" {
		dir = DefaultDir()
	}
	text := strings.Join(lines, "\n") + "\n"
	if _, err := parseState(text); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("simulated state: making its folder: %w", err)
	}
	path := filepath.Join(dir, stateFile)
	if len(lines) > 0 {
		return writeFile(path, text)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("simulated state: %w", err)
	}
	return nil
}

// readFolder reads the whole folder. Files of dead processes are removed. A
// folder or file that is not there, any more or yet, says nothing.
func readFolder(dir string) ([]holding, state, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, state{}, fmt.Errorf("simulated GPUs: reading their folder: %w", err)
	}
	var holdings []holding
	var control state
	for _, entry := range entries {
		file := entry.Name()
		path := filepath.Join(dir, file)
		if file == stateFile {
			text, err := readSmall(path)
			if err != nil {
				return nil, state{}, err
			}
			if control, err = parseState(text); err != nil {
				return nil, state{}, fmt.Errorf("%s: %w", path, err)
			}
			continue
		}
		pid, ok := owner(file)
		if !ok {
			continue
		}
		if pid != 0 && !alive(pid) {
			_ = os.Remove(path) // else the next look does it
			continue
		}
		text, err := readSmall(path)
		if err != nil {
			return nil, state{}, err
		}
		h, start, err := parseHolding(text)
		if err != nil {
			return nil, state{}, fmt.Errorf("%s: %w", path, err)
		}
		if pid != 0 && start != "" && start != startTime(pid) {
			_ = os.Remove(path) // its process is dead, another has its PID
			continue
		}
		h.file, h.pid = file, pid
		if h.name == "" && pid == 0 {
			h.name = strings.TrimPrefix(file, outsiderPrefix)
		}
		holdings = append(holdings, h)
	}
	return holdings, control, nil
}

// owner says whose file it is: PID, PID-NAME, or outsider-NAME (PID 0).
func owner(file string) (pid int, ok bool) {
	if strings.HasPrefix(file, outsiderPrefix) {
		return 0, true
	}
	number, _, _ := strings.Cut(file, "-")
	n, err := strconv.ParseUint(number, 10, 31)
	return int(n), err == nil && n > 0
}

// parseHolding reads lines of "INDEX SIZE" and the comments "#name NAME" and
// "#start TIME" that a Holder writes.
func parseHolding(text string) (h holding, start string, err error) {
	h.held = map[int]gpu.Bytes{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		switch comment, isComment := strings.CutPrefix(line, "#"); {
		case line == "":
		case isComment:
			word, value, _ := strings.Cut(comment, " ")
			switch word {
			case "name":
				h.name = strings.TrimSpace(value)
			case "start":
				start = strings.TrimSpace(value)
			}
		default:
			index, size, err := indexAndSize(line)
			if err != nil {
				return holding{}, "", err
			}
			h.held[index] += size
		}
	}
	return h, start, nil
}

func parseState(text string) (state, error) {
	s := state{lost: map[int]bool{}, baseline: map[int]gpu.Bytes{}}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		word, rest, _ := strings.Cut(line, " ")
		switch {
		case line == "" || strings.HasPrefix(line, "#"):
		case line == "telemetry lost":
			s.telemetryLost = true
		case word == "lost":
			index, err := strconv.ParseUint(strings.TrimSpace(rest), 10, 16)
			if err != nil {
				return state{}, fmt.Errorf("line %q: want lost INDEX", line)
			}
			s.lost[int(index)] = true
		case word == "baseline":
			index, size, err := indexAndSize(rest)
			if err != nil {
				return state{}, err
			}
			s.baseline[index] = size
		default:
			return state{}, fmt.Errorf("line %q: want lost INDEX, telemetry lost, or baseline INDEX SIZE", line)
		}
	}
	return s, nil
}

func indexAndSize(line string) (int, gpu.Bytes, error) {
	number, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	index, err := strconv.ParseUint(number, 10, 16)
	if err != nil {
		return 0, 0, fmt.Errorf("line %q: want the index of a GPU and a size, for example: 0 2GiB", line)
	}
	size, err := gpu.ParseBytes(rest)
	if err != nil {
		return 0, 0, fmt.Errorf("line %q: %w", line, err)
	}
	return int(index), size, nil
}

func readSmall(path string) (string, error) {
	info, err := os.Stat(path)
	if err == nil && (info.Size() > fileLimit || !info.Mode().IsRegular()) {
		return "", fmt.Errorf("simulated GPUs: %s is no small file: remove it", path)
	}
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("simulated GPUs: %w", err)
	}
	return string(text), nil
}
