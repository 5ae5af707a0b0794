package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// pointLimit bounds how much of one swap is kept: minutes at the usual rate.
const pointLimit = 200_000

// point is the free memory at a moment.
type point struct {
	at   time.Time
	free gpu.Bytes
}

// device takes one look and gives the first GPU.
func device(ctx context.Context, s gpu.Sampler, detail gpu.Detail) (gpu.Device, time.Time, error) {
	sample, err := s.Sample(ctx, detail)
	if err != nil {
		return gpu.Device{}, time.Time{}, err
	}
	if len(sample.Devices) == 0 {
		return gpu.Device{}, time.Time{}, fmt.Errorf("%s lists no GPU", s.Name())
	}
	d := sample.Devices[0]
	if d.Health != gpu.Healthy || !d.MemoryKnown {
		return d, sample.At, fmt.Errorf("GPU %s: its memory cannot be read: %s %s", d.UUID, d.Health, d.Reason)
	}
	return d, sample.At, nil
}

// watch looks at the free memory again and again while do runs. Nobody else
// may use the sampler meanwhile.
func watch(ctx context.Context, s gpu.Sampler, every time.Duration, do func(context.Context) error) ([]point, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var points []point
	for {
		d, at, err := device(ctx, s, gpu.Memory)
		if err != nil {
			cancel()
			return points, errors.Join(err, <-done)
		}
		if len(points) < pointLimit {
			points = append(points, point{at, d.Free})
		}
		select {
		case err := <-done:
			return points, err
		case <-ticker.C:
		}
	}
}

// release is how memory came back after an unload.
type release struct {
	before, after gpu.Bytes     // free before the unload began, and the most that was free after it
	took          time.Duration // from the unload's begin until nearly all of it was seen free
}

// released finds in the points how memory came back between an unload's begin
// and the next load's begin. False: no memory was seen to come back.
func released(points []point, began, next time.Time) (release, bool) {
	const nearly = 0.98 // the rest may be another program's doing
	var r release
	known := false
	for _, p := range points {
		if !p.at.After(began) || !known {
			r.before, r.after, known = p.free, p.free, true
		}
		if p.at.After(began) && !p.at.After(next) {
			r.after = max(r.after, p.free)
		}
	}
	enough := r.before + gpu.Bytes(nearly*float64(r.after-r.before))
	for _, p := range points {
		if r.after > r.before && p.at.After(began) && !p.at.After(next) && p.free >= enough {
			r.took = p.at.Sub(began)
			return r, true
		}
	}
	return r, false
}

func delay(d time.Duration) caddy.Duration { return caddy.Duration(d) }
