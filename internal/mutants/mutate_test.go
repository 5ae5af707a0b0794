package main

import (
	"go/build"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const sample = `package p

func f(a, b int) bool {
	if a < 3 && b == 0 {
		a++
		return true
	}
	g(min(a, b))
	return a > b || b > 7
}

func g(int) {
	log.Info("x")
}

func h() (bool, error) {
	if g(nil) != -1 {
		return false, nil
	}
	return index != -1, fmt.Errorf("%d", 5)
}

func i() (int, bool) {
	if h() {
		return 70, false
	}
	return 80, true
}

func j(in []int) {
	in = append(make([]int, 50, 60), in...)
	k(make(map[int]int, 90), bufio.NewReaderSize(nil, 100))
}
`

func TestChangesAreSmallFaultsInCodeThatStillParses(t *testing.T) {
	all, err := changes("p.go", []byte(sample))
	require.NoError(t, err)
	var news []string
	for _, c := range all {
		_, err := parser.ParseFile(token.NewFileSet(), "p.go", c.apply([]byte(sample)), 0)
		require.NoError(t, err, c.id())
		news = append(news, c.new)
	}
	for _, want := range []string{
		"if a <= 3 && b == 0 {", "if a >= 3 && b == 0 {", "if a < 3 || b == 0 {", "if a < 3 && b != 0 {", "if !(a < 3 && b == 0) {", "if a < 4 && b == 0 {",
		"{}", "return false", "g(max(a, b))", "return a > b && b > 7", "return !(a > b || b > 7)", `return; log.Info("x")`,
	} {
		require.Contains(t, news, want)
	}
	require.Contains(t, news, "return true, nil")
	require.Contains(t, news, `return index != -1, fmt.Errorf("%d", 6)`)
	require.NotContains(t, news, `return index == -1, fmt.Errorf("%d", 5)`, "what is beside an error says nothing")
	require.NotContains(t, news, "if g(nil) != -2 {")
	require.NotContains(t, news, "return 71, false", "who has found nothing says nothing more")
	require.Contains(t, news, "return 70, true")
	require.Contains(t, news, "return 81, true")
	require.Contains(t, news, "in = append(make([]int, 51, 60), in...)")
	for _, speed := range []string{"make([]int, 50, 61)", "make(map[int]int, 91)", "(nil, 101)"} {
		require.NotContains(t, strings.Join(news, "\n"), speed, "how much room is made at once changes nothing")
	}
	require.Equal(t, 4, countOf(news, "{}"), "a++, g(…), in = … and k(…) can be dropped, and a log line is not worth it")
	none, err := changes("p.go", []byte("package p\n\nvar a = 0.0\n"))
	require.NoError(t, err)
	require.Empty(t, none, "twice nothing is nothing")
	again, err := changes("p.go", []byte("package p\n\n// more lines\n\n"+sample[len("package p\n"):]))
	require.NoError(t, err)
	require.Len(t, again, len(all))
	for i := range all {
		require.Equal(t, all[i].id(), again[i].id(), "it is known by its text, not by its line")
	}
}

func countOf(all []string, one string) (n int) {
	for _, s := range all {
		if s == one {
			n++
		}
	}
	return n
}

func TestEveryRoomHasFaultsToTryAndTheSeedOrdersThem(t *testing.T) {
	root, err := moduleRoot()
	require.NoError(t, err)
	for _, r := range rooms {
		one, err := candidates(root, r, 1)
		require.NoError(t, err, r.name)
		require.Greater(t, len(one), 100, r.name)
		same, err := candidates(root, r, 1)
		require.NoError(t, err)
		require.Equal(t, one, same, r.name)
		other, err := candidates(root, r, 2)
		require.NoError(t, err)
		require.False(t, slices.Equal(ids(one), ids(other)), r.name)
	}
}

func ids(all []tried) (out []string) {
	for _, t := range all {
		out = append(out, t.change.id())
	}
	return out
}

func TestEveryPlantedFaultHasItsPlace(t *testing.T) {
	for _, m := range mutants {
		_, err := plant(filepath.Join("..", ".."), t.TempDir(), m)
		require.NoError(t, err, m.name)
	}
}

func TestWhatIsLeftOutIsThere(t *testing.T) {
	there := map[string]bool{}
	for _, r := range rooms {
		pkg, err := build.ImportDir(filepath.Join("../..", r.dir), 0)
		require.NoError(t, err)
		for _, file := range slices.Concat(pkg.GoFiles, pkg.CgoFiles) {
			source, err := os.ReadFile(filepath.Join("../..", r.dir, file))
			require.NoError(t, err)
			all, err := changes(file, source)
			require.NoError(t, err)
			for _, c := range all {
				there[r.name+"/"+c.id()] = true
			}
		}
	}
	var gone []string
	for id := range equivalent {
		if !there[id] {
			gone = append(gone, id)
		}
	}
	require.Empty(t, gone)
}
