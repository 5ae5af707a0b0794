// Command mortal is a server that ends when it is told to, for the tests with
// a real systemd and a real Docker. It needs nothing but itself.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:0", "where it listens")
	delay := flag.Duration("delay", 0, "how long it takes before it does")
	code := flag.Int("exit", -1, "exit at once with this status")
	child := flag.Bool("child", false, "only wait to be killed")
	stubborn := flag.Bool("stubborn", false, "do not end at SIGTERM")
	flag.Parse()
	if *code >= 0 {
		os.Exit(*code)
	}
	if *stubborn || *child {
		signal.Ignore(syscall.SIGTERM)
	} else {
		// As PID 1 of a container it would not be ended by a signal that nobody handles.
		told := make(chan os.Signal, 1)
		signal.Notify(told, syscall.SIGTERM, syscall.SIGINT)
		go func() {
			if s := <-told; s == syscall.SIGINT {
				os.Exit(7)
			}
			os.Exit(0)
		}()
	}
	if *child {
		select {}
	}
	time.Sleep(*delay)
	fatal(serve(*listen))
}

func serve(address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	if err := tellReady(); err != nil {
		return err
	}
	http.HandleFunc("/exit", func(_ http.ResponseWriter, r *http.Request) {
		code, err := strconv.Atoi(r.FormValue("code"))
		if err != nil {
			fatal(err)
		}
		os.Exit(code)
	})
	http.HandleFunc("/fork", func(w http.ResponseWriter, _ *http.Request) {
		cmd := exec.Command("/proc/self/exe", "-child")
		if err := cmd.Start(); err != nil {
			fatal(err)
		}
		_, _ = fmt.Fprint(w, cmd.Process.Pid) // who asked is gone
	})
	http.HandleFunc("/eat", func(http.ResponseWriter, *http.Request) { eat() })
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintln(w, "well") // who asked is gone
	})
	return http.Serve(listener, nil)
}

// eat takes RAM until somebody puts an end to it, but not that of a whole machine.
func eat() {
	const bite, most = 1 << 20, 1 << 30
	for eaten := 0; eaten < most; eaten += bite {
		stomach = append(stomach, bytes.Repeat([]byte{1}, bite))
	}
	fatal(errors.New("nobody has bounded its RAM"))
}

var stomach [][]byte

// tellReady tells systemd that it is ready, if it wants to know: see sd_notify(3).
func tellReady() error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	conn, err := net.Dial("unixgram", socket)
	if err != nil {
		return err
	}
	if _, err := conn.Write([]byte("READY=1")); err != nil {
		return err
	}
	return conn.Close()
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "mortal:", err)
	os.Exit(1)
}
