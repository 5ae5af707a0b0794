package amdgpu

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

var (
	cardPattern    = regexp.MustCompile(`^card[0-9]+$`) // not its connectors, such as card0-HDMI-A-1
	addressPattern = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
	uniquePattern  = regexp.MustCompile(`^[0-9a-f]{1,16}$`)
)

// card is a GPU that the driver amdgpu serves.
type card struct {
	address string // on the PCI bus, as in 0000:03:00.0
	model   string // vendor and device in hexadecimal, as in 1002:744C
	device  string // its folder
	unique  string // its serial number in hexadecimal; empty: not told
}

// uuid is the identity: the name by which ROCm knows the GPU, else its place.
func (c card) uuid() string {
	if c.unique == "" {
		return "PCI-" + c.address
	}
	return fmt.Sprintf("GPU-%016s", c.unique)
}

// cards lists the GPUs that amdgpu serves, in the order of the PCI bus. That no
// kernel shows one is no error, but that the list cannot be read is.
func (f files) cards(nodes []node) ([]card, error) {
	folder := f.path("sys", "class", "drm")
	entries, err := os.ReadDir(folder)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s is not there: load the kernel module amdgpu; a container needs the host's /sys, and the option root if it is mounted elsewhere", folder)
	case err != nil:
		return nil, advise(err)
	}
	var list []card
	for _, entry := range entries {
		if !cardPattern.MatchString(entry.Name()) {
			continue
		}
		device := filepath.Join(folder, entry.Name(), "device")
		facts, err := words(filepath.Join(device, "uevent"), "=")
		if errors.Is(err, fs.ErrNotExist) {
			continue // unplugged at this very moment, or a card without a device
		}
		if err != nil {
			return nil, advise(err)
		}
		address := strings.ToLower(facts["PCI_SLOT_NAME"])
		if facts["DRIVER"] != "amdgpu" || !addressPattern.MatchString(address) {
			continue
		}
		c := card{address: address, model: facts["PCI_ID"], device: device}
		if text, err := read(filepath.Join(device, "unique_id")); err == nil {
			c.unique = unique(text)
		}
		for _, n := range nodes {
			if c.unique == "" && n.address == address {
				c.unique = n.unique
			}
		}
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b card) int { return compareAddresses(a.address, b.address) })
	for i := range list {
		// A serial number that two of them have tells them not apart.
		if slices.ContainsFunc(list[:i], func(c card) bool { return c.uuid() == list[i].uuid() }) {
			list[i].unique = ""
		}
	}
	return list, nil
}

// unique is a serial number, or empty where zeros stand for none.
func unique(text string) string {
	text = strings.TrimPrefix(strings.ToLower(text), "0x")
	if !uniquePattern.MatchString(text) || strings.Trim(text, "0") == "" {
		return ""
	}
	return text
}

// compareAddresses orders by bus; the domain alone varies in length.
func compareAddresses(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}

// asleep reports whether the card is switched off for want of work. Most reads
// would wake it.
func (c card) asleep() bool {
	state, err := read(filepath.Join(c.device, "power", "runtime_status"))
	return err == nil && state == "suspended"
}

// offTheBus reports whether the card has stopped answering: then its first
// register, the vendor's number, reads as ones.
func (c card) offTheBus() bool {
	file, err := os.Open(filepath.Join(c.device, "config"))
	if err != nil {
		return false // hidden, as in some containers: that says nothing
	}
	defer func() { _ = file.Close() }()
	var vendor [2]byte
	_, err = io.ReadFull(file, vendor[:])
	return err == nil && vendor == [2]byte{0xff, 0xff}
}

// sensor is a file of the card's hardware monitor; its folder's number varies.
func (c card) sensor(name string) string {
	paths, _ := filepath.Glob(filepath.Join(c.device, "hwmon", "hwmon*", name)) // the pattern is sound
	if len(paths) == 0 {
		return filepath.Join(c.device, "hwmon", name) // is not there, and its error says so
	}
	return paths[0]
}

// name is for people: what the card tells, else what a list of AMD's models
// says, else its number.
func (f files) name(c card) string {
	if name, err := read(filepath.Join(c.device, "product_name")); err == nil && name != "" {
		return cut(name)
	}
	_, model, _ := strings.Cut(strings.ToUpper(c.model), ":")
	revision, err := read(filepath.Join(c.device, "revision"))
	if list, listErr := read(f.path("usr", "share", "libdrm", "amdgpu.ids")); err == nil && listErr == nil {
		revision = strings.ToUpper(strings.TrimPrefix(revision, "0x"))
		for line := range strings.Lines(list) {
			fields := strings.SplitN(line, ",", 3)
			if len(fields) == 3 && strings.TrimSpace(fields[0]) == model && strings.TrimSpace(fields[1]) == revision {
				return cut(strings.TrimSpace(fields[2]))
			}
		}
	}
	return "AMD GPU " + c.model
}
