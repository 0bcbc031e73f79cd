"""The model's own sampling defaults, over HTTP and gRPC, and the setting that does without them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from deployment import Deployment
from http_api import CHAT, MODEL, PROMPT, url

from pilotfish import Client, SamplingParams
from pilotfish.runtime.loading import LoadedModel
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1.generation_pb2_grpc import GenerationServiceStub

CONFIG = {"eos_token_id": 0, "do_sample": True, "temperature": 5.0, "top_k": 1, "max_new_tokens": 9}
"""Sampling that is greedy, but for who names another top_k. Without an end token the text is as long as it may be."""


@pytest.fixture(scope="module")
def configured(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configured")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(tiny_folder / name, folder)
    (folder / "generation_config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module", params=["auto", "none"])
def deployment(
    request: pytest.FixtureRequest, configured: Path, tiny_target: LoadedModel
) -> Iterator[tuple[Deployment, bool]]:
    with Deployment(configured, tiny_target, http="127.0.0.1:0", generation_config=request.param) as deployment:
        yield deployment, request.param == "auto"


def test_the_model_says_what_a_request_does_not(deployment: tuple[Deployment, bool]) -> None:
    served, has_defaults = deployment
    with served.client() as client, httpx2.Client(base_url=url(served), timeout=60) as http:

        def text(path: str, prompt: dict[str, Any], **body: Any) -> str:
            answer = http.post(f"/v1/{path}", json={"model": MODEL, "ignore_eos": True, **prompt, **body}).json()
            if path == "responses":
                assert answer["temperature"] == body.get("temperature", CONFIG["temperature"] if has_defaults else 1)
                return str(answer["output"][0]["content"][0]["text"])
            [choice] = answer["choices"]
            return str(choice["text"] if path == "completions" else choice["message"]["content"])

        def greedy(prompt: Any, count: int) -> str:
            return client.generate(prompt, SamplingParams(max_tokens=count, ignore_eos=True)).text

        chat, most = client.chat(CHAT, SamplingParams(max_tokens=9, ignore_eos=True)).text, {"max_tokens": 9}
        written = {
            "completions": (text("completions", {"prompt": PROMPT}, seed=1, **most), greedy(PROMPT, 9)),
            "chat": (text("chat/completions", {"messages": CHAT}, seed=1, **({} if has_defaults else most)), chat),
            "responses": (
                text("responses", {"input": CHAT}, **({} if has_defaults else {"max_output_tokens": 9})),
                chat,
            ),
        }
        assert {name: found == expected for name, (found, expected) in written.items()} == dict.fromkeys(
            written, has_defaults
        )
        said = text("completions", {"prompt": PROMPT}, seed=1, top_k=0, temperature=5.0, **most)
        assert said != greedy(PROMPT, 9)
        assert text("completions", {"prompt": PROMPT}, temperature=0, top_k=0, max_tokens=12) == greedy(PROMPT, 12)
        assert bare(served, client) == (9 if has_defaults else 64)
        capabilities = {field.name: field.default for field in client.capabilities().fields}
        assert capabilities["temperature"] == ("5, by the model's generation config" if has_defaults else "0")


def bare(served: Deployment, client: Client) -> int:
    """Tokens of a call over gRPC that names nothing but its prompt; the text is greedy in any case."""
    with grpc.insecure_channel(served.address) as channel:
        request = pb.GenerateRequest(text=PROMPT, sampling=pb.SamplingParams(ignore_eos=True))
        pieces = [each.piece for each in GenerationServiceStub(channel).Generate(request) if each.HasField("piece")]
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    assert tuple(ids) == client.generate(PROMPT, SamplingParams(max_tokens=len(ids), ignore_eos=True)).token_ids
    return len(ids)


def test_a_chat_ends_on_the_models_end_token_and_the_tokenizers(
    deployment: tuple[Deployment, bool], configured: Path
) -> None:
    """generation_config.json names <|endoftext|>, the tokenizer <|im_end|>; neither has text."""
    served, _ = deployment
    with served.client() as client:
        for end in (0, 2):
            answer = client.chat(CHAT, SamplingParams(max_tokens=30, logit_bias={end: 90.0}, min_tokens=3))
            assert answer.token_ids[-1] == end
            assert len(answer.token_ids) == 4
            assert answer.finish_reason == "stop"
            assert "<|" not in answer.text
