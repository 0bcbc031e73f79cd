"""What a decoder of the Llama family looks like, read from a Hugging Face config.json.

Everything a configuration asks for is either built or refused by name: a model that runs with a
setting ignored would answer, and answer wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pilotfish.errors import InvalidArgumentError, NotFoundError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # DeepSeek and GLM, Qwen
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched; fields as in Hugging Face's rope_parameters."""

    type: str
    theta: float
    factor: float = 1.0
    original_max_len: int = 0
    """Length the frequencies were trained for, in tokens (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    """Bias on the attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k before the rotation (Qwen3)."""
    tied_embeddings: bool
    rms_eps: float
    rope: RopeConfig
    max_len: int
    """Longest row in tokens, prompt and completion together."""
    checkpoint_layers: int
    """Layers in the checkpoint; more than ``layers`` when only the first ones are used."""
    prediction_layers: int = 0
    """Layers behind them that only a multi-token prediction head uses."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads ``folder/config.json``.

        Raises:
            NotFoundError: if the folder or the file is missing.
            InvalidArgumentError: on anything that this decoder does not do, by name.
        """
        return cls.from_dict(read_json(folder, "config.json"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """As ``from_folder``, from the parsed file."""
        architecture = _architecture(values)
        _refuse_unbuilt(values, architecture)
        hidden, heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
        llama, qwen3 = architecture == "LlamaForCausalLM", architecture == "Qwen3ForCausalLM"
        # Where a file leaves a size out, Hugging Face's classes differ in what they put there.
        kv_heads = _size(values, "num_key_value_heads", default=heads if llama else None)
        head_dim = _size(values, "head_dim", default=128 if qwen3 else max(hidden // heads, 1))
        if heads % kv_heads:
            raise InvalidArgumentError(f"num_attention_heads is {heads}; must be a multiple of {kv_heads} KV heads")
        if head_dim % 2:
            raise InvalidArgumentError(f"head_dim is {head_dim}; must be even for rotary positions")
        # Only these two families read the switch; the others have a fixed answer.
        attention_bias = (llama or qwen3) and _flag(values, "attention_bias")
        layers = _size(values, "num_hidden_layers")
        rope = _rope(values)
        return cls(
            architecture=architecture,
            vocab_size=_size(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(values, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            output_bias=attention_bias,
            mlp_bias=llama and _flag(values, "mlp_bias"),
            qk_norm=qwen3,
            tied_embeddings=_flag(values, "tie_word_embeddings"),
            rms_eps=_number(values, "rms_norm_eps", default=1e-6),
            rope=rope,
            max_len=_max_len(_size(values, "max_position_embeddings"), rope),
            checkpoint_layers=layers,
            prediction_layers=max(_count(values, name) for name in _PREDICTION_LAYERS),
        )

    def with_layers(self, layers: int | None) -> ModelConfig:
        """The same model cut to its first ``layers`` layers; None keeps all.

        Raises:
            InvalidArgumentError: outside [1, layers of the checkpoint].
        """
        if layers is None:
            return self
        if not 1 <= layers <= self.checkpoint_layers:
            raise InvalidArgumentError(f"layers is {layers}; the checkpoint has {self.checkpoint_layers}, at least 1")
        return replace(self, layers=layers)

    def limit_len(self, max_len: int | None) -> int:
        """Longest row to serve: ``max_len``, or all that the model was made for.

        Raises:
            InvalidArgumentError: if the model was not made for so long a row.
        """
        if max_len is None:
            return self.max_len
        if not 1 <= max_len <= self.max_len:
            raise InvalidArgumentError(f"max_len is {max_len}; the model holds rows of 1 to {self.max_len} tokens")
        return max_len


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a model folder, with errors that say what to do."""
    if not folder.is_dir():
        raise NotFoundError(f"model folder {folder} does not exist; fetch one with `pilotfish pull`, which prints it")
    path = folder / name
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist; is {folder} a Hugging Face model folder?")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON ({error}); fetch the model again") from error
    if not isinstance(values, dict):
        raise InvalidArgumentError(f"{path} holds a {type(values).__name__}; must be an object")
    return values


def _architecture(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise InvalidArgumentError(f"architectures is {names}; known are {known}")
    return str(names[0])


def _refuse_unbuilt(values: Mapping[str, Any], architecture: str) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise InvalidArgumentError(f"hidden_act is {activation!r}; only silu is built")
    if values.get("quantization_config") is not None:
        raise InvalidArgumentError("quantization_config is set; use a checkpoint in bfloat16, float16 or float32")
    # Mistral's window is on wherever it is given; Qwen's has a switch of its own.
    default_window = 4096 if architecture == "MistralForCausalLM" else None
    window = values.get("sliding_window", default_window)
    if architecture == "MistralForCausalLM" and window is not None:
        raise InvalidArgumentError(f"sliding_window is {window}; sliding windows are not built, use a model without")
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and values.get("use_sliding_window", False):
        raise InvalidArgumentError("use_sliding_window is true; sliding windows are not built, use a model without")
    kinds = set(values.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise InvalidArgumentError(f"layer_types has {sorted(kinds)}; only full_attention is built")


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    """Transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling, with `type` before `rope_type`."""
    new, old = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, Mapping):
            raise InvalidArgumentError(f"{name} is {value!r}; must be an object")
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise InvalidArgumentError(f"{name} is {new[name]} in rope_parameters and {old[name]} in rope_scaling")
    scaling = {**new, **old}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise InvalidArgumentError(f"rope_type is {kind!r}; known are {', '.join(ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise InvalidArgumentError("partial_rotary_factor is not 1; partial rotation is not built")
    theta = _number(scaling, "rope_theta", default=_number(values, "rope_theta", default=10000.0))
    if kind == "default":
        return RopeConfig(kind, theta)
    factor = _number(scaling, "factor")
    # A length beside the rotary settings wins over one among them, as in transformers.
    name = "original_max_position_embeddings"
    original = _size(scaling, name, default=_size(values, "max_position_embeddings"))
    attention_factor = scaling.get("attention_factor")
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_len=_size(values, name, default=original),
        low_freq_factor=_number(scaling, "low_freq_factor", default=None if kind == "llama3" else 1.0),
        high_freq_factor=_number(scaling, "high_freq_factor", default=None if kind == "llama3" else 4.0),
        beta_fast=_number(scaling, "beta_fast", default=32.0),
        beta_slow=_number(scaling, "beta_slow", default=1.0),
        attention_factor=None if attention_factor is None else _number(scaling, "attention_factor"),
        mscale=_number(scaling, "mscale", default=0.0),
        mscale_all_dim=_number(scaling, "mscale_all_dim", default=0.0),
        truncate=_flag(scaling, "truncate", default=True),
    )


def _max_len(positions: int, rope: RopeConfig) -> int:
    """linear and yarn stretch the trained length, which configurations give before or after stretching."""
    if rope.type in ("linear", "yarn"):
        return max(positions, int(rope.original_max_len * rope.factor))
    return positions


def _size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{name} is {value!r}; must be an integer of at least 1")
    return value


def _count(values: Mapping[str, Any], name: str) -> int:
    """A size that may be absent or 0."""
    return 0 if values.get(name) in (None, 0) else _size(values, name)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
        raise InvalidArgumentError(f"{name} is {value!r}; must be a number of at least 0")
    return float(value)


def _flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r}; must be true or false")
    return value
