"""What a model's generation_config.json says of sampling, and who has the last word."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import grant
from tiny_models import byte_tokenizer, write_tokenizer

from orchestrator.admission import Asked, Defaults, admit
from orchestrator.capabilities import offer
from orchestrator.core.acceptance import Rule
from orchestrator.generation_config import sampling_defaults
from orchestrator.server import Orchestrator, OrchestratorSettings
from pilotfish.errors import InvalidArgumentError

QWEN = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": None, "repetition_penalty": 1.05,
    "max_new_tokens": 2048, "eos_token_id": [151645, 151643], "transformers_version": "4.37.0",
}  # fmt: skip
FOUND = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 2048}


def written(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def defaults(**sampling: float | int) -> Defaults:
    return Defaults(4, Rule.RATIO, frozenset({2}), sampling=sampling)


def test_what_samples_is_read_by_our_names(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(written(tmp_path, QWEN)) == FOUND


def test_a_request_has_the_last_word_then_the_model_then_the_server() -> None:
    [request] = admit("r", [1], defaults(**FOUND).fill(Asked(), room=50), defaults(**FOUND), vocab_size=9)
    params = request.params
    assert params.temperature == pytest.approx(0.7)
    assert params.top_p == pytest.approx(0.8)
    assert (params.top_k, params.min_p) == (20, 0.0)
    assert params.shaping.repetition_penalty == pytest.approx(1.05)
    assert params.max_tokens == 50  # as many as fit
    assert params.rule is Rule.RATIO  # it samples
    said = Asked(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, max_tokens=60)
    [request] = admit("r", [1], defaults(**FOUND).fill(said, room=50), defaults(**FOUND), vocab_size=9)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.0, 1.0, 0, 60)
    assert not params.is_shaped
    [request] = admit("r", [1], defaults().fill(Asked(), room=500), defaults(), vocab_size=9)
    assert (request.params.temperature, request.params.max_tokens, request.params.rule) == (0.0, 64, Rule.MATCH)


def test_capabilities_tell_them() -> None:
    fields = {field.name: field.default for field in offer("m", grant(8), (), defaults(**FOUND), True).fields}
    assert fields["temperature"] == "0.7, by the model's generation config"
    assert fields["max_tokens"] == "2048, by the model's generation config"
    assert fields["min_p"] == "0"
    plain = {field.name: field.default for field in offer("m", grant(8), (), defaults(), True).fields}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    assert [plain[name] for name in names] == ["0", "0", "1", "0", "1", "64"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be an integer"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"top_p": 1.5}, r"top_p is 1.5; must be in \(0, 1\]"),
        ({"max_new_tokens": 0}, "max_tokens is 0; must be at least 1"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
    ],
)
def test_what_is_no_default_is_told_at_the_start(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    folder = written(write_tokenizer(tmp_path / "model", byte_tokenizer()), content)
    settings: dict[str, Any] = {"model": folder, "listen": "127.0.0.1:0"}

    async def make(**more: str) -> None:  # grpc's channels want a loop that is closed again
        await Orchestrator(OrchestratorSettings(**settings, **more)).stop()

    with pytest.raises(InvalidArgumentError, match=f"generation_config.json: {message}.*--generation-config none"):
        asyncio.run(make())
    asyncio.run(make(generation_config="none"))
