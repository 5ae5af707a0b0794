package gpubroker

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// What bounds the request log.
const (
	logWaiting = 4096        // requests that wait to be written; more are lost, and counted
	logFlush   = time.Second // how long a line stays in memory at most
	logTell    = time.Minute // how often losses are told
	logTime    = "2006-01-02T15:04:05.000Z07:00"
)

// logColumns are those of the request log. Who asked is not among them: such files are kept and passed on.
var logColumns = []string{"time", "consumer", "service_seconds", "priority", "patience", "wait_seconds", "load_seconds", "code"}

// logEntry is one request that has ended.
type logEntry struct {
	path     string
	log      *zap.Logger
	at       time.Time // when it was submitted
	consumer string
	service  time.Duration // negative: it did not run
	priority int
	patience time.Duration // after which its client left, while it waited; negative: it did not
	wait     time.Duration
	load     time.Duration
	code     string // of its refusal; empty: that is status
	status   int
}

// requestLog writes requests that have ended to a file. It never lets one wait.
// It outlives configurations: the file is that of the one that ruled when the request asked for its place.
type requestLog struct {
	start   sync.Once // of the writer, with the first request
	stop    sync.Once
	entries chan logEntry
	lost    atomic.Int64
	quit    chan struct{}
	ended   chan struct{} // closed when the writer has ended
	flush   time.Duration
}

func newRequestLog() *requestLog {
	return &requestLog{entries: make(chan logEntry, logWaiting), quit: make(chan struct{}), ended: make(chan struct{}), flush: logFlush}
}

// add hands a request in.
func (l *requestLog) add(e logEntry) {
	l.start.Do(func() { go l.write() })
	select {
	case l.entries <- e:
	default:
		l.lost.Add(1)
	}
}

// close writes what is there, and ends the writer. What is added after it is lost.
func (l *requestLog) close() {
	l.stop.Do(func() { close(l.quit) })
	l.start.Do(func() { close(l.ended) })
	<-l.ended
}

// write is the goroutine of the log, from the first request until close.
func (l *requestLog) write() {
	defer close(l.ended)
	f, log := logFile{}, zap.NewNop()
	var told time.Time
	flush := time.NewTimer(0)
	<-flush.C
	defer flush.Stop()
	due := false
	save := func() {
		due = false
		if err := f.flush(); err != nil {
			l.lost.Add(f.lose(err))
		}
		if lost := l.lost.Load(); lost > 0 && time.Since(told) >= logTell {
			told = time.Now()
			l.lost.Add(-lost)
			log.Warn("requests are missing in the request log", zap.Int64("requests", lost), zap.Error(f.fault))
			f.fault = nil
		}
	}
	put := func(e logEntry) {
		log = e.log
		if err := f.put(e); err != nil {
			l.lost.Add(f.lose(err) + 1)
		}
		if !due {
			due = true
			flush.Reset(l.flush)
		}
	}
	for {
		select {
		case e := <-l.entries:
			put(e)
		case <-flush.C:
			save()
		case <-l.quit:
			for {
				select {
				case e := <-l.entries:
					put(e)
					continue
				default:
				}
				break
			}
			told = time.Time{}
			save()
			f.close()
			return
		}
	}
}

// logFile is the file that is written, which is opened when it is needed.
type logFile struct {
	path  string
	file  *os.File // nil: it is not open
	rows  *csv.Writer
	held  int64 // lines that are in memory
	fault error // the last one
}

// put adds a line. Its error says that this line is lost, and those in memory.
func (f *logFile) put(e logEntry) error {
	if f.file != nil && f.path != e.path { // another configuration rules
		if err := f.flush(); err != nil {
			return err
		}
		f.close()
	}
	if f.file == nil {
		if err := f.open(e.path); err != nil {
			return err
		}
	}
	if err := f.rows.Write(e.row()); err != nil {
		return err
	}
	f.held++
	return nil
}

// open opens the file, and begins it if it is new. Where it ends in the middle of a line, which a crash has left, that line is ended.
func (f *logFile) open(path string) (err error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() { // opening a pipe would wait for a reader
		return fmt.Errorf("request_log %s is no regular file", path)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err != nil {
		_ = file.Close()
		return err
	}
	f.path, f.file, f.rows, f.held = path, file, csv.NewWriter(file), 0
	if info.Size() == 0 {
		return f.rows.Write(logColumns)
	}
	last := make([]byte, 1)
	if _, err := file.ReadAt(last, info.Size()-1); err == nil && last[0] != '\n' {
		_, err = file.WriteString("\n")
		return err
	}
	return nil
}

// flush writes the lines in memory, and lets go of a file that was moved away: the next line begins a new one.
func (f *logFile) flush() error {
	if f.file == nil {
		return nil
	}
	f.rows.Flush()
	if err := f.rows.Error(); err != nil {
		return err
	}
	f.held = 0
	mine, err := f.file.Stat()
	if err != nil {
		return err
	}
	there, err := os.Stat(f.path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(mine, there) {
		f.close()
	}
	return nil
}

// lose gives up what is in memory after a fault, and says how many lines that were.
func (f *logFile) lose(fault error) (lines int64) {
	lines, f.fault = f.held, fault
	f.close()
	return lines
}

// close lets go of the file.
func (f *logFile) close() {
	if f.file != nil {
		_ = f.file.Close() // what was to be written is
	}
	f.file, f.rows, f.held = nil, nil, 0
}

func (e *logEntry) row() []string {
	seconds := func(d time.Duration) string {
		if d < 0 {
			return ""
		}
		return strconv.FormatFloat(d.Seconds(), 'f', 3, 64)
	}
	code := e.code
	if code == "" {
		code = strconv.Itoa(e.status)
	}
	return []string{e.at.UTC().Format(logTime), e.consumer, seconds(e.service), strconv.Itoa(e.priority), seconds(e.patience), seconds(e.wait), seconds(e.load), code}
}

// enters begins the entry of a request that asks for its place, where there is a request log.
func (j *job) enters(priority int) {
	if path := j.handler.pool.broker.RequestLog(); path != "" && j.entry == nil {
		j.entry = &logEntry{path: path, log: j.handler.app.generation.Logger, at: time.Now(), priority: priority, service: -1, patience: -1}
	}
}

// leaves notes by which code a request was refused.
func (j *job) leaves(code string) {
	if j.entry != nil {
		j.entry.code = code
	}
}

// hasRun notes that a request has run, and is about to give its place back.
// Where its work may go on, its entry is made when that is over.
func (j *job) hasRun(outcome scheduler.Outcome) {
	switch {
	case j.entry == nil:
		return
	case outcome == scheduler.DialRefused, outcome == scheduler.Unreached:
		j.entry.service = -1
		return
	}
	j.entry.service = time.Since(j.lease.Began)
	if outcome != scheduler.Accepted {
		return
	}
	entry, requests := j.ended(), j.handler.pool.requests
	if j.handler.pool.broker.WhenDone(j.lease.Consumer, j.lease.Began, func(service time.Duration) {
		entry.service = service
		requests.add(entry)
	}) {
		j.entry = nil
	}
}

// ended is the entry of a request that is over.
func (j *job) ended() logEntry {
	e := *j.entry
	e.consumer, e.status = broker.SlotName(j.target.name, j.model), j.status
	switch {
	case !j.submitted.IsZero(): // it was admitted
		e.at, e.wait, e.load = j.submitted, j.lease.Queued, j.lease.Loading
	default:
		e.wait = time.Since(e.at)
		if e.code == codeLeft {
			e.patience = e.wait
		}
	}
	if e.code == "" && e.status == 0 {
		e.code = "failed"
	}
	return e
}
