"""Tokenizers of several families, end to end: text, log probabilities, grammars and stop texts agree on the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from deployment import Deployment
from http_api import events, url
from tiny_models import make_tiny_llama
from tiny_tokenizers import FAMILIES

from orchestrator.tokenizer import Tokenizer
from pilotfish import Client, SamplingParams
from pilotfish.runtime.loading import load_model

PROMPT = "the dog"
CHAT = [{"role": "user", "content": "the quick fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Köln"]}, "n": {"type": "boolean"}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Served:
    """A deployment of one family: its draft is the target's first layer."""

    name: str
    tokenizer: Tokenizer
    client: Client
    http: httpx2.Client


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "unigram", "wordpiece", "characters"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_tiny_llama(
        tmp_path_factory.mktemp("family"), layers=2, seed=5, sharpness=3.0, tokenizer=FAMILIES[request.param]()
    )
    target, draft = load_model(folder, dtype="float32"), load_model(folder, dtype="float32", layers=1)
    with (
        Deployment(folder, target, (draft,), http="127.0.0.1:0", name="tiny") as deployment,
        deployment.client() as client,
        httpx2.Client(base_url=url(deployment), timeout=60) as http,
    ):
        yield Served(request.param, Tokenizer(folder), client, http)


def post(served: Served, path: str, **body: Any) -> Any:
    answer = served.http.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    return events(answer.text) if body.get("stream") else answer.json()


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_log_probabilities_add_up_to_the_text(served: Served, stream: bool) -> None:
    for seed, stops in enumerate([[], [], [], [*range(40, 80)]]):
        settings: dict[str, Any] = {"messages": CHAT, "max_tokens": 40, "seed": seed, "logprobs": True}
        found = post(served, "chat/completions", stream=stream, stop_token_ids=stops, **settings)
        choices = [each["choices"][0] for each in found] if stream else [found["choices"][0]]
        text = "".join((each["delta"] if stream else each["message"]).get("content") or "" for each in choices)
        entries = [entry for each in choices if each["logprobs"] for entry in each["logprobs"]["content"]]
        assert len(entries) > (0 if stops else 3)
        data = b"".join(bytes(entry["bytes"] or ()) for entry in entries)
        assert data.decode(errors="replace") == text


def test_a_schema_is_followed(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        found = post(served, "chat/completions", messages=CHAT, max_tokens=300, seed=seed, response_format=form)
        [choice] = found["choices"]
        assert choice["finish_reason"] == "stop"
        answer = json.loads(choice["message"]["content"])
        assert answer["city"] in ("Rome", "Köln")
        assert isinstance(answer["n"], bool)


def test_stop_texts_may_be_special_tokens(served: Served) -> None:
    """Alone, and behind a text; whatever is drafted."""
    tool = served.tokenizer.encode("<|tool|>", add_special_tokens=False)[-1]
    often = {"logit_bias": {tool: 9.0}, "temperature": 1.0, "ignore_eos": True, "max_tokens": 60}
    for seed in range(3):
        free = served.client.generate(PROMPT, SamplingParams(seed=seed, **often))
        place = free.token_ids.index(tool)
        stopped = served.client.generate(PROMPT, SamplingParams(seed=seed, stop=["<|tool|>"], **often))
        detokenizer = served.tokenizer.detokenizer()
        assert stopped.text == "".join(map(detokenizer.push, free.token_ids[:place]))
        assert stopped.finish_reason == "stop"
        if not detokenizer.is_open:  # bytes of a character that the stop text breaks off are none of the text
            assert stopped.token_ids == free.token_ids[:place]


def test_an_echo_and_its_completion_are_the_text_of_all_tokens(served: Served) -> None:
    prompt = "the dog<|tool|> fox"
    found = post(served, "completions", prompt=prompt, max_tokens=12, temperature=0, echo=True, ignore_eos=True)
    written = served.client.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True, echo=True))
    assert written.prompt is not None
    assert found["choices"][0]["text"] == written.prompt.text + written.text
    ids = served.tokenizer.encode(prompt, add_special_tokens=False)
    assert written.prompt.text == served.tokenizer.decode(ids, skip_special_tokens=False)
