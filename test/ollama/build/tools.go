//go:build tools

package build

import _ "github.com/gen2brain/malgo"
