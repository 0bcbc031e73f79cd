"""Log probabilities in the shapes of all endpoints."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import CHAT, GREEDY, MODEL, PROMPT
from openai.types.chat import ChatCompletion
from openai.types.responses import ResponseOutputMessage, ResponseOutputText


def test_logprobs_of_completions_are_the_sdks_and_follow_the_text(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    from pilotfish import SamplingParams

    for count in (0, 3):
        found = client.completions.create(prompt=PROMPT, max_tokens=12, logprobs=count, **GREEDY).choices[0]
        with deployment.client() as sdk:
            expected = sdk.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=count))
        logprobs = found.logprobs
        assert logprobs is not None
        tokens = [token for piece in expected.pieces for token in piece.tokens]
        assert logprobs.token_logprobs == [token.logprobs.logprob for token in tokens if token.logprobs]
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        assert logprobs.top_logprobs is not None
        assert len(logprobs.tokens) == len(expected.token_ids) == len(logprobs.text_offset)
        assert sorted(logprobs.text_offset) == logprobs.text_offset
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
            assert top[token] == logprob == max(top.values())  # it is greedy
            assert len(top) == max(count, 1)
    stream = list(client.completions.create(prompt=PROMPT, max_tokens=12, logprobs=3, stream=True, **GREEDY))
    parts = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs is not None]
    assert [token for part in parts for token in part.tokens or ()] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or ()] == logprobs.text_offset


def test_logprobs_of_an_echoed_prompt_come_first(client: openai.OpenAI, http: httpx2.Client) -> None:
    found = client.completions.create(prompt=PROMPT, max_tokens=4, logprobs=2, echo=True, **GREEDY).choices[0]
    plain = client.completions.create(prompt=PROMPT, max_tokens=4, logprobs=2, **GREEDY).choices[0]
    assert found.logprobs is not None
    assert plain.logprobs is not None
    count = http.post("/tokenize", json={"prompt": PROMPT}).json()["count"]
    assert found.logprobs.tokens is not None
    assert "".join(found.logprobs.tokens[:count]) == PROMPT
    assert found.logprobs.tokens[count:] == plain.logprobs.tokens
    assert found.logprobs.token_logprobs is not None
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[count:] == plain.logprobs.token_logprobs
    assert found.logprobs.text_offset is not None
    assert found.logprobs.text_offset[count] == len(PROMPT)


def test_prompt_logprobs_are_as_vllm_gives_them(http: httpx2.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == len(ids)
    for token_id, each in zip(ids[1:], found[1:], strict=True):
        assert each[str(token_id)]["logprob"] <= 0
        assert sorted(entry["rank"] for entry in each.values() if entry["rank"]) == [1, 2]
    echoed = http.post("/v1/completions", json=body | {"echo": True, "logprobs": 0}).json()["choices"][0]
    expected = [each[str(token_id)]["logprob"] for token_id, each in zip(ids[1:], found[1:], strict=True)]
    assert echoed["logprobs"]["token_logprobs"][1 : len(ids)] == expected
    chat = {"model": MODEL, "messages": CHAT, "max_tokens": 2, "prompt_logprobs": 0}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_logprobs_of_chats_have_bytes_and_are_equal_without_a_draft(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"messages": CHAT, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, **GREEDY}
    found = client.chat.completions.create(**settings)
    ChatCompletion.model_validate(found.model_dump())
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    text = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert text.decode(errors="replace") == found.choices[0].message.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    plain = client.chat.completions.create(**settings, extra_body={"draft_length": 0}).choices[0].logprobs
    assert plain is not None
    assert plain.content is not None
    assert [token.token for token in plain.content] == [token.token for token in logprobs.content]
    for one, other in zip(plain.content, logprobs.content, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    chunks = list(client.chat.completions.create(**settings, stream=True))
    streamed = [token for chunk in chunks if (some := chunk.choices[0].logprobs) for token in some.content or ()]
    assert streamed == logprobs.content


def test_logprobs_end_with_the_text_that_a_stop_text_cuts(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=40, logprobs=0, **GREEDY).choices[0]
    stop = whole.text[6:9]
    found = client.completions.create(prompt=PROMPT, max_tokens=40, logprobs=0, stop=stop, **GREEDY)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert whole.logprobs is not None
    assert logprobs.tokens is not None
    assert whole.logprobs.tokens is not None
    assert found.choices[0].text == whole.text[: whole.text.index(stop)]
    assert logprobs.tokens == whole.logprobs.tokens[: len(logprobs.tokens)]
    assert found.usage is not None
    assert found.usage.completion_tokens == len(logprobs.tokens)


def test_responses_have_logprobs_for_those_who_include_them(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"input": "hello there", "max_output_tokens": 8, "top_logprobs": 2, **GREEDY}
    found = client.responses.create(include=["message.output_text.logprobs"], **settings)
    openai.types.responses.Response.model_validate(found.model_dump())
    [message] = found.output
    assert isinstance(message, ResponseOutputMessage)
    [part] = message.content
    assert isinstance(part, ResponseOutputText)
    assert part.logprobs is not None
    assert len(part.logprobs) == 8
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
