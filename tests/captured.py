"""Captured text of a tiny model as `pilotfish train capture` would write it, states from Hugging Face's model."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import load_reference

from draft_svc.training.shards import CapturedDocument, Manifest, Shard, shard_path
from pilotfish.runtime.weights import weights_hash
from pilotfish.tokenizer_hash import tokenizer_hash


def write_captured(
    folder: Path, model: Path, *, documents: int = 40, temperature: float = 0.0, shards: int = 2, seed: int = 0
) -> Path:
    """Writes answers of the model to random prompts of 2 to 9 tokens, with every state behind every layer."""
    folder.mkdir(parents=True, exist_ok=True)
    reference = load_reference(model)
    layers, hidden = reference.config.num_hidden_layers, reference.config.hidden_size
    random = torch.Generator().manual_seed(seed)
    captured = []
    for i in range(documents):
        prompt = 2 + i % 8
        ids = torch.randint(4, reference.config.vocab_size, (1, prompt), generator=random)
        for _ in range(8 + i % 13):
            logits = reference(ids).logits[0, -1]
            if temperature:
                token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=random)
            else:
                token = logits.argmax(keepdim=True)
            ids = torch.cat((ids, token[None]), dim=1)
        with torch.inference_mode():
            states = reference.model(ids, output_hidden_states=True)
        # Hugging Face norms the last of hidden_states; those of the others are as they stand in the stream.
        kept = [*states.hidden_states[1:-1], states.last_hidden_state]
        features = torch.cat([state[0] for state in kept], dim=-1).bfloat16()
        captured.append(CapturedDocument(ids[0].int(), prompt, temperature, features))
    manifest = Manifest(
        model_id="tiny",
        weights_hash=weights_hash(model),
        tokenizer_hash=tokenizer_hash(model),
        features=(*(f"hidden.{i}" for i in range(1, layers)), "final"),
        hidden_size=hidden,
        dtype="float32",
        recipe={},
    )
    for number in range(shards):
        shard = Shard.of(captured[number::shards])
        shard.write(shard_path(folder, number))
        manifest = manifest.counting(shard, is_whole=True)
    manifest.write(folder)
    return folder
