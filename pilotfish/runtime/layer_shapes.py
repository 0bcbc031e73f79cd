"""Names and shapes of a decoder's tensors, as checkpoints of models and of heads store them; imports no torch."""

from __future__ import annotations

from pilotfish.runtime.config import ModelConfig

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor that the decoder uses."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDINGS: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    norms = {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    for name, shape in (layer_shapes(config) | norms).items():
        shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(config.layers)}
    return shapes


def layer_shapes(config: ModelConfig, *, wide: bool = False) -> dict[str, tuple[int, ...]]:
    """Names, as Hugging Face has them behind the layer's prefix, and shapes; without the two RMS norms.

    Args:
        config: sizes, biases and q/k norms.
        wide: the attention reads two states side by side (EAGLE-3).
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    read = 2 * hidden if wide else hidden
    linear = [("self_attn.q_proj", q, read, config.qkv_bias), ("self_attn.k_proj", kv, read, config.qkv_bias)]
    linear += [("self_attn.v_proj", kv, read, config.qkv_bias), ("self_attn.o_proj", hidden, q, config.output_bias)]
    linear += [(f"mlp.{name}_proj", inner, hidden, config.mlp_bias) for name in ("gate", "up")]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, has_bias in [*linear, ("mlp.down_proj", hidden, inner, config.mlp_bias)]:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes
