// Command modelserver pretends to be one or several model servers with memory
// on simulated GPUs; see internal/modelserver.
package main

import (
	"os"

	"github.com/gpu-broker/caddy-gpu-broker/internal/modelserver"
)

func main() { os.Exit(modelserver.RunFromArgs(os.Args[1:])) }
