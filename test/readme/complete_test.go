package readme

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/broker"
	gpucaddyfile "github.com/gpu-broker/caddy-gpu-broker/caddyfile"
	"github.com/gpu-broker/caddy-gpu-broker/config"
	"github.com/gpu-broker/caddy-gpu-broker/gpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/amdgpu"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/auto"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/simulated"
	"github.com/gpu-broker/caddy-gpu-broker/gpu/static"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/docker"
	httplife "github.com/gpu-broker/caddy-gpu-broker/lifecycle/http"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/presets"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/process"
	"github.com/gpu-broker/caddy-gpu-broker/lifecycle/systemd"
	"github.com/gpu-broker/caddy-gpu-broker/nvml"
	"github.com/gpu-broker/caddy-gpu-broker/scheduler"
)

// documented are the types whose JSON fields have a table, after a comment `<!-- fields: NAME -->`.
var documented = map[string]reflect.Type{
	"config.Broker":   reflect.TypeFor[config.Broker](),
	"config.Consumer": reflect.TypeFor[config.Consumer](),
	"config.Reserved": reflect.TypeFor[config.Reserved](),
	"config.Restore":  reflect.TypeFor[config.Restore](),
	"config.Model":    reflect.TypeFor[config.Model](),

	"config.UnloadRequest":    reflect.TypeFor[config.UnloadRequest](),
	"config.ModelFrom":        reflect.TypeFor[config.ModelFrom](),
	"caddyfile.Route":         reflect.TypeFor[gpucaddyfile.Route](),
	"caddyfile.PriorityRange": reflect.TypeFor[gpucaddyfile.PriorityRange](),

	"process.Lifecycle": reflect.TypeFor[process.Lifecycle](),
	"systemd.Lifecycle": reflect.TypeFor[systemd.Lifecycle](),
	"docker.Lifecycle":  reflect.TypeFor[docker.Lifecycle](),

	"httplife.Lifecycle":  reflect.TypeFor[httplife.Lifecycle](),
	"httplife.Route":      reflect.TypeFor[httplife.Route](),
	"httplife.ForEach":    reflect.TypeFor[httplife.ForEach](),
	"httplife.JobRoute":   reflect.TypeFor[httplife.JobRoute](),
	"auto.Auto":           reflect.TypeFor[auto.Auto](),
	"nvml.NVML":           reflect.TypeFor[nvml.NVML](),
	"nvml.NvidiaSMI":      reflect.TypeFor[nvml.NvidiaSMI](),
	"amdgpu.AMDGPU":       reflect.TypeFor[amdgpu.AMDGPU](),
	"static.Static":       reflect.TypeFor[static.Static](),
	"simulated.Simulated": reflect.TypeFor[simulated.Simulated](),
	"broker.Status":       reflect.TypeFor[broker.Status](),
	"broker.GPU":          reflect.TypeFor[broker.GPU](),
	"broker.Totals":       reflect.TypeFor[broker.Totals](),
	"broker.Waiter":       reflect.TypeFor[broker.Waiter](),
	"broker.Consumer":     reflect.TypeFor[broker.Consumer](),
	"broker.Client":       reflect.TypeFor[broker.Client](),
	"broker.Slot":         reflect.TypeFor[broker.Slot](),
	"lifecycle.State":     reflect.TypeFor[lifecycle.State](),
	"scheduler.Decision":  reflect.TypeFor[scheduler.Decision](),
}

func TestEveryJSONFieldIsDocumentedAndNoOther(t *testing.T) {
	tables := markedTables(t)
	for name, typ := range documented {
		table, ok := tables["fields: "+name]
		if !assert.True(t, ok, "no page has a table after <!-- fields: %s -->", name) {
			continue
		}
		var fields []string
		for field := range typ.Fields() {
			if tag, _, _ := strings.Cut(field.Tag.Get("json"), ","); tag != "" && tag != "-" {
				fields = append(fields, tag)
			}
		}
		assert.ElementsMatch(t, fields, table.names(), name)
	}
}

