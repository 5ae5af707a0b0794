package gpubroker

import (
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	zaptest "go.uber.org/zap/zaptest/observer"
)

var logHeader = strings.Join(logColumns, ",") + "\n"

// logged is an entry for consumer a in a file.
func logged(path string) logEntry {
	return logEntry{path: path, log: zap.NewNop(), at: time.Date(2026, 3, 1, 12, 30, 15, 250_400_000, time.FixedZone("", 3600)), consumer: "a",
		service: 1500 * time.Millisecond, priority: 100, patience: -1, wait: 20 * time.Millisecond, load: 0, status: 200}
}

const loggedRow = "2026-03-01T11:30:15.250Z,a,1.500,100,,0.020,0.000,200\n"

func text(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(data)
}

// inBubble runs a test with a request log whose time passes as the test says.
func inBubble(t *testing.T, test func(t *testing.T, l *requestLog, dir string)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		l := newRequestLog()
		defer l.close()
		test(t, l, dir)
	})
}

func TestRequestLogIsWrittenASecondAfterALineAndAtTheEnd(t *testing.T) {
	inBubble(t, func(t *testing.T, l *requestLog, dir string) {
		path := filepath.Join(dir, "log.csv")
		l.add(logged(path))
		left := logged(path)
		left.service, left.patience, left.code, left.consumer = -1, 3*time.Second, codeLeft, `"odd", name`
		l.add(left)
		pass(time.Second - time.Millisecond)
		synctest.Wait()
		require.Empty(t, text(t, path))
		pass(time.Millisecond)
		synctest.Wait()
		require.True(t, strings.HasPrefix(text(t, path), logHeader+loggedRow))
		rows, err := csv.NewReader(strings.NewReader(text(t, path))).ReadAll()
		require.NoError(t, err)
		require.Equal(t, []string{"2026-03-01T11:30:15.250Z", `"odd", name`, "", "100", "3.000", "0.020", "0.000", "client_left"}, rows[2])
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
		l.add(logged(path))
		l.close()
		require.True(t, strings.HasSuffix(text(t, path), "client_left\n"+loggedRow))
		l.close()
		l.add(logged(path)) // nobody writes any more, and nobody is held up
	})
}

func TestRequestLogGoesOnWithAFileThatIsThere(t *testing.T) {
	for before, want := range map[string]string{
		logHeader + loggedRow:    logHeader + loggedRow + loggedRow,
		logHeader + "2026-03-01": logHeader + "2026-03-01\n" + loggedRow, // a crash
		"":                       logHeader + loggedRow,
	} {
		inBubble(t, func(t *testing.T, l *requestLog, dir string) {
			path := filepath.Join(dir, "log.csv")
			require.NoError(t, os.WriteFile(path, []byte(before), 0o640))
			l.add(logged(path))
			l.close()
			require.Equal(t, want, text(t, path))
		})
	}
}

func TestRequestLogFollowsItsPathAndLetsGoOfAFileThatWasMovedAway(t *testing.T) {
	inBubble(t, func(t *testing.T, l *requestLog, dir string) {
		one, other, moved := filepath.Join(dir, "one"), filepath.Join(dir, "other"), filepath.Join(dir, "moved")
		l.add(logged(one))
		l.add(logged(other))
		l.add(logged(one))
		pass(time.Second)
		synctest.Wait()
		require.Equal(t, logHeader+loggedRow+loggedRow, text(t, one))
		require.Equal(t, logHeader+loggedRow, text(t, other))

		require.NoError(t, os.Rename(one, moved))
		l.add(logged(one))
		pass(time.Second)
		synctest.Wait()
		require.Equal(t, logHeader+strings.Repeat(loggedRow, 3), text(t, moved), "what was on its way is not lost")
		l.add(logged(one))
		pass(time.Second)
		synctest.Wait()
		require.Equal(t, logHeader+loggedRow, text(t, one))
		require.Equal(t, logHeader+strings.Repeat(loggedRow, 3), text(t, moved))
	})
}

func TestRequestLogThatCannotBeWrittenCountsWhatIsLostAndTellsOnceAMinute(t *testing.T) {
	inBubble(t, func(t *testing.T, l *requestLog, dir string) {
		core, logs := zaptest.New(zap.WarnLevel)
		path := filepath.Join(dir, "no", "such", "log.csv")
		lost := logged(path)
		lost.log = zap.New(core)
		said := func() string {
			synctest.Wait()
			all := logs.TakeAll()
			if len(all) == 0 {
				return ""
			}
			require.Len(t, all, 1)
			return fmt.Sprint(all[0].ContextMap()["requests"])
		}
		for range 3 {
			l.add(lost)
		}
		pass(time.Second)
		require.Equal(t, "3", said())
		for range 30 {
			l.add(lost)
			pass(time.Second)
		}
		require.Empty(t, said())
		for range 40 {
			l.add(lost)
			pass(time.Second)
		}
		require.Equal(t, "60", said(), "those of a minute")
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		l.add(logged(path))
		pass(time.Second)
		synctest.Wait()
		require.Equal(t, logHeader+loggedRow, text(t, path), "it goes on by itself")
	})
}

func TestRequestLogNeverHoldsARequestUp(t *testing.T) {
	l := newRequestLog()
	l.start.Do(func() {}) // nobody writes
	for range logWaiting + 10 {
		l.add(logged("nowhere"))
	}
	require.EqualValues(t, 10, l.lost.Load())
}

func TestRequestLogRefusesWhatIsNoFile(t *testing.T) {
	inBubble(t, func(t *testing.T, l *requestLog, dir string) {
		core, logs := zaptest.New(zap.WarnLevel)
		e := logged(dir)
		e.log = zap.New(core)
		l.add(e)
		l.close()
		require.Len(t, logs.All(), 1)
		require.Contains(t, fmt.Sprint(logs.All()[0].ContextMap()["error"]), "no regular file")
	})
}
