"""Writes a Llama's Hugging Face folder as a GGUF file of the same weights, so that llama.cpp can be measured beside us.

    python bench/write_gguf.py FOLDER FILE.gguf [--dtype bfloat16]

The inverse of ``pilotfish.checkpoints.gguf_llama``. Source of the format: the GGUF specification (ggml, docs/gguf.md)
and its Python package ``gguf``, which also knows the tensors' names.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

DTYPES = {
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder of a Llama")
    parser.add_argument("file", type=Path, help="GGUF file to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the matrices (bfloat16)")
    arguments = parser.parse_args()
    write_gguf(arguments.folder, arguments.file, arguments.dtype)


def write_gguf(folder: Path, file: Path, dtype: str = "bfloat16") -> None:
    """Writes the folder's weights, configuration and tokenizer as one GGUF file.

    Args:
        folder: of a Llama without biases and rope scaling, with a byte-level BPE tokenizer of SmolLM's kind.
        file: overwritten.
        dtype: of the matrices, "bfloat16", "float16" or "float32"; norms are float32, as llama.cpp wants them.

    Raises:
        ValueError: the folder holds another kind of model, or a tensor that GGUF has no name for.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError(
            f"{folder} has model_type {config['model_type']!r}; only a Llama without rope scaling is known"
        )
    kind, file_type = DTYPES[dtype]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(file_type)
    _add_config(writer, config)
    _add_tokenizer(writer, folder, config["vocab_size"])
    _add_weights(writer, folder, config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config  # transformers 5 and before
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Every row of the embedding gets a token: the peers are asked in token ids, but the file must load."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"<unused {index}>" for index in range(vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * vocab_size
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], kinds[index] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def _add_weights(
    writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], kind: gguf.GGMLQuantizationType
) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"]}
    heads["attn_k"] = config.get("num_key_value_heads", heads["attn_q"])
    for shard in sorted(folder.glob("*.safetensors")):
        for name, weight in load_file(shard).items():
            theirs = names.get_name(name, try_suffixes=(".weight",))
            if theirs is None:
                raise ValueError(f"{shard} has a tensor {name!r}, which GGUF knows no Llama to have")
            values = weight.to(torch.float32).numpy()
            if count := heads.get(theirs.split(".")[-2]):
                values = permute(values, count)
            stored = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(theirs, gguf.quants.quantize(values, stored), raw_dtype=stored)


def permute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k as llama.cpp wants them: the two dimensions that rotary embedding turns side by side.

    Args:
        weight: float32 [heads * head_dim, hidden], pairs half a head apart, as Hugging Face has them.

    Returns:
        Same shape, pairs side by side.
    """
    rows, hidden = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, hidden))


if __name__ == "__main__":
    main()