func TestEveryTypeOfAStatusAndOfTheConfigurationIsDocumented(t *testing.T) {
	var walk func(typ reflect.Type)
	walk = func(typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Slice, reflect.Map, reflect.Pointer:
			walk(typ.Elem())
		case reflect.Struct:
			if typ == reflect.TypeFor[time.Time]() {
				return
			}
			assert.Contains(t, documented, typ.String())
			for field := range typ.Fields() {
				if field.Tag.Get("json") != "" {
					walk(field.Type)
				}
			}
		}
	}
	walk(reflect.TypeFor[broker.Status]())
	walk(reflect.TypeFor[config.Broker]())
	walk(reflect.TypeFor[gpucaddyfile.Route]())
}

func TestDefaultsAreThoseThatAreDocumented(t *testing.T) {
	b := &config.Broker{Consumers: []*config.Consumer{{Name: "a", VRAM: gpu.GiB}}}
	require.NoError(t, config.Resolve(b, nil))
	cushion := b.CushionFor(false)
	b.Cushion = &cushion
	tables := markedTables(t)
	checked := 0
	for name, value := range map[string]reflect.Value{"config.Broker": reflect.ValueOf(*b), "config.Consumer": reflect.ValueOf(*b.Consumers[0])} {
		table := tables["fields: "+name]
		for i := range value.NumField() {
			field, _, _ := strings.Cut(value.Type().Field(i).Tag.Get("json"), ",")
			row := table.row(field)
			if field == "" || row == nil || len(row) < 2 {
				continue
			}
			checked += checkDefault(t, name+" "+field, value.Field(i), row[1])
		}
	}
	assert.Greater(t, checked, 30, "too few defaults were compared: are the tables read at all?")
}

// checkDefault compares a default with what a cell says; it gives 1 if there was something to compare.
func checkDefault(t *testing.T, what string, value reflect.Value, cell string) int {
	t.Helper()
	if value.Kind() == reflect.Pointer && !value.IsNil() {
		value = value.Elem()
	}
	code := strings.HasPrefix(cell, "`")
	text := strings.Trim(cell, "`")
	switch v := value.Interface().(type) {
	case caddy.Duration:
		if strings.HasSuffix(cell, "the broker's") {
			return 0
		}
		d, err := caddy.ParseDuration(text)
		if text == "0" {
			d, err = 0, nil
		}
		assert.NoError(t, err, what)
		assert.Equal(t, time.Duration(v), d, what)
	case gpu.Bytes:
		if cell == "required" {
			return 0
		}
		n, err := gpu.ParseBytes(text)
		assert.NoError(t, err, what)
		assert.Equal(t, v, n, what)
	case string, int, float64:
		if !code {
			return 0
		}
		assert.Equal(t, fmt.Sprint(v), text, what)
	case json.RawMessage:
		var guest struct{ Driver, Protocol string }
		require.NoError(t, json.Unmarshal(v, &guest), what)
		assert.Equal(t, guest.Driver+guest.Protocol, text, what)
	default:
		assert.True(t, value.IsZero() || value.Kind() == reflect.Slice, "%s has the default %v, of a type that this test does not know", what, v)
		return 0
	}
	return 1
}

func TestEveryMetricIsDocumentedWithItsLabels(t *testing.T) {
	wanted := map[string][]string{}
	inspect(t, root+"/metrics.go", func(n ast.Node) {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return
		}
		if fn, ok := call.Fun.(*ast.Ident); ok && slices.Contains([]string{"histogram", "counter", "desc"}, fn.Name) {
			if name := literal(call.Args[0]); name != "" {
				var labels []string
				for _, arg := range call.Args[2:] {
					labels = append(labels, literal(arg))
				}
				if fn.Name == "histogram" {
					labels = []string{"consumer"}
				}
				wanted["caddy_gpu_broker_"+name] = labels
			}
		}
	})
	require.Greater(t, len(wanted), 15, "metrics.go is not read as it should be")
	table := markedTables(t)["metrics"]
	var names []string
	for name, labels := range wanted {
		names = append(names, name)
		if row := table.row(name); row != nil {
			shown := strings.Join(labels, ", ")
			if shown == "" {
				shown = "–"
			}
			assert.Equal(t, shown, row[1], name)
		}
	}
	assert.ElementsMatch(t, names, table.names())
}

