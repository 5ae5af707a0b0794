package scheduler

import "time"

// Rounded is a duration as people read it: to milliseconds below a second, to tenths of a second below a minute, else to seconds.
func Rounded(d time.Duration) string {
	unit := time.Second
	switch abs := d.Abs(); {
	case abs < time.Millisecond:
		unit = time.Microsecond
	case abs < time.Second:
		unit = time.Millisecond
	case abs < time.Minute:
		unit = 100 * time.Millisecond
	}
	return d.Round(unit).String()
}
