"""What a config.json asks for is read, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.runtime.config import ModelConfig, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
OTHERS = LLAMA | {"num_key_value_heads": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_what_a_file_leaves_out_is_what_hugging_face_would_put_there() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert (config.kv_heads, config.head_dim, config.max_len) == (4, 16, 512)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm, config.tied_embeddings))
    assert config.rope == RopeConfig("default", 10000.0)
    assert ModelConfig.from_dict(OTHERS | {"architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


def test_families_differ_by_biases_and_norms() -> None:
    def switches(**values: Any) -> tuple[bool, bool, bool, bool]:
        config = ModelConfig.from_dict(OTHERS | values)
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert switches(attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert switches(architectures=["Qwen2ForCausalLM"]) == (True, False, False, False)
    assert switches(architectures=["Qwen3ForCausalLM"], attention_bias=True) == (True, True, False, True)
    assert switches(architectures=["MistralForCausalLM"], sliding_window=None) == (False, False, False, False)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_rotary_settings_of_transformers_4_and_5_mean_the_same(values: dict[str, Any]) -> None:
    rope = ModelConfig.from_dict(LLAMA | values).rope
    assert rope == RopeConfig("llama3", 5e5, 8.0, original_max_len=64, low_freq_factor=1.0, high_freq_factor=4.0)


def test_stretched_models_hold_longer_rows() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert ModelConfig.from_dict(LLAMA | {"rope_scaling": yarn}).max_len == 1024
    assert ModelConfig.from_dict(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).max_len == 1024
    assert ModelConfig.from_dict(LLAMA | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}).max_len == 512


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window.*4096"),
        ({"architectures": ["MistralForCausalLM"]}, "sliding_window.*4096"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
            "factor is 4.0 in rope_parameters and 2.0 in rope_scaling",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4.*3 KV heads"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        ModelConfig.from_dict(OTHERS | values)


def test_layers_and_lengths_stay_within_the_checkpoint() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert config.with_layers(None) is config
    assert (config.with_layers(1).layers, config.with_layers(1).checkpoint_layers) == (1, 4)
    assert (config.limit_len(None), config.limit_len(100)) == (512, 100)
    for layers in (0, 5):
        with pytest.raises(InvalidArgumentError, match=f"layers is {layers}.*4"):
            config.with_layers(layers)
    for length in (0, 513):
        with pytest.raises(InvalidArgumentError, match=f"max_len is {length}.*512"):
            config.limit_len(length)


def test_missing_and_broken_files_say_what_to_do(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    with pytest.raises(NotFoundError, match="pilotfish pull"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(InvalidArgumentError, match=r"config\.json is not JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidArgumentError, match="must be an object"):
        ModelConfig.from_folder(tmp_path)
    written = json.loads((model_folder() / "config.json").read_text())
    assert ModelConfig.from_folder(model_folder()) == ModelConfig.from_dict(written)
