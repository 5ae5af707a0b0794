//go:build linux && real

package ollama

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 2 * time.Minute

func TestOllamaServesTheTinyModel(t *testing.T) {
	client := NewClient(t)
	server := Start(t)
	wantLoaded(t, server)

	answer, err := client.NodeChat(deadline(t), Chat{BaseURL: server.URL + "/v1", Model: Tiny, MaxTokens: 300, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	wantFullAnswer(t, answer, 300)
	wantLoaded(t, server, Tiny)
	models, err := server.PS()
	if err != nil {
		t.Fatal(err)
	}
	if models[0].Size == 0 || models[0].SizeVRAM != 0 {
		t.Errorf("want some size, and none of it in VRAM, found %+v", models[0])
	}

	if err := server.Unload(Tiny); err != nil {
		t.Fatal(err)
	}
	wantLoaded(t, server)
}

func TestTheNodeClientTakesOneWholeAnswer(t *testing.T) {
	client := NewClient(t)
	server := Start(t)
	answer, err := client.NodeChat(deadline(t), Chat{BaseURL: server.URL + "/v1", Model: Tiny2, MaxTokens: 20, Whole: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(answer.Chunks) != 0 || len(answer.Text) == 0 || answer.FinishReason != "length" {
		t.Errorf("want one whole answer cut off at its length, found %+v", answer)
	}
	wantLoaded(t, server, Tiny2)
}

func TestAnAnswerOfTheSlowModelStreamsForSeconds(t *testing.T) {
	client := NewClient(t)
	server := Start(t)
	chat, err := client.Start(deadline(t), Chat{BaseURL: server.URL + "/v1", Model: Slow, MaxTokens: 300})
	if err != nil {
		t.Fatal(err)
	}
	<-chat.First()
	select {
	case <-chat.Done():
		_, err := chat.Wait()
		t.Fatalf("want a stream that goes on after its first chunk, found it at its end (error %v)", err)
	default:
	}
	wantLoaded(t, server, Slow)
	answer, err := chat.Wait()
	if err != nil {
		t.Fatal(err)
	}
	wantFullAnswer(t, answer, 300)
	took := answer.At.Sub(answer.Chunks[0].At)
	t.Logf("%d chunks in %v", len(answer.Chunks), took)
	if took < time.Second {
		t.Errorf("want a stream of seconds, found %v", took)
	}
}

func TestAnErrorIsToldInTheSDKsOwnWords(t *testing.T) {
	client := NewClient(t)
	server := Start(t)
	_, err := client.NodeChat(deadline(t), Chat{BaseURL: server.URL + "/v1", Model: "absent"})
	var thrown *SDKError
	if !errors.As(err, &thrown) {
		t.Fatalf("want an error of the SDK, found %v", err)
	}
	if thrown.Class != "NotFoundError" || thrown.Status != 404 || !strings.Contains(thrown.Message, "absent") {
		t.Errorf("want a NotFoundError, status 404, that names the model, found %+v", thrown)
	}
}

func TestAServerThatIsNotThereIsAConnectionErrorOfTheSDK(t *testing.T) {
	client := NewClient(t)
	// The reserved port 1 of the test's own machine.
	_, err := client.NodeChat(deadline(t), Chat{BaseURL: "http://127.0.0.1:1/v1", Model: Tiny})
	var thrown *SDKError
	if !errors.As(err, &thrown) || thrown.Class != "APIConnectionError" || thrown.Status != 0 {
		t.Fatalf("want an APIConnectionError without status, found %v", err)
	}
}

func TestAClientWhoseContextEndsIsKilledAndOllamaStopsItsAnswer(t *testing.T) {
	client := NewClient(t)
	server := Start(t)
	ctx, leave := context.WithCancel(deadline(t))
	defer leave()
	chat, err := client.Start(ctx, Chat{BaseURL: server.URL + "/v1", Model: Slow, MaxTokens: 20000})
	if err != nil {
		t.Fatal(err)
	}
	<-chat.First()
	leave()
	if _, err := chat.Wait(); err == nil {
		t.Error("want an error from a client that was killed")
	}
	// A model that computes is not unloaded before its answer is complete, which would take minutes.
	left := time.Now()
	if err := server.Unload(Slow); err != nil {
		t.Fatal(err)
	}
	wantLoaded(t, server)
	if took := time.Since(left); took > 20*time.Second {
		t.Errorf("want the answer given up with its reader, found the model busy for %v", took)
	}
}

func deadline(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// wantFullAnswer wants a stream of as many pieces as it has tokens, letters and spaces only.
func wantFullAnswer(t *testing.T, answer Answer, tokens int) {
	t.Helper()
	withText := 0
	for _, chunk := range answer.Chunks {
		if chunk.Text != "" {
			withText++
		}
	}
	if answer.FinishReason != "length" || withText < tokens-2 {
		t.Errorf("want %d chunks and the end for length, found %d and %q", tokens, withText, answer.FinishReason)
	}
	if rest := strings.Trim(answer.Text, " abcdefghijklmnopqrstuvwxyz"); rest != "" {
		t.Errorf("want letters and spaces, found %q", answer.Text)
	}
}

// wantLoaded waits until exactly these models are loaded.
func wantLoaded(t *testing.T, server *Server, names ...string) {
	t.Helper()
	ctx := deadline(t)
	poll := time.NewTicker(50 * time.Millisecond)
	defer poll.Stop()
	for {
		models, err := server.PS()
		if err != nil {
			t.Fatal(err)
		}
		found := make([]string, 0, len(models))
		for _, model := range models {
			found = append(found, strings.TrimSuffix(model.Name, ":latest"))
		}
		if strings.Join(found, " ") == strings.Join(names, " ") {
			return
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			t.Fatalf("want %q loaded, found %q", names, found)
		}
	}
}
