package routing

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

const total = 64 << 20

// random is n bytes without a pattern that a mistaken offset would keep.
func random(n int) []byte {
	b := make([]byte, n)
	x := uint32(2463534242)
	for i := range b {
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		b[i] = byte(x)
	}
	return b
}

func TestBodiesOfEverySizeAreReadAgainByteForByte(t *testing.T) {
	for _, size := range []int{0, 1, SmallBody, SmallBody + 1, memoryBody - 1, memoryBody, memoryBody + 1, 3 * memoryBody} {
		for _, known := range []bool{true, false} {
			b := NewBuffers(filepath.Join(t.TempDir(), "bodies"))
			want := random(size)
			r := httptest.NewRequest(http.MethodPost, "/", iotest.HalfReader(bytes.NewReader(want)))
			if r.ContentLength = -1; known {
				r.ContentLength = int64(size)
			}
			r.TransferEncoding = []string{"chunked"}
			body, err := b.Read(r, Limits{Body: total, Total: total})
			require.NoError(t, err)
			require.EqualValues(t, size, r.ContentLength)
			require.Empty(t, r.TransferEncoding)
			for range 2 {
				got, err := io.ReadAll(r.Body)
				require.NoError(t, err)
				require.True(t, bytes.Equal(want, got), "size %d", size)
				body.Rewind(r)
			}
			again, err := r.GetBody()
			require.NoError(t, err)
			got, err := io.ReadAll(again)
			require.NoError(t, err)
			require.True(t, bytes.Equal(want, got))
			require.EqualValues(t, booked(size), b.Held())
			body.Close()
			require.Zero(t, b.Held())
			left, err := os.ReadDir(b.dir)
			require.True(t, err == nil || os.IsNotExist(err))
			require.Empty(t, left, "no file is left over")
		}
	}
}

func TestBodyAboveItsLimitIsRefusedAndGivenBack(t *testing.T) {
	b := NewBuffers(t.TempDir())
	for _, length := range []int64{2000, -1} {
		r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(random(2000)))
		r.ContentLength = length
		_, err := b.Read(r, Limits{Body: 1999, Total: total})
		require.ErrorIs(t, err, ErrTooLarge)
		require.Zero(t, b.Held())
	}
}

// booked is what a body of a size counts for among all.
func booked(size int) int {
	if size <= SmallBody {
		return 0
	}
	return size
}

// post reads a body of n bytes, of which bodies of 400 KiB in all are taken.
func (b *Buffers) post(client string, n int) (*Body, error) {
	return b.Read(httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(random(n))), Limits{Body: total, Total: 400 << 10, Client: client})
}

func TestBodiesTogetherAreBounded(t *testing.T) {
	b := NewBuffers(t.TempDir())
	first, err := b.post("a", 200<<10)
	require.NoError(t, err)
	_, err = b.post("b", 201<<10)
	require.ErrorIs(t, err, ErrNoRoom)
	require.EqualValues(t, 200<<10, b.Held())
	first.Close()
	second, err := b.post("b", 200<<10)
	require.NoError(t, err)
	second.Close()
	require.Zero(t, b.Held())
	require.Empty(t, b.byClient)
}

func TestH5_OneClientLeavesHalfToOthers(t *testing.T) {
	b := NewBuffers(t.TempDir())
	_, err := b.post("greedy", 200<<10+1)
	require.ErrorIs(t, err, ErrNoRoom)
	require.ErrorContains(t, err, "from this client")
	held, err := b.post("greedy", 200<<10)
	require.NoError(t, err)
	_, err = b.post("greedy", 65<<10)
	require.ErrorIs(t, err, ErrNoRoom)
	other, err := b.post("other", 70<<10)
	require.NoError(t, err)
	held.Close()
	other.Close()
	require.Zero(t, b.Held())
}

