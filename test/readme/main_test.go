package readme

import (
	"testing"

	"go.uber.org/goleak"
)

// What is validated must leave nothing running.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
