"""/v1/chat/completions, by OpenAI's own client and on the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
from deployment import Deployment, wait_until_idle
from http_api import CHAT, GREEDY, MODEL, events, url
from openai.types.chat import ChatCompletion, ChatCompletionChunk


def test_a_chat_completion_is_what_the_sdk_gets(deployment: Deployment, client: openai.OpenAI) -> None:
    from pilotfish import SamplingParams

    found = client.chat.completions.create(messages=CHAT, max_completion_tokens=24, **GREEDY)
    with deployment.client() as sdk:
        expected = sdk.chat(CHAT, SamplingParams(max_tokens=24))
    ChatCompletion.model_validate(found.model_dump())
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found._request_id == found.id


def test_a_streamed_chat_starts_with_the_role_and_adds_up(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"messages": CHAT, "max_tokens": 20, "n": 2, "model": MODEL, "seed": 11}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **settings))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    assert len({chunk.id for chunk in chunks}) == 1
    last = chunks.pop()
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert mine[0].delta.content == ""
        assert all(each.delta.role is None for each in mine[1:])
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert [each.finish_reason for each in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason


def test_a_stream_is_done_on_the_wire(http: httpx2.Client) -> None:
    body = {"messages": CHAT, "max_tokens": 5, "model": MODEL, "stream": True, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    chunks = events(answer.text)
    assert all("usage" not in chunk for chunk in chunks)
    with_usage = events(http.post("/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}).text)
    assert [chunk["usage"] for chunk in with_usage[:-1]] == [None] * (len(with_usage) - 1)
    assert with_usage[-1]["usage"]["completion_tokens"] == 5


def test_content_may_be_parts_and_developers_are_the_system(client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "hello there"}], "name": "ann"},
    ]
    texts = [
        client.chat.completions.create(messages=messages, max_tokens=8, **GREEDY).choices[0].message.content
        for messages in (CHAT, parts)
    ]
    assert texts[0] == texts[1]


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(messages=CHAT, extra_body={"ignore_eos": True}, **GREEDY)
    assert found.usage is not None
    assert found.usage.total_tokens == 512  # of the tiny models
    assert found.choices[0].finish_reason == "length"


def test_rounds_are_shown_to_those_who_ask(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"messages": CHAT, "max_tokens": 20, "stream": True, **GREEDY}
    plain = list(client.chat.completions.create(**settings))
    assert not any(hasattr(chunk.choices[0], "round") for chunk in plain)
    shown = list(client.chat.completions.create(**settings, extra_body={"show_tokens": True}))
    rounds: list[Any] = [getattr(chunk.choices[0], "round", None) for chunk in shown]
    tokens = [token for each in rounds if each for token in each["tokens"]]
    assert len(tokens) == 20
    assert {token["kind"] for token in tokens} <= {"accepted", "recovered", "bonus"}
    assert "".join(token["text"] for token in tokens) == "".join(
        chunk.choices[0].delta.content or "" for chunk in plain
    )
    assert all(each["times"]["target_us"] > 0 for each in rounds if each)
    for each in rounds:
        if each is None or each["proposal"] is None:
            assert each is None or each["drafted"] == 0
            continue
        nodes, kept = each["proposal"]["nodes"], each["proposal"]["accepted"]
        assert len(nodes) >= each["drafted"] > 0
        assert len(kept) == each["accepted"]
        accepted = [token["id"] for token in each["tokens"] if token["kind"] == "accepted"]
        assert [nodes[node]["id"] for node in kept] == accepted
        assert [nodes[node]["parent"] for node in kept] == [-1, *kept][: len(kept)]


async def ask_at_once(deployment: Deployment, count: int) -> list[str]:
    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        settings: dict[str, Any] = {"messages": CHAT, "model": MODEL, "max_tokens": 24, "seed": index}
        if index % 2:
            answer = await client.chat.completions.create(**settings)
            return answer.choices[0].message.content or ""
        stream = await client.chat.completions.create(**settings, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with openai.AsyncOpenAI(base_url=f"{url(deployment)}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(one(client, index) for index in range(count)))


def test_sixteen_at_once_get_what_each_gets_alone(deployment: Deployment, client: openai.OpenAI) -> None:
    together = asyncio.run(ask_at_once(deployment, 16))
    alone = [
        client.chat.completions.create(messages=CHAT, model=MODEL, max_tokens=24, seed=index).choices[0].message.content
        for index in range(16)
    ]
    assert together == alone
    wait_until_idle(deployment)
