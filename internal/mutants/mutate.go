package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// change is one small fault in one file: the bytes from start to end are replaced.
type change struct {
	file       string // in its package
	kind       string // what was done, in a few words
	function   string // that it is in; empty: none
	line       int
	start, end int
	with       string

	// The whole lines that it touches, trimmed: they name it even where line numbers have moved.
	old, new string
}

// id names a change by its text, so that a sample and a review outlive edits elsewhere in the file.
func (c change) id() string { return c.file + ": " + c.function + ": " + c.old + " => " + c.new }

// apply is the file with the fault.
func (c change) apply(source []byte) []byte {
	return slices.Concat(source[:c.start], []byte(c.with), source[c.end:])
}

// flips are the operators that take each other's place.
var flips = map[token.Token][]token.Token{
	token.EQL: {token.NEQ}, token.NEQ: {token.EQL},
	token.LSS: {token.LEQ, token.GEQ}, token.LEQ: {token.LSS, token.GTR},
	token.GTR: {token.GEQ, token.LEQ}, token.GEQ: {token.GTR, token.LSS},
	token.LAND: {token.LOR}, token.LOR: {token.LAND},
	token.ADD: {token.SUB}, token.SUB: {token.ADD}, token.MUL: {token.QUO}, token.QUO: {token.MUL},
}

// spared are calls whose loss no test of behaviour can see, or that would only stop everything.
var spared = regexp.MustCompile(`\b([Ll]og(ger)?(\(\))?\.|zap\.|Debug\(|Info\(|Warn\(|panic\(|(R?Lock|R?Unlock|Stop|Close|cancel|stop)\()`)

// failure is an error that is made where it is returned: what is returned beside it says nothing.
var failure = regexp.MustCompile(`^(fmt\.Errorf|errors\.New|bad|\w+\.wrap|codingError|unreadable)\(`)

// changes are all that may be done to a file, in the order of its text. It fails if the source is not Go.
func changes(file string, source []byte) ([]change, error) {
	set := token.NewFileSet()
	tree, err := parser.ParseFile(set, file, source, 0)
	if err != nil {
		return nil, err
	}
	g := &generator{set: set, file: file, source: source}
	for _, decl := range tree.Decls {
		g.function = ""
		if f, ok := decl.(*ast.FuncDecl); ok {
			if f.Body == nil || f.Name.Name == "init" || f.Name.Name == "CaddyModule" {
				continue
			}
			g.function = f.Name.Name
			if f.Type.Results == nil && len(f.Body.List) > 0 {
				g.insert("returns at once", f.Body.List[0].Pos(), "return; ")
			}
		}
		ast.Inspect(decl, g.visit)
	}
	slices.SortStableFunc(g.out, func(a, b change) int { return a.start - b.start })
	return g.out, nil
}

// isNothing reports whether results are those of a function that has found nothing: false, and literals beside it that nobody reads.
func (g *generator) isNothing(results []ast.Expr) bool {
	last := len(results) - 1
	return g.text(results[last]) == "false" && !slices.ContainsFunc(results[:last], func(e ast.Expr) bool {
		_, literal := e.(*ast.BasicLit)
		return !literal
	})
}

// onlySpeed returns the argument of a call that says how much room is made at once; nil: it has none.
func onlySpeed(n *ast.CallExpr) ast.Expr {
	switch f := n.Fun.(type) {
	case *ast.Ident:
		if f.Name != "make" || len(n.Args) < 2 {
			return nil
		}
		if _, isMap := n.Args[0].(*ast.MapType); isMap {
			return n.Args[1]
		}
		if len(n.Args) == 3 {
			return n.Args[2]
		}
	case *ast.SelectorExpr:
		if len(n.Args) == 2 && (f.Sel.Name == "NewReaderSize" || f.Sel.Name == "NewWriterSize") {
			return n.Args[1]
		}
	}
	return nil
}

type generator struct {
	set      *token.FileSet
	file     string
	source   []byte
	function string
	out      []change
}

