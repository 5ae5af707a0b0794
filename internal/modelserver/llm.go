package modelserver

import (
	"maps"
	"net/http"
	"time"
)

// Servers of language models. Each is named as its preset.
const (
	LlamaCpp          Manner = "llamacpp"            // one model, loads at start; can't be unloaded but may fall asleep
	LlamaCppRouter    Manner = "llamacpp-router"     // several; answers before it is done, and loads whatever is asked about
	VLLM              Manner = "vllm"                // one, loads at start; sleeps and wakes, aborts by default
	SGLang            Manner = "sglang"              // one, loads at start; dies if its memory is released under work
	TextgenWebUI      Manner = "textgen-webui"       // one; an unload takes no lock
	LMStudio          Manner = "lmstudio"            // several, loads lazily
	LocalAI           Manner = "localai"             // several, loads lazily; an unload gives up on busy models
	KoboldCpp         Manner = "koboldcpp"           // one; un- and reloads by starting anew
	TabbyAPI          Manner = "tabbyapi"            // one; an unload cancels the work
	LlamaSwap         Manner = "llama-swap"          // several, loads lazily; an unload cuts the work
	DockerModelRunner Manner = "docker-model-runner" // several, loads lazily; doesn't unload what is busy and doesn't say so
	Triton            Manner = "triton"              // several; accepts an unload and does it when the work is done
	Xinference        Manner = "xinference"          // several; launched by a spec that it forgets
	TGI               Manner = "tgi"                 // one, loads at start; only its process can be ended
	TEI               Manner = "tei"                 // as tgi, for embeddings
	Infinity          Manner = "infinity"            // as tei
)

func init() {
	maps.Copy(manners, map[Manner]manner{
		LlamaCpp:          {serve: newLlamaCpp, atStart: true, early: true},
		LlamaCppRouter:    {serve: newLlamaRouter, many: true, grace: 10 * time.Second},
		VLLM:              {serve: newVLLM, atStart: true, late: true},
		SGLang:            {serve: newSGLang, atStart: true, late: true},
		TextgenWebUI:      {serve: newTextgen},
		LMStudio:          {serve: newLMStudio, many: true, keepAlive: time.Hour},
		LocalAI:           {serve: newLocalAI, many: true, keepAlive: 15 * time.Minute, grace: 30 * time.Second},
		KoboldCpp:         {serve: newKobold, late: true},
		TabbyAPI:          {serve: newTabby},
		LlamaSwap:         {serve: newLlamaSwap, many: true},
		DockerModelRunner: {serve: newDockerRunner, many: true, keepAlive: 5 * time.Minute},
		Triton:            {serve: newTriton, many: true},
		Xinference:        {serve: newXinference, many: true},
		TGI:               {serve: newTGI, atStart: true, late: true},
		TEI:               {serve: newTEI, atStart: true, late: true},
		Infinity:          {serve: newInfinity, atStart: true, late: true},
	})
}

// modelNames serves OpenAI's list of models, loaded or not.
func (s *shape) modelNames(patterns ...string) {
	s.handle(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, v1Models(s.names(nil), s.l.s.name))
	}, patterns...)
}
