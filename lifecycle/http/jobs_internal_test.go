package httplife

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestJobsAreFollowedWithinABoundTheOldestFirst(t *testing.T) {
	var j jobs
	require.Empty(t, j.oldest())
	for i := range maxJobs {
		j.add(i)
		j.add(i) // an answer may name it again
	}
	require.Len(t, j.ids, maxJobs)
	require.Len(t, j.oldest(), jobsAtOnce)
	require.Equal(t, 0, j.oldest()[0])
	j.add("one more")
	require.Len(t, j.ids, maxJobs, "the oldest is forgotten for it")
	require.Equal(t, 1, j.oldest()[0])
	require.Equal(t, "one more", j.ids[maxJobs-1])
	j.drop(1)
	require.Equal(t, 2, j.oldest()[0])
	j.drop("unheard of")
	require.Len(t, j.ids, maxJobs-1)
}
