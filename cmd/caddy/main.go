// Command caddy is a ready-made Caddy with the gpu_broker module.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/gpu-broker/caddy-gpu-broker"
)

func main() { caddycmd.Main() }
