package readme

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/internal/bounds"
)

// noLimits are numbers that bound nothing: versions, statuses, marks, defaults that other pages tell.
var noLimits = map[string]bool{
	"broker.flagsVersion": true, "broker.learntVersion": true, "broker.APIVersion": true, "broker.DefaultPriority": true,
	"gpubroker.statusClientLeft": true,
	"routing.asJSON":             true, "routing.isField": true, "routing.own": true, "routing.takeOut": true, "routing.marked": true, "routing.markShift": true,
	"scheduler.unseen": true, "scheduler.anyPriority": true,
}

func TestEveryFixedLimitIsOnThePage(t *testing.T) {
	rows := bounds.Rows(t)
	seen := 0
	for pkg, dir := range map[string]string{
		"gpubroker": ".", "broker": "broker", "lifecycle/http": "lifecycle/http", "lifecycle/process": "lifecycle/process", "routing": "routing", "scheduler": "scheduler",
	} {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		require.NoError(t, err)
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			tree, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			require.NoError(t, err)
			for _, name := range numericConstants(tree) {
				full := pkg + "." + name
				_, told := rows[full]
				require.True(t, told != noLimits[full], "%s in %s: docs/limits.md tells of it, or noLimits has it", full, path)
				seen++
			}
		}
	}
	require.Equal(t, len(rows)+len(noLimits), seen, "what the page tells and noLimits excuses exists")
}

// numericConstants are the constants of a file whose value holds a number.
func numericConstants(tree *ast.File) (names []string) {
	for _, decl := range tree.Decls {
		group, ok := decl.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			spec := spec.(*ast.ValueSpec)
			for i, value := range spec.Values {
				numeric := false
				ast.Inspect(value, func(n ast.Node) bool {
					lit, ok := n.(*ast.BasicLit)
					numeric = numeric || ok && (lit.Kind == token.INT || lit.Kind == token.FLOAT)
					return true
				})
				if numeric {
					names = append(names, spec.Names[i].Name)
				}
			}
		}
	}
	return names
}
