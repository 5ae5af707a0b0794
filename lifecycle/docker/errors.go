package docker

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"

	"github.com/gpu-broker/caddy-gpu-broker/internal/supervised"
)

// explained says what an error of the client means, and what to do. doing is such as "starting".
func (s *settings) explained(err error, doing string) error {
	what := fmt.Sprintf("%s container %s", doing, s.container)
	said := supervised.Line(err.Error())
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return fmt.Errorf("%s: Docker at %s did not answer in time (%w)", what, s.host, err)
	case errdefs.IsNotFound(err):
		return fmt.Errorf("%s: Docker at %s knows no such container: make it with `docker create --name %s …` or `docker compose create` (%s)", what, s.host, s.container, said)
	case errdefs.IsPermissionDenied(err):
		return fmt.Errorf("%s: the socket proxy at %s does not allow it: let it pass GET /_ping, GET /containers/%s/json, GET /events, "+
			"and POST /containers/%s/start and /stop (%s)", what, s.host, s.container, s.container, said)
	case client.IsErrConnectionFailed(err) && strings.Contains(said, "permission denied"):
		return fmt.Errorf("%s: %s may not speak to Docker at %s: put that user into the group that owns the socket (`usermod -aG docker USER`, "+
			"which is as good as root), or set `host` to a socket proxy that allows only start and stop (%s)", what, supervised.WhoAmI(), s.host, said)
	case client.IsErrConnectionFailed(err):
		return fmt.Errorf("%s: no Docker at %s: is it running, and is `host` right? (%s)", what, s.host, said)
	}
	return fmt.Errorf("%s: Docker says: %s", what, said)
}

// paused is what is said of a container that somebody has paused.
func (s *settings) paused() error {
	return fmt.Errorf("container %s is paused, not by the broker: it can't answer, and keeps its GPU memory: `docker unpause %s`, or `docker stop %s`", s.container, s.container, s.container)
}
