package routing

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpu-broker/caddy-gpu-broker/config"
)

// A server may read a name in a second place, and load that model.
func TestAnotherNameInASecondPlaceIsFound(t *testing.T) {
	all := func(sources ...string) (list []config.ModelFrom) {
		for _, source := range sources {
			kind, name, _ := strings.Cut(source, " ")
			list = append(list, config.ModelFrom{Source: kind, Name: name})
		}
		return list
	}
	for name, c := range map[string]struct {
		from   []config.ModelFrom
		uri    string
		body   []string // names by field; nil: it was not read
		found  string
		want   string
		faulty bool
	}{
		"one place":                               {from: all("body model"), body: []string{"b"}, found: "a"},
		"the same name":                           {from: all("body model", "query model"), uri: "/?model=a", body: []string{"a"}, found: "a"},
		"another in the query":                    {from: all("body model", "query model"), uri: "/?model=b", body: []string{"a"}, found: "a", want: "b"},
		"none in the query":                       {from: all("body model", "query model"), uri: "/?x=b", body: []string{"a"}, found: "a"},
		"another in the body":                     {from: all("query model", "body model"), uri: "/?model=a", body: []string{"b"}, found: "a", want: "b"},
		"a body that was not read":                {from: all("query model", "body model"), uri: "/?model=a", found: "a"},
		"another in the second field":             {from: all("body model", "body engine"), uri: "/", body: []string{"a", "b"}, found: "a", want: "b"},
		"the path counts alone":                   {from: all("path /m/*/do", "body model"), uri: "/m/a/do", body: []string{"b"}, found: "a"},
		"of two paths, the second":                {from: all("path /m/*/do", "path /n/*/do", "body model"), uri: "/n/a/do", body: []string{"b"}, found: "a"},
		"a path beside a header":                  {from: all("header X-Model", "path /m/*/do", "path /m/*"), uri: "/m/b/do", found: "in the header", want: "b"},
		"the same name in a path beside a header": {from: all("header X-Model", "path /m/*/do", "path /m/*"), uri: "/m/a/do", found: "a"},
		"another behind one of the same model":    {from: all("query model", "body model", "body engine"), uri: "/?model=a", body: []string{"alias of a", "b"}, found: "a", want: "b"},
		"two of the same model":                   {from: all("query model", "body model", "body engine"), uri: "/?model=a", body: []string{"alias of a", "a"}, found: "a"},
		"another path, which names nothing":       {from: all("path /m/*/do", "body model", "query model"), uri: "/x?model=b", body: []string{"a"}, found: "a", want: "b"},
		"a header, which servers don't look at":   {from: all("header X-Model", "body model"), uri: "/", body: []string{"a"}, found: "a"},
		"two in the query":                        {from: all("body model", "query model"), uri: "/?model=a&model=b", body: []string{"a"}, found: "a", faulty: true},
	} {
		s, err := NewSources(c.from)
		require.NoError(t, err, name)
		r := httptest.NewRequest(http.MethodPost, "http://localhost/", nil)
		if c.uri != "" {
			r = httptest.NewRequest(http.MethodPost, c.uri, nil)
		}
		r.Header.Set("X-Model", "in the header")
		var facts *Facts
		if c.body != nil {
			facts = &Facts{Names: c.body}
		}
		got, err := s.Other(r, facts, c.found, func(name string) bool { return name == "alias of a" })
		require.Equal(t, c.faulty, err != nil, name)
		require.Equal(t, c.want, got, name)
	}
}

func TestANameInAnyPlaceHasABound(t *testing.T) {
	for _, from := range []config.ModelFrom{{Source: config.FromQuery, Name: "model"}, {Source: config.FromHeader, Name: "X-Model"}, {Source: config.FromPath, Name: "/m/*/do"}} {
		s, err := NewSources([]config.ModelFrom{from})
		require.NoError(t, err)
		for n, ok := range map[int]bool{MaxName: true, MaxName + 1: false} {
			name := strings.Repeat("x", n)
			r := httptest.NewRequest(http.MethodGet, "/m/"+name+"/do?model="+name, nil)
			r.Header.Set("X-Model", name)
			got, err := s.Find(r, nil)
			require.Equal(t, ok, err == nil, "%d bytes in the %s", n, from.Source)
			require.Equal(t, ok, got == name)
		}
	}
}

// A change is shared by all requests for a model.
func TestANameForOneBodyIsNotAddedToAnother(t *testing.T) {
	c := &Change{Strip: []string{"a"}}
	require.Equal(t, &Change{Strip: []string{"a"}, Missing: "m"}, c.WithName("m"))
	require.Equal(t, &Change{Strip: []string{"a"}}, c)
	require.Equal(t, &Change{Missing: "m"}, (*Change)(nil).WithName("m"))
}

func TestABodyThatIsReadShowsItsProgress(t *testing.T) {
	b := NewBuffers(t.TempDir())
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("0123456789"))
	var moved atomic.Int64
	body, err := b.Read(r, Limits{Body: 10, Total: 1 << 20, Moved: &moved})
	require.NoError(t, err)
	defer body.Close()
	require.EqualValues(t, 10, moved.Load())
	require.EqualValues(t, 10, body.Size())
}