func TestH5_EightClientsThatTakeAllTheyCanLeaveSomeToTheNinth(t *testing.T) {
	b := NewBuffers(t.TempDir())
	const all = 2 << 30
	for i := range 8 {
		var err error
		for err == nil {
			err = b.book(string(rune('a'+i)), 32<<10, all)
		}
	}
	require.NoError(t, b.book("ninth", 4<<20, all))
}

func TestH5_SmallBodiesAreOutsideTheBound(t *testing.T) {
	b := NewBuffers(t.TempDir())
	held, err := b.post("a", 200<<10)
	require.NoError(t, err)
	for range 100 {
		_, err := b.post("a", SmallBody)
		require.NoError(t, err)
	}
	held.Close()
	require.Zero(t, b.Held())
}

func TestABodyThatIsRecycledIsNotReadAnyMore(t *testing.T) {
	b := NewBuffers(t.TempDir())
	r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(random(100)))
	body, err := b.Read(r, Limits{Body: total, Total: total})
	require.NoError(t, err)
	late, err := r.GetBody()
	require.NoError(t, err)
	_, err = late.Read(make([]byte, 10))
	require.NoError(t, err)
	body.Recycle()
	for _, rest := range []io.Reader{late, r.Body} {
		n, err := rest.Read(make([]byte, 10))
		require.Zero(t, n)
		require.ErrorIs(t, err, errGone)
	}
}

func TestABodyThatIsClosedCanStillBeReadByTheSitesErrorRoutes(t *testing.T) {
	b := NewBuffers(t.TempDir())
	want := random(1000)
	r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(want))
	body, err := b.Read(r, Limits{Body: total, Total: total})
	require.NoError(t, err)
	body.Close()
	got, err := io.ReadAll(r.Body)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestAFileThatCantBeReadBackIsOurFault(t *testing.T) {
	b := NewBuffers(t.TempDir())
	r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(random(2*memoryBody)))
	body, err := b.Read(r, Limits{Body: total, Total: total})
	require.NoError(t, err)
	_, err = io.ReadAll(r.Body)
	require.NoError(t, err)
	require.NoError(t, body.Fault())
	body.Rewind(r)
	require.NoError(t, body.file.Close())
	_, err = io.ReadAll(r.Body)
	require.Error(t, err)
	require.ErrorIs(t, body.Fault(), ErrSpill)
}

func TestReadingASmallBodyAgainAndAgainAllocatesItsReaderOnly(t *testing.T) {
	b := NewBuffers(t.TempDir())
	content := bytes.NewReader(random(3000))
	r := httptest.NewRequest(http.MethodPost, "/", content)
	from := r.Body
	allocs := testing.AllocsPerRun(200, func() {
		content.Reset(content3000)
		r.Body, r.ContentLength = from, 3000
		body, err := b.Read(r, Limits{Body: total, Total: total})
		if err != nil {
			t.Fatal(err)
		}
		body.Recycle()
	})
	require.LessOrEqual(t, allocs, 1.0)
}

var content3000 = random(3000)

func TestBodyThatBreaksOffIsTheClientsError(t *testing.T) {
	b := NewBuffers(t.TempDir())
	broken := errors.New("connection reset")
	r := httptest.NewRequest(http.MethodPost, "/", io.MultiReader(bytes.NewReader(random(2*memoryBody)), iotest.ErrReader(broken)))
	r.ContentLength = -1
	_, err := b.Read(r, Limits{Body: total, Total: total})
	require.ErrorIs(t, err, broken)
	require.Zero(t, b.Held())
	left, err := os.ReadDir(b.dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestAPlainStringIsReadWithoutACopy(t *testing.T) {
	plain, escaped := value{kind: '"', text: `"llama3.2:3b"`}, value{kind: '"', text: `"llama\u0033.2:3b"`}
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = plain.string("model", MaxName) }))
	for _, v := range []value{plain, escaped} {
		text, err := v.string("model", MaxName)
		require.NoError(t, err)
		require.Equal(t, "llama3.2:3b", text)
	}
}