func TestEveryErrorCodeIsDocumentedWithItsStatus(t *testing.T) {
	// 503 unless the sources say otherwise
	statuses := map[string]string{"client_left": "499"}
	constants := map[string]string{} // by the name of the constant
	inspect(t, root+"/scheduler/types.go", func(n ast.Node) {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return
		}
		if typ, ok := spec.Type.(*ast.Ident); ok && typ.Name == "Code" {
			constants[spec.Names[0].Name] = literal(spec.Values[0])
			statuses[literal(spec.Values[0])] = "503"
		}
	})
	numbers := map[string]string{"StatusForbidden": "403", "StatusNotFound": "404", "StatusUnsupportedMediaType": "415", "StatusUnprocessableEntity": "422", "StatusGatewayTimeout": "504", "StatusBadRequest": "400",
		"StatusRequestEntityTooLarge": "413", "StatusServiceUnavailable": "503", "StatusBadGateway": "502", "StatusInternalServerError": "500",
		"StatusRequestTimeout": "408"}
	number := func(e ast.Expr) string {
		s, ok := e.(*ast.SelectorExpr)
		if !ok {
			return ""
		}
		require.Contains(t, numbers, s.Sel.Name)
		return numbers[s.Sel.Name]
	}
	for _, path := range sources(t, root) {
		inspect(t, path, func(n ast.Node) {
			lit, ok := n.(*ast.CompositeLit)
			if !ok {
				return
			}
			var code, status string
			for _, e := range lit.Elts {
				pair, ok := e.(*ast.KeyValueExpr)
				if !ok {
					continue
				}
				switch key := pair.Key.(type) {
				case *ast.Ident: // failure{status: …, code: …}
					if key.Name == "code" {
						code = literal(pair.Value)
					}
					if key.Name == "status" {
						status = number(pair.Value)
					}
				case *ast.SelectorExpr: // statuses[scheduler.NeverFits]
					if c := constants[key.Sel.Name]; c != "" {
						statuses[c] = number(pair.Value)
					}
				}
			}
			if code != "" {
				require.NotEmpty(t, status, "%s: the status of %s", path, code)
				statuses[code] = status
			}
		})
	}
	require.Greater(t, len(statuses), 12, "the sources are not read as they should be")
	table := markedTables(t)["codes"]
	var codes []string
	for code, status := range statuses {
		codes = append(codes, code)
		if row := table.row(code); row != nil {
			assert.Equal(t, status, row[1], code)
		}
	}
	assert.ElementsMatch(t, codes, table.names())
}

func TestEveryPlaceholderIsDocumented(t *testing.T) {
	found := map[string]bool{}
	for _, path := range sources(t, root) {
		inspect(t, path, func(n ast.Node) {
			if e, ok := n.(ast.Expr); ok && strings.HasPrefix(literal(e), "http.gpu_broker.") {
				found["{"+literal(e)+"}"] = true
			}
		})
	}
	assert.NotEmpty(t, found)
	assert.ElementsMatch(t, keys(found), markedTables(t)["placeholders"].names())
}

func TestEveryEventIsDocumented(t *testing.T) {
	found := map[string]bool{}
	inspect(t, root+"/metrics.go", func(n ast.Node) {
		switch n := n.(type) {
		case *ast.ValueSpec:
			if n.Names[0].Name != "eventNames" {
				return
			}
			for _, e := range n.Values[0].(*ast.CompositeLit).Elts {
				found[literal(e.(*ast.KeyValueExpr).Value)] = true
			}
		case *ast.AssignStmt: // name = "queue_full"
			if left, ok := n.Lhs[0].(*ast.Ident); ok && left.Name == "name" && n.Tok == token.ASSIGN {
				found[literal(n.Rhs[0])] = true
			}
		}
	})
	assert.Greater(t, len(found), 1)
	assert.ElementsMatch(t, keys(found), markedTables(t)["events"].names())
}

func TestEveryKindOfDecisionIsDocumented(t *testing.T) {
	found := map[string]bool{}
	for _, path := range append(sources(t, root+"/scheduler"), sources(t, root+"/broker")...) {
		inspect(t, path, func(n ast.Node) {
			var value ast.Expr
			switch n := n.(type) {
			case *ast.KeyValueExpr:
				if key, ok := n.Key.(*ast.Ident); ok && key.Name == "Kind" {
					value = n.Value
				}
			case *ast.AssignStmt:
				if left, ok := n.Lhs[0].(*ast.SelectorExpr); ok && left.Sel.Name == "Kind" {
					value = n.Rhs[0]
				}
			}
			switch v := value.(type) {
			case *ast.BasicLit:
				found[literal(v)] = true
			case *ast.BinaryExpr: // "gpu_" + one of two
				for _, e := range v.Y.(*ast.IndexExpr).X.(*ast.CompositeLit).Elts {
					found[literal(v.X)+literal(e.(*ast.KeyValueExpr).Value)] = true
				}
			}
		})
	}
	assert.Greater(t, len(found), 10)
	assert.ElementsMatch(t, keys(found), markedTables(t)["kinds"].names())
}

