package httplife

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"

	"github.com/PaesslerAG/gval"
	"github.com/PaesslerAG/jsonpath"

	"github.com/gpu-broker/caddy-gpu-broker/gpu"
)

// language is JSONPath with operators, so that `!$.is_sleeping` can be said.
var language = gval.Full(jsonpath.Language())

// query is a JSONPath expression that a server's answer is asked.
type query struct {
	expression string
	evaluate   gval.Evaluable
	root       gval.Evaluable // of the list that a path with brackets goes through; nil: there is none
}

func newQuery(expression string) (*query, error) {
	if !strings.Contains(expression, "$") {
		return nil, errors.New("it has no $, which stands for the whole answer")
	}
	evaluate, err := language.NewEvaluable(expression)
	if err != nil {
		return nil, err
	}
	q := &query{expression: expression, evaluate: evaluate}
	if root, _, in := strings.Cut(expression, "["); in && rootPath.MatchString(root) {
		q.root, err = language.NewEvaluable(root)
	}
	return q, err
}

// rootPath is a path to a value, without anything to be worked out.
var rootPath = regexp.MustCompile(`^\$(\.\w+)+$`)

// findList is find for a list: one that is missing is an error, where find would take a path with a wildcard for one that is empty.
func (q *query) findList(ctx context.Context, answer any) (any, error) {
	if q.root != nil {
		root, err := q.root(ctx, answer)
		if err != nil {
			return nil, fmt.Errorf("the answer has no %s", q.expression)
		}
		switch root.(type) {
		case nil, []any, map[string]any:
		default: // a wildcard makes an empty list of it
			return nil, fmt.Errorf("the answer has no list at %s", q.expression)
		}
	}
	return q.find(ctx, answer)
}

// find yields what the answer holds for the query. An error means that the
// answer does not say. It shows the query, not the answer.
func (q *query) find(ctx context.Context, answer any) (any, error) {
	value, err := q.evaluate(ctx, answer)
	if err != nil {
		return nil, fmt.Errorf("the answer has no %s", q.expression)
	}
	return value, nil
}

// beside yields the list of n values that stand beside others. One of another length, or none, says nothing.
func (q *query) beside(ctx context.Context, answer any, n int) []any {
	if q == nil {
		return nil
	}
	value, _ := q.find(ctx, answer)
	if values, is := value.([]any); is && len(values) == n {
		return values
	}
	return nil
}

func parseAnswer(body []byte) (any, error) {
	var answer any
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, errors.New("the answer is not JSON")
	}
	return answer, nil
}

// truth is how a value of JSON is understood as yes or no.
func truth(value any) bool {
	switch v := value.(type) {
	case bool:
		return v
	case float64:
		return v > 0
	case string:
		switch strings.ToLower(strings.TrimSpace(v)) {
		case "", "none", "null", "unloaded", "false":
			return false
		}
		return true
	case []any:
		return len(v) > 0
	case map[string]any:
		return len(v) > 0
	default:
		return false
	}
}

// amount sums the numbers in value, in the given unit; -1 if it is not made of
// numbers, or they make no sense.
func amount(value any, unit gpu.Bytes) gpu.Bytes {
	total, ok := sum(value)
	total *= float64(unit)
	if !ok || total >= math.MaxInt64 {
		return -1
	}
	return gpu.Bytes(total)
}

func sum(value any) (total float64, ok bool) {
	switch v := value.(type) {
	case float64:
		return v, v >= 0
	case []any:
		for _, e := range v {
			part, ok := sum(e)
			if !ok {
				return 0, false
			}
			total += part
		}
		return total, true
	default:
		return 0, false
	}
}

// list yields the texts, numbers and booleans of value, each once.
func list(value any) ([]any, error) {
	elements, ok := value.([]any)
	if !ok {
		elements = []any{value}
	}
	var out []any
	seen := map[any]bool{}
	for _, e := range elements {
		switch e.(type) {
		case nil:
			continue
		case string, float64, bool:
		default:
			return nil, errors.New("it holds arrays or objects where texts or numbers are wanted")
		}
		if !seen[e] {
			seen[e] = true
			out = append(out, e)
		}
	}
	return out, nil
}
