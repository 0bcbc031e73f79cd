"""Two tiny models that disagree: written in a moment, and each forward of them takes next to nothing.

A draft that is nearly the target, as good ones are, hides what is wrong with a rule of acceptance: hardly a token is
ever rejected. These two share a body, and the draft's output layer is part the target's and part another, and less sure
of itself throughout, as small models are. So about half of what is drafted is kept, every rule has much to decide, and
a tenth of the target's law lies outside what a drafter tells of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_HIDDEN, _MIDDLE, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 64, 96, 4, 2, 16, 2
_END = "<|endoftext|>"
_SHARPNESS = 2.0  # standard deviation of the target's logits: the 20 likeliest tokens have about 3/4 of the mass
_AGREEMENT = 0.9  # correlation of the draft's logits with the target's
_MODESTY = 0.7  # of the draft: its logits are so much smaller
_MAX_LEN = 512


def write_models(folder: Path) -> tuple[Path, Path]:
    """Writes a target and a draft as Hugging Face folders; the same at every call.

    Args:
        folder: exists.

    Returns:
        Their folders, ``target`` and ``draft`` in ``folder``.
    """
    rng = np.random.default_rng(0)
    vocab_size = _write_tokenizer(folder / "target")
    _write_tokenizer(folder / "draft")
    weights = _body(rng, vocab_size)
    of_target, other = (_normal(rng, (vocab_size, _HIDDEN), _SHARPNESS / _HIDDEN**0.5) for _ in range(2))
    of_draft = _MODESTY * (_AGREEMENT * of_target + np.sqrt(1 - _AGREEMENT**2, dtype=np.float32) * other)
    for name, output in (("target", of_target), ("draft", of_draft)):
        _write_model(folder / name, weights | {"lm_head.weight": output}, vocab_size)
    return folder / "target", folder / "draft"


def _body(rng: np.random.Generator, vocab_size: int) -> dict[str, np.ndarray]:
    """Random weights of all but the output layer, large enough that every part shows in the logits."""
    weights = {
        "model.embed_tokens.weight": _normal(rng, (vocab_size, _HIDDEN), 4 / _HIDDEN**0.5),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
    }
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_MIDDLE, _HIDDEN),
        "mlp.up_proj": (_MIDDLE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _MIDDLE),
    }
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = _normal(rng, shape, 1.5 / shape[1] ** 0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(_HIDDEN, np.float32)
    return weights


def _normal(rng: np.random.Generator, shape: tuple[int, int], scale: float) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def _write_model(folder: Path, weights: dict[str, np.ndarray], vocab_size: int) -> None:
    from safetensors.numpy import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MIDDLE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": _MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _write_tokenizer(folder: Path) -> int:
    """A token for every byte, and an end token; the number of them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return len(pieces)