// A transport may go on reading the body of an attempt that has failed.
func TestABodyThatIsReadAgainLeavesWhoReadsItAlready(t *testing.T) {
	b := NewBuffers(t.TempDir())
	for _, size := range []int{1000, 2 * memoryBody} {
		want := random(size)
		r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(want))
		body, err := b.Read(r, Limits{Body: total, Total: total})
		require.NoError(t, err)
		first := r.Body
		_, err = io.ReadFull(first, make([]byte, 10))
		require.NoError(t, err)
		body.Rewind(r)
		got, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.Equal(t, want, got)
		got, err = io.ReadAll(first)
		require.NoError(t, err)
		require.Equal(t, want[10:], got)
		body.Recycle()
	}
}

func TestWhatIsUnreadOfASmallBodyIsSeenAndStaysUnread(t *testing.T) {
	b := NewBuffers(t.TempDir())
	plan, err := NewPlan([]string{"model"}, nil, false)
	require.NoError(t, err)
	large := string(random(SmallBody + 1))
	for _, c := range []struct{ text, becomes, seen string }{
		{`{"model":"a"}`, `{"model":"a"}`, `{"model":"a"}`},
		{`{"x_client_id":"me","model":"a","x_priority":1}`, `{"model":"a"}`, `{"model":"a"}`},
		{large[:SmallBody], large[:SmallBody], large[:SmallBody]},
		{large, large, ""},
	} {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(c.text))
		r.Header.Set("Content-Type", "application/json")
		body, err := b.Read(r, Limits{Body: total, Total: total})
		require.NoError(t, err)
		if c.text[0] == '{' {
			_, err = body.Peek(t.Context(), r.Header, plan)
			require.NoError(t, err)
			body.Rewind(r)
		}
		for range 2 {
			require.Equal(t, c.seen, string(Unread(r.Body)))
		}
		begun, err := r.GetBody()
		require.NoError(t, err)
		_, err = begun.Read(make([]byte, 1))
		require.NoError(t, err)
		require.Nil(t, Unread(begun))
		got, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		require.Equal(t, c.becomes, string(got))
		require.Nil(t, Unread(r.Body))
		late, err := r.GetBody()
		require.NoError(t, err)
		body.Recycle()
		require.Nil(t, Unread(late), "it is over")
	}
	require.Nil(t, Unread(strings.NewReader("text")))
	require.Nil(t, Unread(http.NoBody))
	require.Nil(t, Unread(nil))
}

func TestABodyIsBegunOnceItIsReadOrSent(t *testing.T) {
	b := NewBuffers(t.TempDir())
	plan, err := NewPlan([]string{"model"}, []string{"x_client_id"}, true)
	require.NoError(t, err)
	require.False(t, (*Body)(nil).Begun())
	ways := map[string]struct {
		do   func(r *http.Request)
		want bool
	}{
		"nothing":   {func(*http.Request) {}, false},
		"a look":    {func(r *http.Request) { require.NotEmpty(t, Unread(r.Body)) }, false},
		"a sending": {func(r *http.Request) { Sent(r.Body) }, true},
		"a reading": {func(r *http.Request) { _, _ = io.ReadAll(r.Body) }, true},
		"another's reading": {func(r *http.Request) {
			body, err := r.GetBody()
			require.NoError(t, err)
			_, _ = io.ReadAll(body)
		}, false},
	}
	for name, way := range ways {
		for _, coding := range []string{"", "gzip"} {
			text := []byte(`{"model":"a","x_client_id":"me"}`) // of which something is taken out, so that it is passed on decoded
			if coding != "" {
				text = coded(t, coding, text)
			}
			r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(text))
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Content-Encoding", coding)
			body, err := b.Read(r, Limits{Body: total, Total: total})
			require.NoError(t, err)
			_, err = body.Peek(t.Context(), r.Header, plan)
			require.NoError(t, err)
			body.Rewind(r)
			require.False(t, body.Begun())
			way.do(r)
			require.Equal(t, way.want, body.Begun(), "%s, %s", name, coding)
			body.Recycle()
		}
	}
	require.Zero(t, b.Held())
}
