//go:build !race

package scheduler

// historySteps is how many steps the random histories have in all.
const historySteps = 110_000
