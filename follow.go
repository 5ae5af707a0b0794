package gpubroker

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
)

// followQuiet is after how long without a decision a follower gets a comment
// line: so that whatever stands between does not take the stream for dead.
const followQuiet = 15 * time.Second

// followMark stands before the numbers of this process's decisions: a follower that
// comes back after a restart must not have those of another process taken for ours.
var followMark = strconv.FormatInt(time.Now().UnixNano(), 36)

// follows reports whether a request for decisions wants the stream of them.
func follows(r *http.Request) bool {
	text := r.URL.Query().Get("follow")
	return text == "true" || text == "1"
}

// follow sends decisions as they are made, as server-sent events, until the
// client leaves or the process ends. A client that comes back with the ID of the
// last one it got (Last-Event-ID, as browsers send it) also gets those in between.
func follow(w http.ResponseWriter, r *http.Request, b *broker.Broker) error {
	last := b.Recorded()
	if mark, number, ok := strings.Cut(r.Header.Get("Last-Event-ID"), "."); ok {
		if n, err := strconv.ParseUint(number, 10, 64); err == nil && mark == followMark {
			last = n
		} else {
			last = 0
		}
	}
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if _, err := fmt.Fprint(w, ": decisions\n\n"); err != nil {
		return nil // it has left
	}
	for {
		if err := out.Flush(); err != nil {
			return nil
		}
		f, err := b.Follow(r.Context(), last, followQuiet)
		if err != nil {
			return nil // the stream ends: nobody is left to be told why
		}
		if writeFollowed(w, f) != nil {
			return nil
		}
		last = f.Last
	}
}

func writeFollowed(w http.ResponseWriter, f broker.Followed) error {
	if len(f.Decisions) == 0 {
		_, err := fmt.Fprint(w, ": nothing new\n\n")
		return err
	}
	if f.Missed > 0 {
		if _, err := fmt.Fprintf(w, ": %d decisions are not kept any more\n\n", f.Missed); err != nil {
			return err
		}
	}
	for i, d := range f.Decisions {
		doc, err := json.Marshal(d)
		if err != nil {
			return err
		}
		number := f.Last - uint64(len(f.Decisions)-1-i)
		if _, err := fmt.Fprintf(w, "id: %s.%d\nevent: decision\ndata: %s\n\n", followMark, number, doc); err != nil {
			return err
		}
	}
	return nil
}
