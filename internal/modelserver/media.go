package modelserver

import (
	"encoding/base64"
	"errors"
	"maps"
	"net/http"
	"time"
)

// Servers of pictures and speech, and the like. Each is named as its preset.
const (
	A1111            Manner = "a1111"              // one model; unloads under its work, and must be told to load again
	Forge            Manner = "forge"              // as a1111, but loads again by itself
	SDNext           Manner = "sdnext"             // as forge, in its own words
	ImmichML         Manner = "immich-ml"          // unloads only by itself, by starting its worker anew
	WhisperCpp       Manner = "whispercpp"         // loads at start; swaps its model, and dies if it can't
	Speaches         Manner = "speaches"           // several models; forgets one that it could not unload
	InvokeAI         Manner = "invokeai"           // a job queue; doesn't unload what is in use and doesn't say so
	SDCpp            Manner = "sdcpp"              // loads at start; jobs that only their own route tells of
	Kokoro           Manner = "kokoro"             // unloads under its work, if that is allowed at all
	Chatterbox       Manner = "chatterbox"         // as a1111, in its own words
	ChatterboxTTSAPI Manner = "chatterbox-tts-api" // loads at start; tells what it works on
	AllTalk          Manner = "alltalk"            // loads at start; may unload after each job
	OpenedAISpeech   Manner = "openedai-speech"    // one of its two models runs on the CPU
	XTTS             Manner = "xtts"               // loads at start
)

func init() {
	maps.Copy(manners, map[Manner]manner{
		A1111:            {serve: newWebUI, serial: true},
		Forge:            {serve: newWebUI, serial: true},
		SDNext:           {serve: newWebUI, serial: true},
		ImmichML:         {serve: newImmich, renews: true, keepAlive: 5 * time.Minute},
		WhisperCpp:       {serve: newWhisper, atStart: true, late: true, serial: true},
		Speaches:         {serve: newSpeaches, many: true, keepAlive: 5 * time.Minute},
		InvokeAI:         {serve: newInvoke},
		SDCpp:            {serve: newSDCpp, atStart: true, late: true, serial: true},
		Kokoro:           {serve: newKokoro},
		Chatterbox:       {serve: newChatterbox},
		ChatterboxTTSAPI: {serve: newChatterboxAPI, atStart: true, early: true},
		AllTalk:          {serve: newAllTalk, atStart: true, late: true},
		OpenedAISpeech:   {serve: newOpenedAI},
		XTTS:             {serve: newXTTS, atStart: true, late: true},
	})
}

// told makes work that breaks, since its model goes away under it, end with an
// error of the server's own.
func (s *shape) told(answer func(*job) error) func(*job) error {
	return func(j *job) error {
		err := answer(j)
		if errors.Is(err, errBroken) {
			s.fail(j.w, j.r, http.StatusInternalServerError, err.Error())
			return errAnswered
		}
		return err
	}
}

// unloadNow unloads the only model without a lock: it doesn't look whether
// anything runs. It reports whether to go on.
func (s *shape) unloadNow(w http.ResponseWriter, r *http.Request) bool {
	if !s.unloading(w, r, s.m) {
		return false
	}
	if err := s.l.unload(r.Context(), s.m); err != nil {
		s.loadError(w, r, err)
		return false
	}
	return true
}

// reload drops the only model and loads it, as servers do that are told to load
// what they have. It reports whether to go on.
func (s *shape) reload(w http.ResponseWriter, r *http.Request) bool {
	err := s.l.unload(r.Context(), s.m)
	if err == nil {
		err = s.load(r.Context(), s.m)
	}
	if err != nil {
		s.loadError(w, r, err)
	}
	return err == nil
}

// drawn is a picture in base64.
func drawn(prompt string) string {
	return base64.StdEncoding.EncodeToString(picture(prompt, 256, 256))
}
