package doctor_test

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/doctor"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

// fault is what a test has set up wrong, and what is to be said of it.
type fault struct {
	name     string
	severity doctor.Severity
	consumer string
	line     string // of the Caddyfile; empty: no place
	what     string
	mend     string
}

// isTold reports whether a finding tells of a fault.
func (m *machine) isTold(f fault, config string, found doctor.Finding) bool {
	where := ""
	if f.line != "" {
		where = m.lineOf(config, f.line)
	}
	return found.Severity == f.severity && found.Consumer == f.consumer && found.Where == where && strings.Contains(found.What, f.what) && strings.Contains(found.Mend, f.mend)
}

// Everything that can be set up wrong on one machine without a card, at once.
func TestDoctorFindsEveryFaultAndSaysHowToMendIt(t *testing.T) {
	mustBeFree(t, ollamaPort, comfyPort)
	m := newMachine(t)
	m.user = nobody

	open := serve(t, modelserver.Options{Name: "open", Manner: modelserver.Ollama, Addr: fmt.Sprintf("0.0.0.0:%d", ollamaPort)})
	impostor := serve(t, modelserver.Options{Name: "impostor", Manner: modelserver.KoboldCpp})
	unnamed := serve(t, modelserver.Options{Name: "unnamed", Manner: modelserver.ComfyUI, Addr: fmt.Sprintf("127.0.0.1:%d", comfyPort)})

	require.NoError(t, os.Chmod(m.path("data"), 0o555))
	socket, err := net.Listen("unix", m.path("docker.sock"))
	require.NoError(t, err)
	defer socket.Close()
	require.NoError(t, os.Chmod(m.path("docker.sock"), 0o000))
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	ports := taken.Addr().(*net.TCPAddr).Port
	game, err := simulated.NewOutsider(m.path("gpu"), "doom")
	require.NoError(t, err)
	defer game.Close()
	require.NoError(t, game.Set(0, 3*gpu.GiB))
	require.NoError(t, os.Chmod(m.path("gpu/outsider-doom"), 0o644))

	config := m.write("Caddyfile", fmt.Sprintf(`{
	admin off
	servers {
		timeouts {
			write 30s
		}
	}
	gpu_broker {
		gpu simulated 24GiB {
			dir %s
		}
		consumer open {
			preset ollama
			upstream 127.0.0.1:%d
			vram 6GiB
		}
		consumer impostor {
			preset ollama # kobold
			upstream %s
			vram 5GiB
		}
		consumer absent {
			preset ollama # absent
			upstream 127.0.0.1:%d # nobody
			vram 4GiB
		}
		consumer large {
			preset a1111
			upstream 127.0.0.1:%d # large
			vram 30GiB
		}
		consumer hasty {
			preset ollama # hasty
			upstream 127.0.0.1:%d # hasty
			vram 1GiB
			budget 1m
		}
		consumer stuck {
			preset llamacpp
			upstream 127.0.0.1:%d # stuck
			vram 2GiB
		}
		consumer ported {
			process sleep {gpu_broker.port} {
				ports %d-%d
			}
			vram 3GiB
		}
		consumer programless {
			process no-such-model-server --port {gpu_broker.port}
			vram 3.5GiB
		}
		consumer boxed {
			docker llama {
				host unix://%s
			}
			upstream 127.0.0.1:%d # boxed
			vram 2.5GiB
		}
		consumer misspelt {
			preset olama
			upstream 127.0.0.1:1
			vram 1.5GiB
		}
		consumer unset {
			preset comfyui # unset
			upstream {env.GPU_BROKER_DOCTOR_NOPE}:1
			vram 1.25GiB
		}
	}
}

:%d {
	handle /v1/* {
		gpu_broker opne
		reverse_proxy {http.gpu_broker.upstream}
	}
	handle {
		gpu_broker open
		reverse_proxy {http.gpu_broker.upstream} {
			header_up X-Token {env.GPU_BROKER_DOCTOR_TOKEN}
			transport http {
				response_header_timeout 20s
			}
		}
	}
}
`, m.path("gpu"), ollamaPort, impostor.Addr(), freePort(t), freePort(t), freePort(t), freePort(t), ports, ports, m.path("docker.sock"), freePort(t), freePort(t)))

	report, status := m.doctor(config)
	assert.Equal(t, 1, status)
	for _, f := range []fault{
		{"a folder that can't be written to", doctor.Error, "", "", "may not write to Caddy's folder " + m.path("data/caddy"), "chown -R"},
		{"a socket without permission", doctor.Error, "boxed", "docker llama {", "may not speak to Docker at unix://" + m.path("docker.sock"), "SupplementaryGroups=docker"},
		{"a server that does not run", doctor.Error, "absent", "# nobody", "nothing listens at 127.0.0.1:", "11434 unless told otherwise"},
		{"a server in another's name", doctor.Error, "impostor", "# kobold", "its preset is ollama, but the server at " + impostor.Addr() + " is KoboldCpp", "write preset koboldcpp"},
		{"a claim above the card", doctor.Error, "large", "vram 30GiB", "it claims 30GiB, with the cushion 30.25GiB, and never fits: GPU 0 has 24GiB", "smaller model"},
		{"a budget below the load's time", doctor.Warning, "hasty", "budget 1m", "its budget of 1m0s is below its load_timeout of 5m0s", "write budget 5m0s or more"},
		{"answers that are cut off", doctor.Error, "", "write 30s", "write time-out of 30s is below the budget of 10m0s", "remove it"},
		{"cold starts that are cut off", doctor.Error, "open", "response_header_timeout 20s", "below the load_timeout of 5m0s of open", "remove it"},
		{"a stranger's memory", doctor.Warning, "", "", `"doom" holds 3GiB of GPU 0`, "write processes doom"},
		{"a server that nobody names", doctor.Warning, "", "gpu_broker {\n\t\tgpu", fmt.Sprintf("ComfyUI runs at 127.0.0.1:%d, and no consumer names it", comfyPort), "preset comfyui; upstream 127.0.0.1:8188"},
		{"a server for everybody", doctor.Warning, "open", "upstream 127.0.0.1:" + strconv.Itoa(ollamaPort), "it listens on all addresses, port 11434", "OLLAMA_HOST=127.0.0.1"},
		{"no free port", doctor.Error, "ported", fmt.Sprintf("ports %d-%d", ports, ports), fmt.Sprintf("none of its ports %d-%d is free", ports, ports), "write another range"},
		{"a server that nothing can unload", doctor.Error, "stuck", "preset llamacpp", "only the end of its process frees the memory", "process COMMAND"},
		{"a program that is not there", doctor.Error, "programless", "process no-such-model-server", `exec: "no-such-model-server": executable file not found`, "install it"},
		{"a preset that is misspelt", doctor.Error, "misspelt", "preset olama", `unknown preset "olama": did you mean ollama?`, "write ollama"},
		{"a placeholder without a value", doctor.Error, "unset", "upstream {env.GPU_BROKER_DOCTOR_NOPE}", "{env.GPU_BROKER_DOCTOR_NOPE}", "set what the placeholder names"},
		{"another, that Caddy would pass over", doctor.Warning, "", "header_up X-Token", "{env.GPU_BROKER_DOCTOR_TOKEN} has no value here", "set GPU_BROKER_DOCTOR_TOKEN where Caddy runs"},
		{"a route to nobody", doctor.Error, "", "gpu_broker opne", `unknown consumer "opne": did you mean open?`, "write open"},
	} {
		told := 0
		for _, found := range report.Findings {
			if m.isTold(f, config, found) {
				told++
			}
		}
		assert.Equal(t, 1, told, "%s (%+v)", f.name, f)
	}
	for _, found := range report.Findings {
		if found.Severity != doctor.Note {
			assert.NotEmpty(t, found.Mend, found.What)
		}
	}
	if t.Failed() {
		out, _, _ := m.run("gpu-broker", "doctor", "--config", config)
		t.Log(out)
	}

	for _, s := range []*modelserver.Server{open, impostor, unnamed} {
		is := s.Stats()
		assert.Zero(t, is.LoadsStarted+is.UnloadCalls+is.Worked+is.WokenByProbe, "%s was not only looked at: %+v", s.Name(), is)
	}
}

