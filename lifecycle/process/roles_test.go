//go:build linux

package process_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
)

// The test binary is its own server: with this variable it plays a role instead of running tests.
const roleVariable = "GPU_BROKER_TEST_ROLE"

// me is the test binary, also for those who may not enter its folder.
const me = "/proc/self/exe"

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleVariable); role {
	case "":
		goleak.VerifyTestMain(m)
	case "server":
		playServer()
	case "worker", "deaf worker":
		if role != "worker" {
			signal.Ignore(syscall.SIGTERM)
		}
		// Who writes where nobody reads any more dies of that; workers of a Caddy that is to be killed must not.
		if os.Getenv("TEST_CONFIG") == "" {
			fmt.Printf("worker %d\n", os.Getpid())
		}
		playDeaf()
	case "caddy":
		playCaddy()
	default:
		panic("unknown role " + role)
	}
}

// playDeaf is no test but the program that one starts: it sits there until it is ended, or forgotten by a test that fails.
func playDeaf() { time.Sleep(2 * time.Minute) } // to hear of nothing is what it is for

// playServer is a model server.
func playServer() {
	port := flag.Int("port", 0, "where it listens; 0: nowhere")
	deaf := flag.Bool("deaf", false, "ignores SIGTERM")
	workers := flag.Int("workers", 0, "how many it starts")
	deafWorkers := flag.Bool("deafworkers", false, "they ignore SIGTERM")
	setsid := flag.Bool("setsid", false, "they leave its session")
	says := flag.String("say", "", "what it writes")
	warns := flag.String("warn", "", "what it writes on its standard error")
	flood := flag.Int("flood", 0, "how many lines it writes before it listens")
	exit := flag.Int("exit", -1, "it ends at once, with this status")
	farewell := flag.Duration("farewell", 0, "how long it takes to stop")
	flag.Parse()
	if *deaf {
		signal.Ignore(syscall.SIGTERM)
	}
	if *farewell > 0 {
		asked := make(chan os.Signal, 1)
		signal.Notify(asked, syscall.SIGTERM, syscall.SIGUSR1)
		go func() {
			s := <-asked
			fmt.Printf("asked by %d\n", s)
			time.Sleep(*farewell) // the time that its stop takes, which is what the test is about
			fmt.Println("bye")
			os.Exit(0)
		}()
	}
	for range *workers {
		c := exec.Command(me)
		role := "worker"
		if *deafWorkers {
			role = "deaf worker"
		}
		c.Env = append(os.Environ(), roleVariable+"="+role)
		c.Stdout, c.Stderr = os.Stdout, os.Stderr
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: *setsid}
		if err := c.Start(); err != nil {
			panic(err)
		}
	}
	for i := range *flood {
		fmt.Println("line", i)
	}
	if *says != "" {
		fmt.Print(*says)
	}
	if *warns != "" {
		fmt.Fprint(os.Stderr, *warns)
	}
	if *exit >= 0 {
		os.Exit(*exit)
	}
	if *port == 0 {
		playDeaf()
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/args", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(os.Args[1:]) })
	mux.HandleFunc("/env", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(os.Environ()) })
	mux.HandleFunc("/dir", func(w http.ResponseWriter, _ *http.Request) {
		dir, _ := os.Getwd()
		_ = json.NewEncoder(w).Encode(dir)
	})
	mux.HandleFunc("/proc", func(w http.ResponseWriter, _ *http.Request) {
		status, _ := os.ReadFile("/proc/self/status")
		_ = json.NewEncoder(w).Encode(string(status))
	})
	mux.HandleFunc("/exit", func(_ http.ResponseWriter, r *http.Request) {
		status, _ := strconv.Atoi(r.FormValue("status"))
		fmt.Println(r.FormValue("say"))
		os.Exit(status)
	})
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(*port)))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	panic(http.Serve(l, mux))
}

// playCaddy is a Caddy that starts a server by the lifecycle process and waits to be killed.
// It writes what it started, or an error, as one line.
func playCaddy() {
	config, dir := os.Getenv("TEST_CONFIG"), os.Getenv("TEST_DIR")
	if s := os.Getenv("TEST_SHELL"); s != "" {
		process.SetShell(s)
	}
	tell := func(format string, args ...any) {
		fmt.Println(strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", " "))
		playDeaf()
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	l := new(process.Lifecycle)
	if err := caddy.StrictUnmarshalJSON([]byte(config), l); err != nil {
		tell("error: %v", err)
	}
	if err := l.Provision(ctx); err != nil {
		tell("error: %v", err)
	}
	d, err := l.Open(lifecycle.Deps{Consumer: "qwen", Dir: dir, Logger: zap.NewNop()})
	if err != nil {
		tell("error: %v", err)
	}
	if err := d.Load(context.Background(), lifecycle.Target{}); err != nil {
		tell("error: %v", err)
	}
	s := d.(lifecycle.Supervisor)
	tell("started %d at %s", s.State().PID, s.Upstream())
}

// caddyProcess is a playCaddy from outside.
type caddyProcess struct {
	cmd     *exec.Cmd
	told    string // its line
	server  int    // the PID of its server
	address string
}

// startCaddy starts one, which starts a server by config.
func startCaddy(t *testing.T, config, dir string, adjust ...func(*exec.Cmd)) *caddyProcess {
	t.Helper()
	c := &caddyProcess{cmd: exec.Command(me)}
	c.cmd.Env = append(os.Environ(), roleVariable+"=caddy", "TEST_CONFIG="+config, "TEST_DIR="+dir)
	c.cmd.Stderr = os.Stderr
	for _, f := range adjust {
		f(c.cmd)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.kill()
		_ = out.Close()
		if dir != "" { // of a test that failed: what left the group of its server lives yet
			_, _ = process.Reap(dir, zap.NewNop())
		}
	})
	c.told, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("it ended: %v", err)
	}
	_, _ = fmt.Sscanf(c.told, "started %d at %s", &c.server, &c.address)
	return c
}

// kill kills it as kill -9 does.
func (c *caddyProcess) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}
