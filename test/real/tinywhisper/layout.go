package tinywhisper

import "fmt"

// A tensor is a block of 32-bit floats; shape has the fastest dimension first.
type tensor struct {
	name         string
	shape        []int
	mean, spread float32
}

func layout(s Size) []tensor {
	n := s.State
	all := []tensor{
		weight("encoder.positional_embedding", n, audio),
		weight("encoder.conv1.weight", 3, spectrum, n),
		weight("encoder.conv1.bias", 1, n),
		weight("encoder.conv2.weight", 3, n, n),
		weight("encoder.conv2.bias", 1, n),
	}
	all = append(all, norm("encoder.ln_post", n)...)
	for i := range s.Layers {
		all = append(all, block(fmt.Sprintf("encoder.blocks.%d.", i), n, "attn")...)
	}
	all = append(all,
		// Wider than the tokens' own, else each token would be followed by itself.
		tensor{name: "decoder.positional_embedding", shape: []int{n, s.Text}, spread: 1},
		weight("decoder.token_embedding.weight", n, vocabulary))
	all = append(all, norm("decoder.ln", n)...)
	for i := range s.Layers {
		all = append(all, block(fmt.Sprintf("decoder.blocks.%d.", i), n, "attn", "cross_attn")...)
	}
	return all
}

// block gives one layer: each kind of attention, and what computes behind them.
func block(prefix string, n int, attentions ...string) []tensor {
	all := append(norm(prefix+"mlp_ln", n),
		weight(prefix+"mlp.0.weight", n, 4*n),
		weight(prefix+"mlp.0.bias", 4*n),
		weight(prefix+"mlp.2.weight", 4*n, n),
		weight(prefix+"mlp.2.bias", n))
	for _, attention := range attentions {
		part := prefix + attention
		all = append(all, norm(part+"_ln", n)...)
		for _, name := range []string{".query", ".key", ".value", ".out"} {
			all = append(all, weight(part+name+".weight", n, n))
			if name != ".key" { // keys have no bias
				all = append(all, weight(part+name+".bias", n))
			}
		}
	}
	return all
}

func weight(name string, shape ...int) tensor {
	return tensor{name: name, shape: shape, spread: 0.1}
}

func norm(name string, n int) []tensor {
	return []tensor{
		{name: name + ".weight", shape: []int{n}, mean: 1},
		{name: name + ".bias", shape: []int{n}},
	}
}
