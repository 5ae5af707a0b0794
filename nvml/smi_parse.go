package nvml

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// gpuFields are asked of every GPU, in this order.
var gpuFields = []string{
	"index", "uuid", "name", "pci.bus_id",
	"memory.total", "memory.used", "memory.free", "memory.reserved",
	"utilization.gpu", "temperature.gpu", "power.draw", "mig.mode.current",
}

// optionalFields may be unknown to an older driver, which then refuses the
// whole question.
var optionalFields = []string{"memory.reserved", "utilization.gpu", "temperature.gpu", "power.draw", "mig.mode.current"}

// gpuRow is a line of the answer.
type gpuRow struct {
	index             int
	uuid, name, busID string // empty if not told

	total, used, free, reserved gpu.Bytes // -1 if not told
	utilisation, temperature    int       // -1 if not told
	power                       float64   // -1 if not told
	lost, needsReset            bool
	mig, unknownError           bool
	memoryText                  string // what stands in place of the memory, if it is not told
}

// maxNoise bounds how many lines that are no rows are kept.
const maxNoise = 8

// parseGPUs reads the answer to a question for fields. Lines that are no rows, such
// as warnings, are returned as noise, shortened and bounded; they take nothing from the rows.
func parseGPUs(text string, fields []string) (rows []gpuRow, noise []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		row, err := parseGPU(line, fields)
		if err == nil {
			rows = append(rows, row)
		} else if len(noise) < maxNoise {
			noise = append(noise, firstLine(line))
		}
	}
	whole := map[int]bool{} // a card that is cut up by MIG stands for its parts, which have its index
	for _, row := range rows {
		whole[row.index] = whole[row.index] || !row.isPart()
	}
	rows = slices.DeleteFunc(rows, func(row gpuRow) bool { return row.isPart() && whole[row.index] })
	return rows, noise
}

// isPart reports whether the row is of a part of a card that MIG has cut up.
func (r gpuRow) isPart() bool { return strings.HasPrefix(r.uuid, "MIG-") }

// isWarning reports whether a line is a warning that says nothing against the rows beside it.
func isWarning(line string) bool {
	lower := strings.ToLower(line)
	return strings.HasPrefix(lower, "warning") || strings.Contains(lower, "inforom is corrupted")
}

// about is what the program said of a GPU beside its row: what names its bus, and what names none.
func about(noise []string, busID string) string {
	var said []string
	for _, line := range noise {
		if named := anyBusID(line); named == "" || strings.EqualFold(named, busID) {
			said = append(said, line)
		}
	}
	if len(said) == 0 {
		return ""
	}
	return "nvidia-smi says: " + strings.Join(said, "; ")
}

func parseGPU(line string, fields []string) (gpuRow, error) {
	columns := strings.Split(line, ",")
	// A name may hold commas. The address behind it shows that it is the name which has too many.
	if name, more := slices.Index(fields, "name"), len(columns)-len(fields); name >= 0 && more > 0 && strings.Contains(columns[name+more+1], ":") {
		columns = slices.Replace(columns, name, name+more+1, strings.Join(columns[name:name+more+1], ","))
	}
	if len(columns) != len(fields) {
		return gpuRow{}, fmt.Errorf("nvidia-smi's line %q has %d columns, want %d", firstLine(line), len(columns), len(fields))
	}
	value := func(field string) string {
		i := slices.Index(fields, field)
		if i < 0 {
			return "" // not asked for
		}
		return strings.TrimSpace(columns[i])
	}
	index, err := strconv.ParseUint(value("index"), 10, 16)
	if err != nil {
		return gpuRow{}, fmt.Errorf("nvidia-smi's line %q does not begin with the index of a GPU", firstLine(line))
	}
	row := gpuRow{
		index: int(index),
		uuid:  word(value("uuid")), name: word(value("name")), busID: word(value("pci.bus_id")),
		total: mebibytes(value("memory.total")), used: mebibytes(value("memory.used")),
		free: mebibytes(value("memory.free")), reserved: mebibytes(value("memory.reserved")),
		utilisation: whole(value("utilization.gpu")), temperature: whole(value("temperature.gpu")),
		power: number(value("power.draw")),
		lost:  strings.Contains(line, "GPU is lost"),
		mig:   value("mig.mode.current") == "Enabled",
	}
	if row.total < 0 && row.free >= 0 && row.used >= 0 && row.reserved >= 0 {
		row.total = row.free + row.used + row.reserved
	}
	for _, field := range []string{"memory.free", "memory.total"} {
		if text := value(field); number(text) < 0 {
			row.memoryText = text
		}
	}
	row.needsReset = strings.Contains(strings.ToLower(row.memoryText), "requires reset")
	row.unknownError = strings.Contains(row.memoryText, "Unknown Error") || strings.Contains(row.memoryText, "ERR!")
	return row, nil
}

