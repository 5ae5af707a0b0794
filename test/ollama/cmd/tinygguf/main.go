// Command tinygguf writes a very small language model with random weights, for trying things by
// hand with ollama or llama.cpp:
//
//	go run ./test/ollama/cmd/tinygguf -size slow -seed 7 -o slow.gguf
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"

	"github.com/gpu-broker/caddy-gpu-broker/internal/tinygguf"
)

func main() {
	path := flag.String("o", "tiny.gguf", "file to write")
	size := flag.String("size", "tiny", "tiny, or slow for answers that take seconds")
	seed := flag.Uint64("seed", 1, "what the weights are drawn from")
	flag.Parse()
	if err := write(*path, *size, *seed); err != nil {
		fmt.Fprintln(os.Stderr, "tinygguf:", err)
		os.Exit(1)
	}
}

func write(path, name string, seed uint64) error {
	sizes := map[string]tinygguf.Size{"tiny": tinygguf.Tiny(), "slow": tinygguf.Slow()}
	size, known := sizes[name]
	if !known {
		return fmt.Errorf("size: want tiny or slow, found %q", name)
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(tinygguf.Write(file, size, seed), file.Close())
}
