package e2e

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
)

// expected is what the request log must hold in the end, by what the clients
// saw: lines that must be there by their code, and by who has served; and how many more may be.
type expected struct {
	mu       sync.Mutex
	codes    map[string]int
	served   map[string]int
	unnamed  int // that must be there, with whatever code
	possible int // of clients that left or were cut off, which may have come to the queue or not
}

func newExpected() *expected { return &expected{codes: map[string]int{}, served: map[string]int{}} }

// beforeTheQueue are the codes with which a request may be refused before it asks for its place.
var beforeTheQueue = []string{"bad_request", "unknown_model", "body_too_large", "not_running"}

// expect notes one request that has ended.
func (x *expected) expect(a *asked, outcome string) {
	if a.cheap {
		return // of no GPU
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	doc, _ := refusalOf(a.got.body)
	switch outcome {
	case served:
		x.codes["200"]++
		x.served[a.by]++
	case refused:
		switch {
		case a.heard != "":
			x.unnamed++
		case slices.Contains(beforeTheQueue, doc.Code):
			x.possible++
		default:
			x.codes[doc.Code]++
		}
	case ownError:
		if a.heard != "" {
			x.unnamed++
		} else {
			x.codes[strconv.Itoa(a.got.status)]++
		}
	case brokenOff:
		x.unnamed++
	case notThere:
	default:
		x.possible++
	}
}

// sum is how many lines must be there.
func (x *expected) sum() int {
	n := x.unnamed
	for _, lines := range x.codes {
		n += lines
	}
	return n
}

// requestLog holds the request logs against what the clients saw, once all is quiet.
func (k *soak) requestLog() {
	k.log.mu.Lock()
	defer k.log.mu.Unlock()
	must := k.log.sum()
	var lines [][]string
	for deadline := time.Now().Add(slowly(10 * time.Second)); ; { // they are written every second
		var err error
		if lines, err = k.logLines(); err != nil {
			k.rec.violation("the request log: %v", err)
			return
		}
		if len(lines) >= must || time.Now().After(deadline) {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	codes, by := map[string]int{}, map[string]int{}
	for _, line := range lines {
		if why := k.lineIsWrong(line); why != "" {
			k.rec.violation("the request log: %s: %q", why, line)
		}
		codes[line[7]]++
		if line[7] == "200" {
			by[broker.ConsumerOf(line[1])]++
		}
	}
	k.rec.mu.Lock()
	k.rec.counts["request log"] = maps.Clone(codes)
	k.rec.counts["request log"]["lines"] = len(lines)
	k.rec.counts["request log"]["wanted at least"] = must
	k.rec.counts["request log"]["or more"] = k.log.possible
	k.rec.mu.Unlock()
	slack := k.log.possible + k.log.unnamed
	k.within("in all", len(lines), must, k.log.possible)
	for code, n := range k.log.codes {
		k.within("of code "+code, codes[code], n, slack)
	}
	for name, n := range k.log.served {
		k.within("served by "+name, by[name], n, slack)
	}
	if st, err := k.statusBy(k.hard, k.client); err != nil || len(lines) > int(st.Scheduler.TotalJobs) {
		k.rec.violation("the request log has %d lines, of %d jobs", len(lines), st.Scheduler.TotalJobs)
	}
}

func (k *soak) within(what string, lines, least, more int) {
	if lines < least || lines > least+more {
		k.rec.violation("the request log has %d lines %s, wanted %d and at most %d more", lines, what, least, more)
	}
}

var logHead = []string{"time", "consumer", "service_seconds", "priority", "patience", "wait_seconds", "load_seconds", "code"}

// logLines are the lines of both request logs.
func (k *soak) logLines() (lines [][]string, _ error) {
	for _, name := range []string{"requests.csv", "others.csv"} {
		f, err := os.Open(filepath.Join(k.dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		rows, err := csv.NewReader(f).ReadAll()
		_ = f.Close()
		switch {
		case err != nil:
			return nil, fmt.Errorf("%s: %w", name, err)
		case len(rows) == 0 || !slices.Equal(rows[0], logHead):
			return nil, fmt.Errorf("%s has no head", name)
		}
		lines = append(lines, rows[1:]...)
	}
	return lines, nil
}

// lineIsWrong says what is wrong with a line.
func (k *soak) lineIsWrong(line []string) string {
	at, err := time.Parse(time.RFC3339, line[0])
	priority, notNumber := strconv.Atoi(line[3])
	_, isStatus := strconv.Atoi(line[7])
	wait, load := seconds(line[5]), seconds(line[6])
	switch {
	case err != nil || at.Before(k.rec.began.Add(-time.Second)) || at.After(time.Now()):
		return "its time"
	case !slices.Contains(soakServers, broker.ConsumerOf(line[1])):
		return "its consumer"
	case notNumber != nil || !slices.Contains([]int{10, 30, 50, 80, 90, 100}, priority):
		return "its priority"
	case isStatus != nil && refusalStatus[line[7]] == 0 && line[7] != "client_left" && line[7] != "failed":
		return "its code"
	case isStatus == nil && seconds(line[2]) < 0:
		return "how long it ran"
	case wait < 0 || load < 0 || wait+load > (soakBudget+slowly(3*time.Second)).Seconds():
		return "how long it waited"
	case line[4] != "" && (line[7] != "client_left" || seconds(line[4]) < 0):
		return "its patience"
	}
	return ""
}

// seconds is a number of them; negative: it is none.
func seconds(text string) float64 {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		return -1
	}
	return n
}