func (g *generator) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.ImportSpec, *ast.Field:
		return false
	case *ast.BinaryExpr:
		for _, to := range flips[n.Op] {
			g.add(fmt.Sprintf("%s for %s", to, n.Op), n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), to.String())
		}
	case *ast.IfStmt:
		g.replace("a condition is negated", n.Cond, "!("+g.text(n.Cond)+")")
		if _, block := n.Else.(*ast.BlockStmt); n.Else != nil && block {
			g.replace("an else is dropped", n.Else, "{}")
		}
	case *ast.CaseClause:
		if len(n.List) > 1 {
			g.add("a case is dropped", n.List[0].Pos(), n.List[1].Pos(), "")
		}
	case *ast.BlockStmt:
		g.drops(n.List)
	case *ast.ReturnStmt:
		g.returned(n)
		if last := len(n.Results) - 1; last > 0 && (failure.MatchString(g.text(n.Results[last])) || g.isNothing(n.Results)) {
			ast.Inspect(n.Results[last], g.visit)
			return false
		}
	case *ast.BranchStmt:
		if n.Label == nil && n.Tok == token.CONTINUE {
			g.replace("break for continue", n, "break")
		}
	case *ast.UnaryExpr:
		return n.Op != token.SUB // a negative number stands for none, and any other would
	case *ast.BasicLit:
		g.literal(n)
	case *ast.Ident:
		switch n.Name {
		case "true":
			g.replace("false for true", n, "false")
		case "false":
			g.replace("true for false", n, "true")
		}
	case *ast.CallExpr:
		if room := onlySpeed(n); room != nil {
			for _, arg := range n.Args {
				if arg != room {
					ast.Inspect(arg, g.visit)
				}
			}
			return false
		}
		if f, ok := n.Fun.(*ast.Ident); ok && len(n.Args) > 1 {
			switch f.Name {
			case "min":
				g.replace("max for min", f, "max")
			case "max":
				g.replace("min for max", f, "min")
			}
		}
	}
	if s, ok := n.(*ast.CaseClause); ok {
		g.drops(s.Body)
	}
	return true
}

// drops leaves out statements whose loss the compiler may not mind.
func (g *generator) drops(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt, *ast.IncDecStmt, *ast.GoStmt:
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
		default:
			continue
		}
		if spared.MatchString(g.text(s)) || strings.HasPrefix(g.text(s), "_ =") {
			continue
		}
		g.replace("a statement is dropped", s, "{}")
	}
}

func (g *generator) returned(s *ast.ReturnStmt) {
	for _, value := range s.Results {
		switch text := g.text(value); text {
		case "err":
			g.replace("nil for an error", value, "nil")
		case "nil", "true", "false": // the others change these
		default:
			if b, ok := value.(*ast.BinaryExpr); ok && (b.Op == token.LAND || b.Op == token.LOR) {
				g.replace("the opposite is returned", value, "!("+text+")")
			}
		}
	}
}

func (g *generator) literal(n *ast.BasicLit) {
	switch n.Kind {
	case token.INT:
		if v, err := strconv.ParseInt(n.Value, 0, 64); err == nil {
			g.replace("one more", n, strconv.FormatInt(v+1, 10))
			if v > 1 {
				g.replace("half as much", n, strconv.FormatInt(v/2, 10))
			}
		}
	case token.FLOAT:
		if v, err := strconv.ParseFloat(n.Value, 64); err == nil && v != 0 {
			g.replace("twice as much", n, "2*"+n.Value)
		}
	}
}

func (g *generator) text(n ast.Node) string {
	return string(g.source[g.offset(n.Pos()):g.offset(n.End())])
}

func (g *generator) offset(p token.Pos) int { return g.set.Position(p).Offset }

func (g *generator) replace(kind string, n ast.Node, with string) {
	g.add(kind, n.Pos(), n.End(), with)
}

func (g *generator) insert(kind string, at token.Pos, text string) { g.add(kind, at, at, text) }

func (g *generator) add(kind string, from, to token.Pos, with string) {
	c := change{file: g.file, kind: kind, function: g.function, line: g.set.Position(from).Line, start: g.offset(from), end: g.offset(to), with: with}
	first := bytes.LastIndexByte(g.source[:c.start], '\n') + 1
	last := len(g.source)
	if i := bytes.IndexByte(g.source[c.end:], '\n'); i >= 0 {
		last = c.end + i
	}
	c.old = strings.TrimSpace(string(g.source[first:last]))
	c.new = strings.TrimSpace(string(g.source[first:c.start]) + with + string(g.source[c.end:last]))
	g.out = append(g.out, c)
}
