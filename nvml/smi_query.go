package nvml

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"go.uber.org/zap"
)

// reading is what the program says of all GPUs.
type reading struct {
	rows  []gpuRow
	lost  map[string]string // GPUs that it cannot open, by UUID, and what it says of them
	noise []string          // lines that are no rows
}

// add takes in what one run printed, less what is there already. It reports whether anything was new.
func (r *reading) add(rows []gpuRow, noise []string) (progress bool) {
	for _, row := range rows {
		if !slices.ContainsFunc(r.rows, func(o gpuRow) bool { return o.index == row.index && o.uuid == row.uuid }) {
			r.rows, progress = append(r.rows, row), true
		}
	}
	for _, line := range noise {
		if len(r.noise) < maxNoise && !slices.Contains(r.noise, line) {
			r.noise = append(r.noise, line)
		}
	}
	return progress
}

// has reports whether a GPU has a row.
func (r *reading) has(uuid string) bool {
	return slices.ContainsFunc(r.rows, func(row gpuRow) bool { return row.uuid == uuid })
}

// queryGPUs asks for all GPUs. A field that this driver does not know is left
// out from then on. A GPU that the program cannot open may end the run before it
// comes to the others, so those are asked for by themselves then.
func (s *smi) queryGPUs(ctx context.Context) (reading, error) {
	r := reading{lost: map[string]string{}}
	var ids []string // those to ask for; none: all
	// Each round leaves out one more field or GPU, so the rounds are bounded.
	for range len(s.fields) + len(s.known) + 1 {
		rows, noise, failed, err := s.ask(ctx, ids)
		if err != nil {
			return r, err
		}
		if failed != nil {
			if i := slices.Index(s.fields, unknownField(failed.text)); i >= 0 && slices.Contains(optionalFields, s.fields[i]) {
				s.logger.Info("nvidia-smi does not know a field; doing without it", zap.String("field", s.fields[i]))
				s.fields = slices.Delete(s.fields, i, i+1)
				continue
			}
		}
		r.add(rows, noise)
		progress, stranger := s.lose(&r, noise)
		switch {
		case stranger:
			return r, s.walk(ctx, &r)
		case progress:
			if ids = s.unread(&r); len(ids) > 0 {
				continue
			}
		case failed != nil && len(r.rows) == 0:
			return r, failed
		}
		return r, nil
	}
	return r, errors.New("nvidia-smi refuses every question")
}

// ask runs the program for some GPUs, or for all. The rows of a run that failed count, too.
func (s *smi) ask(ctx context.Context, ids []string) (rows []gpuRow, noise []string, failed *smiError, err error) {
	arguments := []string{"--query-gpu=" + strings.Join(s.fields, ","), "--format=csv,noheader,nounits"}
	if len(ids) > 0 {
		arguments = append(arguments, "--id="+strings.Join(ids, ","))
	}
	text, err := s.run(ctx, arguments...)
	if errors.As(err, &failed) {
		text, err = failed.text, nil
	}
	if err != nil {
		return nil, nil, nil, err
	}
	rows, noise = parseGPUs(text, s.fields)
	if failed != nil && len(rows) > 0 && len(noise) == 0 {
		noise = []string{"it ended with status " + strconv.Itoa(failed.code)}
	}
	return rows, noise, failed, nil
}

// lose notes the GPUs that the program cannot open. It reports whether one of them
// is new in this reading, and whether one was never seen before.
func (s *smi) lose(r *reading, noise []string) (progress, stranger bool) {
	for _, line := range noise {
		busID := lostBusID(line)
		if busID == "" {
			continue
		}
		device, ok := s.byBusID(busID)
		switch {
		case !ok:
			stranger = true
		case r.lost[device.uuid] == "" && !r.has(device.uuid):
			r.lost[device.uuid], progress = line, true
		}
	}
	return progress, stranger
}

// unread lists the known GPUs that the reading lacks and that may answer.
func (s *smi) unread(r *reading) (ids []string) {
	for uuid := range s.known {
		if r.lost[uuid] == "" && !r.has(uuid) {
			ids = append(ids, uuid)
		}
	}
	slices.Sort(ids)
	return ids
}

// maxGPUs bounds a walk. No machine has as many.
const maxGPUs = 64

// walk asks for one GPU after the other, where one that was never seen before
// cannot be opened: which others there are is not known then.
func (s *smi) walk(ctx context.Context, r *reading) error {
	for index := range maxGPUs {
		rows, noise, _, err := s.ask(ctx, []string{strconv.Itoa(index)})
		if err != nil {
			return err
		}
		progress := r.add(rows, noise)
		known := slices.ContainsFunc(r.rows, func(row gpuRow) bool { return row.index == index })
		for _, line := range noise {
			busID := lostBusID(line)
			if _, seen := s.byBusID(busID); busID == "" || seen || known {
				continue
			}
			uuid := unnamed(index)
			s.known[uuid] = identity{index: index, uuid: uuid, busID: busID}
			r.lost[uuid], progress = line, true
		}
		if !progress && !known { // there is none of this index
			break
		}
	}
	if len(r.rows)+len(r.lost) == 0 {
		return errors.New("nvidia-smi can open no GPU: " + strings.Join(r.noise, "; "))
	}
	return nil
}

// unnamed is the identity of a GPU that does not tell its own.
func unnamed(index int) string { return "index-" + strconv.Itoa(index) }
