package process

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// exit is how a process ended.
type exit struct {
	signal, status int // a signal, or if that is 0 a status
	unknown        error
}

// text tells it for people, with the last line of the output.
func (e exit) text(last string) string {
	text := fmt.Sprintf("exit status %d", e.status)
	switch {
	case e.unknown != nil:
		return fmt.Sprintf("it ended (%v)", e.unknown)
	case e.signal != 0:
		return fmt.Sprintf("killed by signal %d", e.signal)
	case last != "":
		text += ": " + last
	}
	return text
}

// waitEnd waits until a child has ended, and leaves it to be waited for, so
// that its number stays its own.
func waitEnd(pid int) exit {
	// As the kernel's siginfo_t of SIGCHLD, which is a union behind the code.
	var info struct {
		signo, errno, code int32
		_                  [0]uintptr // the union begins where a pointer could
		pid                int32
		uid                uint32
		status             int32
		_                  [128]byte
	}
	for {
		err := unix.Waitid(unix.P_PID, pid, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOWAIT, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return exit{unknown: err}
		}
		break
	}
	const exited = 1 // CLD_EXITED
	if info.code == exited {
		return exit{status: int(info.status)}
	}
	return exit{signal: int(info.status)}
}
