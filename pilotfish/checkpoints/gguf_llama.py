"""Writes a GGUF file of a Llama as a Hugging Face folder, the inverse of llama.cpp's conversion.

Source of the format: the GGUF specification (ggml, docs/gguf.md) and its Python package ``gguf``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pilotfish.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_CONTROL = 3  # gguf.TokenType.CONTROL

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Writes ``config.json``, ``model.safetensors``, the tokenizer files and ``generation_config.json``.

    Args:
        source: a ``.gguf`` file of architecture ``llama`` with a byte-level BPE tokenizer of the
            ``smollm`` kind.
        folder: exists; files in it are overwritten.
        progress: told after every tensor.

    Raises:
        InvalidArgumentError: the file is not GGUF.
        FailedPreconditionError: an architecture, tokenizer or tensor that this converter does not know.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise InvalidArgumentError(f"{source} cannot be read as GGUF: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _require(source, fields, "general.architecture", "llama")
    _require(source, fields, "tokenizer.ggml.model", "gpt2")
    _require(source, fields, "tokenizer.ggml.pre", "smollm")

    # GGUF shapes are innermost first. The rows may be padded beyond the tokenizer's own tokens.
    shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise FailedPreconditionError(f"{source} has no tensor token_embd.weight; it is not a whole model")
    config = _config(fields, vocab_size=shapes["token_embd.weight"][0], tied="output.weight" not in shapes)
    _write_weights(reader.tensors, config, folder, progress)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _special_ids(fields))
    _write_tokenizer(fields, folder)


def _require(source: Path, fields: dict[str, Any], name: str, wanted: str) -> None:
    if fields.get(name) != wanted:
        raise FailedPreconditionError(f"{source} has {name} = {fields.get(name)!r}; only {wanted!r} can be converted")


def _config(fields: dict[str, Any], vocab_size: int, tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": fields.get("llama.attention.key_length", fields["llama.embedding_length"] // heads),
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        **_special_ids(fields),
    }


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF keeps 1e-5 as the float32 9.99999975e-06."""
    return float(str(np.float32(value)))


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {ours: f"tokenizer.ggml.{theirs}_token_id" for ours, theirs in names.items()}
    return {ours: int(fields[key]) for ours, key in keys.items() if key in fields}


def _write_weights(tensors: Any, config: dict[str, Any], folder: Path, progress: Progress | None) -> None:
    import torch
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(tensors, start=1):
        name = hugging_face_name(tensor.name)
        # bfloat16 even for a file of four-bit weights: it is the model's own dtype, and float32, bfloat16 and float16
        # services then all start from the same numbers. Its rounding is far below that of the four bits.
        weights[name] = torch.from_numpy(_dequantised(tensor, config)).to(torch.bfloat16)
        if progress is not None:
            progress(done, len(tensors))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is written for the owner alone; containers run as others


def _dequantised(tensor: Any, config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """The tensor as Hugging Face has it, float32, [out, in] for matrices."""
    import gguf

    values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if tensor.name.endswith("attn_q.weight"):
        return unpermute(values, config["num_attention_heads"])
    if tensor.name.endswith("attn_k.weight"):
        return unpermute(values, config["num_key_value_heads"])
    return values


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's reordering of q and k rows.

    Rotary embedding turns pairs of a head's dimensions. llama.cpp wants the pair side by side
    (2i, 2i + 1), Hugging Face half a head apart (i, i + head_dim / 2).

    Args:
        weight: float32 [heads * head_dim, hidden], pairs side by side.

    Returns:
        Same shape, pairs half a head apart.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, hidden))


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``."""
    if name in _OUTER:
        return _OUTER[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _INNER:
            return f"model.layers.{layer}.{_INNER[part]}.weight"
    raise FailedPreconditionError(f"GGUF tensor {name!r} is not part of a Llama that can be converted")


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # llama.cpp's "smollm": every digit alone, then GPT-2's expression.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    special = {name.removesuffix("_id"): tokens[index] for name, index in _special_ids(fields).items()}
    if "tokenizer.ggml.unknown_token_id" in fields:
        special["unk_token"] = tokens[fields["tokenizer.ggml.unknown_token_id"]]
    config: dict[str, Any] = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        # Not GPT2Tokenizer: that class brings its own pre-tokenizer, which keeps digits together.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