func TestEveryPresetAndModuleIsDocumented(t *testing.T) {
	all := pages(t)
	for _, name := range presets.Names() {
		assert.True(t, strings.Contains(all["docs/servers.md"], "\n### "+name+"\n"), "docs/servers.md has no section on %s", name)
	}
	for _, name := range config.GuestNames(config.SamplerNamespace) {
		assert.Contains(t, all["docs/gpus.md"], "| `"+name+"` |")
		assert.Regexp(t, `gpu_broker\.samplers.*\.`+name+"`", all["docs/configuration.md"])
	}
	for _, m := range caddy.Modules() {
		if strings.Contains(m, "gpu_broker") && !strings.HasPrefix(m, config.SamplerNamespace) {
			assert.Contains(t, all["docs/configuration.md"], "`"+m+"`")
		}
	}
}

// table is a table of Markdown: its cells, the head left out.
type table [][]string

var inCode = regexp.MustCompile("`([^`]+)`")

// names are what stands in code in the first cells.
func (t table) names() (names []string) {
	for _, row := range t {
		for _, m := range inCode.FindAllStringSubmatch(row[0], -1) {
			names = append(names, m[1])
		}
	}
	return names
}

// row is the row with that name in its first cell.
func (t table) row(name string) []string {
	for _, row := range t {
		if strings.Contains(row[0], "`"+name+"`") {
			return row
		}
	}
	return nil
}

var marked = regexp.MustCompile(`(?m)^<!-- (.+) -->\n\n((?:\|.*\n)+)`)

// markedTables are the tables that follow a comment, by what the comment says.
func markedTables(t *testing.T) map[string]table {
	t.Helper()
	out := map[string]table{}
	for page, text := range pages(t) {
		for _, m := range marked.FindAllStringSubmatch(text, -1) {
			require.NotContains(t, out, m[1], "%s: a second table of this kind", page)
			var rows table
			for line := range strings.Lines(m[2]) {
				var cells []string
				for cell := range strings.SplitSeq(strings.Trim(strings.TrimSpace(line), "|"), " | ") {
					cells = append(cells, strings.TrimSpace(cell))
				}
				rows = append(rows, cells)
			}
			require.Greater(t, len(rows), 2, "%s: the table %s is empty", page, m[1])
			out[m[1]] = rows[2:]
		}
	}
	return out
}

// sources are the Go files of a folder, tests left out.
func sources(t *testing.T, folder string) []string {
	t.Helper()
	paths, err := filepath.Glob(folder + "/*.go")
	require.NoError(t, err)
	paths = slices.DeleteFunc(paths, func(path string) bool { return strings.HasSuffix(path, "_test.go") })
	require.NotEmpty(t, paths)
	return paths
}

// inspect looks at every node of a Go file.
func inspect(t *testing.T, path string, look func(ast.Node)) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	require.NoError(t, err)
	ast.Inspect(file, func(n ast.Node) bool {
		if n != nil {
			look(n)
		}
		return true
	})
}

// literal is the value of a string that is written out, or "".
func literal(e ast.Expr) string {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return ""
	}
	value, err := strconv.Unquote(lit.Value)
	if err != nil {
		return ""
	}
	return value
}

// taggedFields are the JSON names of a struct that is declared in a file.
func taggedFields(t *testing.T, path, name string) (fields []string) {
	t.Helper()
	inspect(t, path, func(n ast.Node) {
		spec, ok := n.(*ast.TypeSpec)
		if !ok || spec.Name.Name != name {
			return
		}
		for _, field := range spec.Type.(*ast.StructType).Fields.List {
			require.NotNil(t, field.Tag, "%s of %s has no tag", field.Names, name)
			tag, _, _ := strings.Cut(reflect.StructTag(literal(field.Tag)).Get("json"), ",")
			fields = append(fields, tag)
		}
	})
	require.NotEmpty(t, fields, "%s has no struct %s", path, name)
	return fields
}

func keys(set map[string]bool) (out []string) {
	for key := range set {
		out = append(out, key)
	}
	return out
}
