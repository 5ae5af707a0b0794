package main

// equivalent are random faults that were looked at and found to change nothing that anybody could see, by room and
// the text of the change, with the reason. The runner leaves them out.
var equivalent = map[string]string{
	`routing/values.go: number: return 0, false, bad("field %q must be a number, it is a text of more than %d bytes", field, maxCapture) => return 0, true, bad("field %q must be a number, it is a text of more than %d bytes", field, maxCapture)`: withError,
	`routing/values.go: number: return 0, false, bad("field %q: %v", field, err) => return 0, true, bad("field %q: %v", field, err)`:                                                                                                                 withError,
	`routing/values.go: number: return 0, false, bad("field %q must be a number, it is a string that holds none", field) => return 0, true, bad("field %q must be a number, it is a string that holds none", field)`:                                 withError,
	`routing/values.go: number: return 0, false, bad("field %q must be a number, it is %s", field, v.what()) => return 0, true, bad("field %q must be a number, it is %s", field, v.what())`:                                                         withError,
	`routing/values.go: number: return 0, false, bad("field %q must be a number", field) => return 0, true, bad("field %q must be a number", field)`:                                                                                                 withError,
	`routing/values.go: integer: return 0, false, err => return 0, true, err`:                                                                                                                                                                        withError,
	`routing/values.go: integer: return 0, false, bad("field %q must be a whole number", field) => return 0, true, bad("field %q must be a whole number", field)`:                                                                                    withError,
	`lifecycle/process/output.go: add: return -1 // what would move the cursor of who reads it => return -2 // what would move the cursor of who reads it`:                                                                                           "strings.Map drops a character for any negative value",

	"scheduler/words.go: Rounded: case abs < time.Millisecond: => case abs <= time.Millisecond:": roundAnyway,
	"scheduler/words.go: Rounded: case abs < time.Second: => case abs <= time.Second:":           roundAnyway,
	"scheduler/words.go: Rounded: case abs < time.Minute: => case abs <= time.Minute:":           roundAnyway,

	"scheduler/observe.go: claimLeaks: if h == nil || h.before <= 0 || sl.state != Ready || !sl.settledOn(c) || s.transition(c.Index) != nil { => if h == nil || h.before < 0 || sl.state != Ready || !sl.settledOn(c) || s.transition(c.Index) != nil {": "the leak of a slot that kept nothing is 0",

	"scheduler/clients.go: clientRests: return len(s.resting.until) > 0 && s.cfg.Mode != Passthrough && now.Before(s.resting.until[r]) => return len(s.resting.until) >= 0 && s.cfg.Mode != Passthrough && now.Before(s.resting.until[r])": "it only saves a look into an empty map",
}

const roundAnyway = "the bound itself is a whole number of either unit"

const withError = "Peek drops all facts of a body that has an error"
