package config

import (
	"fmt"
	"net/url"
)

// CheckOrigin says what is wrong with an origin of cors_origins.
func CheckOrigin(origin string) error {
	if origin == "*" {
		return nil
	}
	u, err := url.Parse(origin)
	if err != nil || u.Scheme == "" || u.Host == "" || u.Path != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return fmt.Errorf("%q is no origin: write it as a browser sends it, as in https://app.example or http://localhost:3000, or * for all", origin)
	}
	return nil
}
