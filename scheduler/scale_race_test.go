//go:build race

package scheduler

// historySteps is how many steps the random histories have in all; the race
// detector makes each about ten times as slow.
const historySteps = 12_000