// device is the row as the rest of the project sees it. Memory that is not
// told is unknown, never zero.
func (r gpuRow) device(meminfo string) gpu.Device {
	device := gpu.Device{
		Index: r.index, UUID: r.uuid, Name: r.name, Health: gpu.Healthy,
		Utilisation: r.utilisation, Temperature: r.temperature, Power: r.power,
		Total: max(r.total, 0),
	}
	free := r.free
	if free < 0 && r.total >= 0 && r.used >= 0 && r.reserved >= 0 {
		// Only with reserved do the parts make up the whole.
		free = max(0, r.total-r.used-r.reserved)
	}
	switch {
	case r.lost:
		device.Health, device.Reason = gpu.Lost, "GPU is lost: it fell off the bus: reboot, and look at its power and seat"
		device.Utilisation, device.Temperature, device.Power = -1, -1, -1
	case r.needsReset:
		device.Health, device.Reason = gpu.Lost, "the GPU requires a reset: stop what uses it and run nvidia-smi --gpu-reset, or reboot"
		device.Utilisation, device.Temperature, device.Power = -1, -1, -1
	case r.mig:
		device.Reason = "MIG is enabled: the free memory of its parts is not read"
	case r.total > 0 && free >= 0:
		device.Free, device.MemoryKnown = free, true
	case notSupported(r.memoryText) && isUnified(r.name):
		fillUnified(&device, meminfo)
	default:
		device.Reason = fmt.Sprintf("the driver does not tell its memory: %q", r.memoryText)
	}
	return device
}

// parseProcesses reads lines of UUID, PID, name and MiB. The name is the
// workload's choice and may hold commas, so the others are split off from both
// ends. Other lines take nothing from the rows; but if there are only such, and
// not all are warnings, the list is not known.
func parseProcesses(text string) (map[string][]gpu.Process, error) {
	byUUID := map[string][]gpu.Process{}
	strange := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		uuid, rest, _ := strings.Cut(line, ",")
		pidText, rest, _ := strings.Cut(rest, ",")
		pid, err := strconv.ParseUint(strings.TrimSpace(pidText), 10, 31)
		last := strings.LastIndexByte(rest, ',')
		if err != nil || last < 0 {
			strange = strange || !isWarning(line)
			continue
		}
		used := mebibytes(strings.TrimSpace(rest[last+1:])) // -1 if not told, as on WSL2
		uuid = strings.TrimSpace(uuid)
		byUUID[uuid] = append(byUUID[uuid], gpu.Process{PID: int(pid), Name: word(strings.TrimSpace(rest[:last])), Used: used})
	}
	if strange && len(byUUID) == 0 {
		return nil, errors.New("nvidia-smi's list of processes is not understood")
	}
	return byUUID, nil
}

// word is a text, or empty where a non-value stands in its place.
func word(text string) string {
	if text == "N/A" || text == "ERR!" || strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
		return ""
	}
	return text
}

// number is a plain number of at least zero, or -1 for whatever else.
func number(text string) float64 {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || n < 0 || math.IsNaN(n) || math.IsInf(n, 0) {
		return -1
	}
	return n
}

func whole(text string) int {
	n := number(text)
	if n > math.MaxInt32 {
		return -1
	}
	return int(math.Round(n))
}

func mebibytes(text string) gpu.Bytes {
	// No GPU has 2^40 MiB, but the driver's sentinel for "not told" is above it.
	n, err := strconv.ParseUint(text, 10, 40)
	if err != nil {
		return -1
	}
	return gpu.Bytes(n) * gpu.MiB
}

// notSupported reports whether a non-value means that the driver has no such
// reading, rather than that reading it went wrong.
func notSupported(text string) bool {
	return text == "[N/A]" || text == "N/A" || text == "[Not Supported]"
}
