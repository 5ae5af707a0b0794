package faultlines

import (
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestEveryFaultHasItsTitle(t *testing.T) {
	two := errors.Join(errors.New("a: wrong"), fmt.Errorf("b: %w", errors.Join(errors.New("wrong"), errors.New("c: wrong"))))
	for _, tc := range []struct {
		name string
		err  error
		want string
	}{
		{"one", errors.New("wrong"), "x (f:3): wrong"},
		{"one that has it", errors.New("x (f:3): wrong"), "x (f:3): wrong"},
		{"joined ones, however deep", two, "x (f:3): a: wrong\nx (f:3): b: wrong\nx (f:3): c: wrong"},
		{"one that has it among others", errors.New("x (f:3): wrong\n\n  wrong, too\n\n ;"), "x (f:3): wrong\nx (f:3): wrong, too\nx (f:3): ;"},
	} {
		if got := Prefix(Title("x", "f:3"), tc.err); got == nil || got.Error() != tc.want {
			t.Errorf("%s: got\n%v\nwant\n%s", tc.name, got, tc.want)
		}
	}
	if err := Prefix("x", nil); err != nil {
		t.Errorf("no fault became %v", err)
	}
	if err := Prefix("x", io.EOF); !errors.Is(err, io.EOF) {
		t.Errorf("a single fault is lost in %v", err)
	}
	if got := Title("x", ""); got != "x" {
		t.Errorf("without a place the title is %q", got)
	}
}

func TestTheTitleOfAModuleTakesThePlaceOfCaddysWords(t *testing.T) {
	err := errors.New("loading module 'p': provision ns.p: wrong\nns.p: too")
	if got, want := OfModule("p", "ns.p", err).Error(), "p: wrong\np: ns.p: too"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	invalid := errors.New("loading module 'p': ns.p: invalid configuration: wrong\ninvalid configuration: too")
	if got, want := OfModule("p", "ns.p", invalid).Error(), "p: wrong\np: invalid configuration: too"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got, want := OfModule("p", "ns.q", err).Error(), "p: loading module 'p': provision ns.p: wrong\np: ns.p: too"; got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if err := OfModule("p", "ns.p", nil); err != nil {
		t.Errorf("no fault became %v", err)
	}
}
