package modelserver

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// maxProof bounds what /proof?bytes= can ask for.
const maxProof = 64 << 20

// ProofBytes is what POST /proof?id=ID&bytes=SIZE answers: a line that names the
// server, the request and what came of its body, and then bytes that no other
// server and no other request has, so that an answer shows whose it is to its last byte.
func ProofBytes(server, id string, body []byte, size int) []byte {
	out := fmt.Appendf(nil, "%s %s %d %x\n", server, id, len(body), sha256.Sum256(body))
	if len(out) >= size {
		return out
	}
	rest := make([]byte, size-len(out))
	_, _ = io.ReadFull(newPattern(seedOf(server, id)), rest) // a pattern never ends and never fails
	return append(out, rest...)
}

// ProofStream is what /proof/stream?id=ID&events=N answers: N events, each of
// which names the server and the request, and [DONE].
func ProofStream(server, id string, events int) []byte {
	var out []byte
	for i := range events {
		out = append(out, proofEvent(server, id, i)...)
	}
	return append(out, streamEnd...)
}

// ProofWords is the text that an ollama generates for a request with ?id=ID.
func ProofWords(server, id string, words int) string {
	var b strings.Builder
	for i := range words {
		b.WriteString(proofWord(server, id, i))
	}
	return b.String()
}

func proofEvent(server, id string, i int) string {
	return fmt.Sprintf("id: %d\ndata: {\"server\":%q,\"id\":%q,\"index\":%d}\n\n", i, server, id, i)
}

func proofWord(server, id string, i int) string { return fmt.Sprintf("%s/%s/%d ", server, id, i) }

func seedOf(server, id string) uint64 {
	sum := sha256.Sum256([]byte(server + "\x00" + id))
	return binary.LittleEndian.Uint64(sum[:])
}

func (p *plain) proof(w http.ResponseWriter, r *http.Request) error {
	body, err := p.body(w, r)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	size, err := strconv.Atoi(q.Get("bytes"))
	if err != nil || size < 0 || size > maxProof {
		size = 0
	}
	return p.l.answer(w, "application/octet-stream", ProofBytes(p.l.s.name, q.Get("id"), body, size))
}

func (p *plain) proofStream(w http.ResponseWriter, r *http.Request) error {
	id := r.URL.Query().Get("id")
	return p.events(w, r, func(i int) string { return proofEvent(p.l.s.name, id, i) })
}

// events answers with ?events= events, one each ?ms=, and [DONE].
func (p *plain) events(w http.ResponseWriter, r *http.Request, event func(i int) string) error {
	if _, ok := readBody(w, r); !ok {
		return errAnswered
	}
	events, err := strconv.Atoi(r.URL.Query().Get("events"))
	if err != nil || events < 0 {
		events = 10
	}
	// Here ?ms= is the time of one event; else they share RunTime.
	each := p.l.runTime(r)
	if r.URL.Query().Get("ms") == "" && events > 0 {
		each /= time.Duration(events)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	flusher := http.NewResponseController(w)
	for i := range events {
		if err := p.l.runPart(r.Context(), p.m, each, i == events/2); err != nil {
			return err
		}
		if i == events/2 {
			p.l.half(w)
		}
		if _, err := io.WriteString(w, event(i)); err != nil {
			return err
		}
		if err := flusher.Flush(); err != nil {
			return err
		}
	}
	_, err = io.WriteString(w, streamEnd)
	return err
}
