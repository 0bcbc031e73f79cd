"""Tiny random models as Hugging Face folders, made on the fly: config.json, safetensors, tokenizer.

Every function writes into the folder given and returns it. The same arguments give the same model.
Two tokenizers are known: ``bytes``, byte-level BPE that encodes any text (vocabulary of 280), and
``words``, 16 or more words ``w0 w1 ...`` for tests that count how often each token is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
EOS_ID = 2  # <|im_end|>
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = ["Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "e n", "o r", "Ġ o"]
_MERGES += ["Ġ c", "i s", "Ġ b", "Ġa n", "i t", "e s"]

_FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE of 280 ids: 4 special tokens, 256 bytes, 20 merges."""
    merges = [(a, b) for a, b in map(str.split, _MERGES)]
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def word_tokenizer(words: int) -> Tokenizer:
    """Words ``w0`` to ``w{words - 5}`` after the 4 special tokens; ``words`` ids in all."""
    pieces = [*SPECIALS, *(f"w{i}" for i in range(words - len(SPECIALS)))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=SPECIALS[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> Path:
    """Writes tokenizer.json and tokenizer_config.json with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[EOS_ID],
        "pad_token": SPECIALS[3],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    layers: int = 2,
    words: int | None = None,
    tokenizer: Tokenizer | None = None,
    padded_vocab: int | None = None,
    sharpness: float = 4.0,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Writes a random model of 4 query heads, 2 KV heads and head size 16, with its tokenizer.

    Args:
        folder: created if need be.
        family: llama, mistral, qwen2 or qwen3.
        seed: of the weights.
        layers: decoder layers.
        words: ids of a word tokenizer; None takes the byte tokenizer.
        tokenizer: another one.
        padded_vocab: rows of the output layer; None takes the tokenizer's vocabulary.
        sharpness: scale of the output layer; larger gives less even distributions.
        shards: safetensors files, about as many.
        dtype: of the stored weights.
        **config: anything the family's Hugging Face configuration takes.
    """
    if tokenizer is None:
        tokenizer = byte_tokenizer() if words is None else word_tokenizer(words)
    write_tokenizer(folder, tokenizer)
    config_class, model_class = _FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": padded_vocab or tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": 3,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    model = model_class(config_class(**(settings | config)))
    _randomise(model, seed, sharpness)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=_shard_bytes(model, shards))
    return folder


def make_tiny_llama(folder: Path, **settings: Any) -> Path:
    """``make_tiny_model`` of the Llama family."""
    return make_tiny_model(folder, "llama", **settings)


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder as Hugging Face's own model, for comparison."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.train(False)


def greedy_texts(folder: Path, prompts: Sequence[str], count: int, **options: Any) -> dict[str, tuple[int, ...]]:
    """Token ids that Hugging Face writes after each prompt, ``count`` or up to the end token; options of its own."""
    model, tokenizer = load_reference(folder), AutoTokenizer.from_pretrained(folder)
    texts = {}
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=count, do_sample=False, **options)
        texts[prompt] = tuple(out[0, ids["input_ids"].shape[1] :].tolist())
    return texts


def _randomise(model: Any, seed: int, sharpness: float) -> None:
    """Weights large enough that layers, biases, norms and positions all show in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(noise * sharpness / weight.shape[1] ** 0.5)
            else:
                weight.copy_(noise * 1.5 / weight.shape[1] ** 0.5)


def _shard_bytes(model: PreTrainedModel, shards: int) -> int:
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return total + 1 if shards == 1 else total // shards
