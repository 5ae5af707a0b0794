//go:build linux

package real

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
)

// archiveModel packs a GGUF file the way Docker packs a model (an image whose one layer is the file)
// and gives the archive and the image's name.
func archiveModel(path string) (io.Reader, string, error) {
	model, err := os.ReadFile(path)
	if err != nil {
		return nil, "", err
	}
	config, err := json.Marshal(map[string]any{
		"config":     map[string]any{"format": "gguf", "architecture": "llama"},
		"descriptor": map[string]any{"created": "2026-01-01T00:00:00Z"},
		"rootfs":     map[string]any{"type": "rootfs", "diff_ids": []string{digest(model)}},
	})
	if err != nil {
		return nil, "", err
	}
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     "application/vnd.oci.image.manifest.v1+json",
		"config":        descriptor("application/vnd.docker.ai.model.config.v0.1+json", config),
		"layers":        []any{descriptor("application/vnd.docker.ai.gguf.v3", model)},
	})
	if err != nil {
		return nil, "", err
	}
	var packed bytes.Buffer
	archive := tar.NewWriter(&packed)
	for _, file := range []struct {
		name    string
		content []byte
	}{{blob(model), model}, {blob(config), config}, {"manifest.json", manifest}} {
		if err := archive.WriteHeader(&tar.Header{Name: file.name, Mode: 0o644, Size: int64(len(file.content))}); err != nil {
			return nil, "", err
		}
		if _, err := archive.Write(file.content); err != nil {
			return nil, "", err
		}
	}
	return &packed, digest(manifest), archive.Close()
}

func descriptor(mediaType string, content []byte) map[string]any {
	return map[string]any{"mediaType": mediaType, "size": len(content), "digest": digest(content)}
}

func digest(content []byte) string { return "sha256:" + sum(content) }
func blob(content []byte) string   { return "blobs/sha256/" + sum(content) }

func sum(content []byte) string {
	hash := sha256.Sum256(content)
	return hex.EncodeToString(hash[:])
}
