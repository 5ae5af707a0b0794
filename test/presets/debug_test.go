package presets_test
import ("testing";"fmt")
func TestDebug(t *testing.T) {
	k := preset(t, "vllm")
	s := start(t, k.layout(false))
	k.circle(t, s)
	a := s.to(s.url, ask{method: "GET", path: "/gpu/decisions"})
	fmt.Println(string(a.body))
	for _, e := range s.server.Events() { if e.URI != "/is_sleeping" && e.URI!="/health" && e.URI!="/metrics" { fmt.Println(e.At.Format("05.000"), e.Kind, e.URI, e.Held, e.Detail) } }
	for _, e := range s.rival.Events() { if e.URI!="/health" { fmt.Println("R", e.At.Format("05.000"), e.Kind, e.URI, e.Held, e.Detail) } }
}
