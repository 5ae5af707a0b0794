package onecard

import (
	"flag"
	"os"
	"testing"
)

// Cannot is why the daemon that tests need can't run on this machine; empty: it can. The tests of its package are
// left out then, but for one by the name of TestRealDaemonRuns, which is skipped so that it shows in the list of what was.
func Cannot() (why string) {
	why = os.Getenv("GPU_BROKER_CANNOT")
	if why != "" {
		if err := flag.Set("test.run", "^TestRealDaemonRuns$"); err != nil {
			panic(err) // package testing has this flag
		}
	}
	return why
}

// Runs skips the test with the reason why the daemon can't run, if it can't.
func Runs(t *testing.T) {
	if why := Cannot(); why != "" {
		t.Skipf("no daemon for these tests can run here: %s", why)
	}
}
