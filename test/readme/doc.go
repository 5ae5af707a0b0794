// Package readme checks the README and docs/: that each configuration in them
// adapts and validates, and that nothing that a user can write or read is missing.
package readme
