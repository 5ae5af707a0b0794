package routing

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestN3_AServersListIsAmendedToWhatItsRouteServes(t *testing.T) {
	shown := func(name string) bool { return name != "hidden" }
	aliases := func(name string) []string {
		if name == "qwen" {
			return []string{"gpt-4o", "own"}
		}
		return nil
	}
	for body, want := range map[string]string{
		`{"object":"list","data":[{"id":"qwen","created" : 1.0},{"id":"hidden"},{"id":"own"}]}`: `{"data":[{"id":"qwen","created":1.0},{"created":1.0,"id":"gpt-4o"},{"id":"own"}],"object":"list"}`,
		`{"models":[{"name":"qwen","model":"qwen","size":9007199254740993}]}`: `{"models":[{"name":"qwen","model":"qwen","size":9007199254740993},` +
			`{"model":"gpt-4o","name":"gpt-4o","size":9007199254740993},{"model":"own","name":"own","size":9007199254740993}]}`,
		`{"models":[{"name":"other name","model":"qwen"}]}`:        `{"models":[{"name":"other name","model":"qwen"}]}`, // it goes by its first name
		`{"data":[{"id":"hidden"}],"models":[{"model":"hidden"}]}`: `{"data":[],"models":[]}`,
		`{"data":[ {"id":"x"} ] }`:                                 `{"data":[ {"id":"x"} ] }`,
		`{"data":{"id":"hidden"}}`:                                 `{"data":{"id":"hidden"}}`,
		`{"data":[null,7,{"id":7},{}]}`:                            `{"data":[null,7,{"id":7},{}]}`,
		`{"data":null}`:                                            `{"data":null}`,
		`[{"id":"hidden"}]`:                                        `[{"id":"hidden"}]`,
		`{"data":[{"id":"hid`:                                      `{"data":[{"id":"hid`,
		``:                                                         ``,
	} {
		require.Equal(t, want, string(AmendList([]byte(body), shown, aliases)), body)
	}
}

func FuzzAListThatIsAmendedStaysAList(f *testing.F) {
	f.Add([]byte(`{"data":[{"id":"a"},{"id":"hidden"}],"models":null}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		out := AmendList(body, func(name string) bool { return name != "hidden" }, func(string) []string { return []string{"alias"} })
		again := AmendList(out, func(name string) bool { return name != "hidden" }, func(string) []string { return []string{"alias"} })
		require.Equal(t, string(out), string(again))
	})
}