func TestDoctorFindsNothingWhereAllIsWell(t *testing.T) {
	m := newMachine(t)
	s := serve(t, modelserver.Options{Name: "llm", SimDir: m.path("gpu"), Preloaded: true})
	config := m.write("Caddyfile", fmt.Sprintf(`{
	admin off
	gpu_broker {
		gpu simulated 24GiB {
			dir %s
		}
		consumer llm {
			upstream %s
			vram 6GiB
			health /health {
				loaded $.loaded
				resident_mib $.gpu_resident_mib
			}
			load POST /api/admin/load
			unload POST /api/admin/unload
		}
	}
}

:%d {
	gpu_broker llm
	reverse_proxy {http.gpu_broker.upstream}
}
`, m.path("gpu"), s.Addr(), freePort(t)))
	report, status := m.doctor(config)
	assert.Zero(t, status)
	for _, found := range report.Findings {
		// Whoever else uses this machine's default ports is none of this test's.
		if found.Check != "engines" {
			assert.Equal(t, doctor.Note, found.Severity, "%+v", found)
		}
	}
	assert.Contains(t, fmt.Sprint(report.Findings), "it answers at "+s.Addr()+", and holds 1GiB")
	for _, folder := range []string{"data", "config"} {
		left, err := os.ReadDir(m.path(folder))
		require.NoError(t, err)
		assert.Empty(t, left, "the doctor wrote to %s", folder)
	}

	out, errs, status := m.run("gpu-broker", "doctor", "--config", config)
	assert.Zero(t, status, errs)
	assert.Contains(t, out, "no errors, ")
}

func TestDoctorSaysThatTheGPUsCannotBeRead(t *testing.T) {
	m := newMachine(t)
	require.NoError(t, simulated.WriteState(m.path("gpu"), "telemetry lost"))
	site := `{
	gpu_broker {
		gpu %s
	}
}
`
	for sampler, want := range map[string]fault{
		"simulated 8GiB {\n\t\t\tdir " + m.path("gpu") + "\n\t\t}": {severity: doctor.Error, what: "no GPU can be read: simulated GPUs: the state file says: telemetry lost"},
		"static 8GiB": {severity: doctor.Warning, what: "degraded: the GPUs are declared and not read"},
		"nvidia_smi {\n\t\t\tpath /no/such/smi\n\t\t}": {severity: doctor.Error, what: "no GPU can be read: gpu nvidia_smi"},
	} {
		want.line = "gpu " + strings.SplitN(sampler, "\n", 2)[0]
		config := m.write("Caddyfile", fmt.Sprintf(site, sampler))
		report, status := m.doctor(config)
		assert.Equal(t, 1, status, "there is no consumer, which is an error, too")
		told := false
		for _, found := range report.Findings {
			told = told || m.isTold(want, config, found)
		}
		assert.True(t, told, "%s: %+v", sampler, report.Findings)
	}
}

// Whatever hangs, the doctor ends.
func TestDoctorEndsThoughServersAndSocketsHang(t *testing.T) {
	m := newMachine(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections into its queue, and no more
	require.NoError(t, err)
	defer silent.Close()
	socket, err := net.Listen("unix", m.path("docker.sock"))
	require.NoError(t, err)
	defer socket.Close()
	smi := m.write("nvidia-smi", "#!/bin/sh\nexec sleep 60\n")
	require.NoError(t, os.Chmod(smi, 0o755))
	config := m.write("Caddyfile", fmt.Sprintf(`{
	admin off
	gpu_broker {
		gpu nvidia_smi {
			path %s
		}
		consumer silent {
			preset ollama
			upstream %s
			vram 6GiB
		}
		consumer boxed {
			docker llama {
				host unix://%s
			}
			upstream 127.0.0.1:%d
			vram 2GiB
		}
	}
}

:%d {
	gpu_broker silent
	reverse_proxy {http.gpu_broker.upstream}
}
`, smi, silent.Addr(), m.path("docker.sock"), freePort(t), freePort(t)))
	begun := time.Now()
	report, status := m.doctor(config, "--timeout", "1s")
	assert.Less(t, time.Since(begun), 10*time.Second)
	assert.Equal(t, 1, status)
	said := fmt.Sprint(report.Findings)
	assert.Contains(t, said, "it does not answer in time")
	assert.Contains(t, said, "no GPU can be read: gpu nvidia_smi")
	assert.Contains(t, said, "Docker at unix://"+m.path("docker.sock")+" did not answer in time")
}

func TestDoctorSaysWhatIsWrongWithItsArguments(t *testing.T) {
	m := newMachine(t)
	for _, c := range []struct {
		want string
		args []string
	}{
		{"reading the configuration", []string{"--config", m.path("none")}},
		{"--timeout is 0s", []string{"--config", m.path("none"), "--timeout", "0s"}},
		{"unknown flag", []string{"--cnfig", m.path("none")}},
	} {
		_, errs, status := m.run(append([]string{"gpu-broker", "doctor"}, c.args...)...)
		assert.Equal(t, 1, status, "%v", c.args)
		assert.Contains(t, errs, c.want, "%v", c.args)
	}
	broken := m.write("Caddyfile", "{\n\tgpu_broker {\n\t\tgpuu auto\n\t}\n}\n")
	report, status := m.doctor(broken)
	assert.Equal(t, 1, status)
	require.NotEmpty(t, report.Findings)
	assert.Equal(t, broken+":3", report.Findings[0].Where)
	assert.Contains(t, report.Findings[0].What, "did you mean gpu?")
}
