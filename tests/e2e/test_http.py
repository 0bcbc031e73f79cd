"""The OpenAI-compatible API: OpenAI's own client, and bare HTTP at the edges."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from pilotfish.runtime.loading import LoadedModel
from pilotfish.steps import Grant, TargetResult, TargetStep
from target_svc.engine import TargetEngine

PROMPT = "the cat and the hat"
CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
MODEL = "tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def deployment(tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel) -> Iterator[Deployment]:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), http="127.0.0.1:0") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url(deployment)}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(deployment: Deployment) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        yield http


def url(deployment: Deployment) -> str:
    assert deployment.orchestrator.gateway is not None
    return f"http://{deployment.orchestrator.gateway.address}"


def error(answer: httpx2.Response) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's shape."""
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


def metric(http: httpx2.Client, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    total = 0.0
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def wait_until_idle(deployment: Deployment) -> None:
    """Until no request is left, and nothing is held."""
    deadline = time.monotonic() + 30
    while deployment.look(lambda scheduler: bool(scheduler.rows or scheduler.waiting)):
        assert time.monotonic() < deadline, "requests are still there"
        time.sleep(0.01)
    deployment.check_pools()


def events(text: str) -> list[Any]:
    """The data of a stream's events, the last of which says that it is done."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# Completions


def test_a_completion_is_what_the_sdk_gets(deployment: Deployment, client: openai.OpenAI) -> None:
    from pilotfish import SamplingParams

    found = client.completions.create(prompt=PROMPT, max_tokens=24, **GREEDY)
    with deployment.client() as sdk:
        expected = sdk.generate(PROMPT, SamplingParams(max_tokens=24))
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    Completion.model_validate(found.model_dump())
    usage = found.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens, len(expected.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == expected.usage.accepted > 0
    assert details.rejected_prediction_tokens == expected.usage.drafted - expected.usage.accepted
    speculation: Any = usage.speculation  # type: ignore[attr-defined]
    assert speculation["rounds"] == expected.usage.rounds
    assert speculation["accepted_per_position"] == list(expected.usage.accepted_per_position)


def test_every_form_of_a_prompt_gives_the_same_text(client: openai.OpenAI, http: httpx2.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    forms: list[Any] = [PROMPT, ids, [PROMPT], [ids], [PROMPT, PROMPT], [ids, ids, ids]]
    texts = [
        [choice.text for choice in client.completions.create(prompt=form, max_tokens=8, **GREEDY).choices]
        for form in forms
    ]
    assert [len(each) for each in texts] == [1, 1, 1, 1, 2, 3]
    assert len({text for each in texts for text in each}) == 1


def test_prompts_and_samples_are_choices_in_order(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "seed": 5, "extra_body": {"ignore_eos": True}}
    both = client.completions.create(prompt=["the cat", "a hat"], n=3, **settings)
    assert [choice.index for choice in both.choices] == list(range(6))
    one = client.completions.create(prompt="a hat", n=3, **settings)
    assert [choice.text for choice in both.choices[3:]] == [choice.text for choice in one.choices]
    assert len({choice.text for choice in one.choices}) == 3
    assert both.usage is not None
    assert one.usage is not None
    assert both.usage.completion_tokens == 36
    assert both.usage.prompt_tokens < 2 * one.usage.prompt_tokens + 6  # each prompt once


def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPT, max_tokens=6, **GREEDY).choices[0].text
    assert client.completions.create(prompt=PROMPT, max_tokens=6, echo=True, **GREEDY).choices[0].text == PROMPT + plain
    stream = client.completions.create(prompt=PROMPT, max_tokens=6, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT + plain


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    found = client.completions.create(prompt=PROMPT, model=MODEL, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.completion_tokens == 16
    assert found.choices[0].finish_reason == "length"


def test_every_field_that_shapes_the_text_does_what_it_does_over_grpc(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    from pilotfish import SamplingParams

    plain = client.completions.create(prompt=PROMPT, max_tokens=24, seed=1, model=MODEL).choices[0].text
    openais: list[dict[str, Any]] = [{"presence_penalty": 1.5}, {"frequency_penalty": 2.0}, {"logit_bias": {"70": 9.5}}]
    ours: list[dict[str, Any]] = [{"repetition_penalty": 3.0}, {"min_tokens": 24}, {"banned_token_ids": [70, 71]}]
    ours += [{"allowed_token_ids": [70, 71, 72]}, {"top_k": 2}, {"min_p": 0.5}]
    texts = []
    for fields, extra in [*((each, {}) for each in openais), *(({}, each) for each in ours)]:
        found = client.completions.create(prompt=PROMPT, max_tokens=24, seed=1, model=MODEL, extra_body=extra, **fields)
        params = {name: value for name, value in (fields | extra).items() if name != "logit_bias"}
        if "logit_bias" in fields:
            params["logit_bias"] = {70: 9.5}
        with deployment.client() as sdk:
            expected = sdk.generate(PROMPT, SamplingParams(max_tokens=24, temperature=1.0, seed=1, **params))
        assert found.choices[0].text == expected.text, params
        texts.append(found.choices[0].text)
    assert sum(text != plain for text in texts) > 5


def test_a_streamed_completion_adds_up(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=20, n=2, model=MODEL, seed=3)
    texts = {0: "", 1: ""}
    reasons: dict[int, str] = {}
    for chunk in client.completions.create(prompt=PROMPT, max_tokens=20, n=2, model=MODEL, seed=3, stream=True):
        Completion.model_validate(chunk.model_dump() | {"usage": None}) if chunk.choices[0].finish_reason else None
        assert chunk.usage is None
        [choice] = chunk.choices
        assert choice.index not in reasons
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}


def test_a_stop_text_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=40, **GREEDY).choices[0].text
    stop = whole[5:8]
    expected = whole[: whole.index(stop)]
    for stops in (stop, ["never there", stop]):
        found = client.completions.create(prompt=PROMPT, max_tokens=40, stop=stops, **GREEDY).choices[0]
        assert (found.text, found.finish_reason) == (expected, "stop")
    stream = client.completions.create(prompt=PROMPT, max_tokens=40, stop=stop, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_extensions_go_by_vllms_names(client: openai.OpenAI) -> None:
    extra = {"top_k": 3, "min_p": 0.01, "ignore_eos": True, "draft_length": 2, "acceptance": "block", "priority": -1}
    found = client.completions.create(prompt=PROMPT, max_tokens=12, model=MODEL, extra_body=extra)
    assert found.usage is not None
    speculation: Any = found.usage.speculation  # type: ignore[attr-defined]
    assert speculation["drafted"] > 0
    assert len(speculation["drafted_per_position"]) <= 2
    without = client.completions.create(prompt=PROMPT, model=MODEL, extra_body={"draft_length": 0})
    assert without.usage is not None
    assert without.usage.speculation["drafted"] == 0  # type: ignore[attr-defined]
    for other in ({"draft_length": "auto"}, {"draft_model": "tiny-draft"}, {"draft_model": "model"}):
        assert client.completions.create(prompt=PROMPT, model=MODEL, extra_body=other).choices


# Chat


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


# Log probabilities


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
    part: Any = found.output[0].content[0]  # type: ignore[union-attr]
    assert len(part.logprobs) == 8
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


# Responses


def test_a_response_is_the_chat_of_the_same_messages(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(messages=CHAT, max_tokens=16, **GREEDY)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hello there"}]}]
    for given in ("hello there", items):
        found = client.responses.create(
            instructions="be brief", input=given, max_output_tokens=16, metadata={"a": "b"}, store=False, **GREEDY
        )
        openai.types.responses.Response.model_validate(found.model_dump())
        assert found.output_text == chat.choices[0].message.content
        assert found.status == "incomplete"
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"
        assert found.metadata == {"a": "b"}
        assert found.usage is not None
        assert chat.usage is not None
        assert found.usage.total_tokens == chat.usage.total_tokens
        assert found.usage.speculation["drafted"] > 0  # type: ignore[attr-defined]


def test_a_streamed_response_adds_up(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"input": "hello there", "max_output_tokens": 16, **GREEDY}
    whole = client.responses.create(**settings)
    with client.responses.stream(**settings) as stream:  # OpenAI's client checks the order of events itself
        kinds, text, numbers = [], "", []
        for found in stream:
            kinds.append(found.type)
            numbers.append(found.sequence_number)
            if found.type == "response.output_text.delta":
                text += found.delta
    assert numbers == list(range(len(numbers)))
    assert text == whole.output_text
    order = list(dict.fromkeys(kinds))
    assert order == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_calls_and_their_outputs_are_messages(http: httpx2.Client) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    user = {"role": "user", "content": "what is it?"}
    body = {"model": MODEL, "input": [user, call, output], "max_output_tokens": 4, "temperature": 0}
    found = http.post("/v1/responses", json=body).json()
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        user,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
    expected = http.post("/v1/chat/completions", json=chat).json()
    assert found["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]


# Leaving


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_row(
    deployment: Deployment, http: httpx2.Client, path: str, streams: bool
) -> None:
    aborted, made = metric(http, "vllm:request_success_total", finished_reason="abort"), "vllm:generation_tokens_total"
    tokens = metric(http, made)
    body = {"model": MODEL, "max_tokens": 400, "ignore_eos": True, "n": 2, "draft_length": 0, "stream": streams}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": CHAT}
    with httpx2.Client(base_url=url(deployment), timeout=0.15) as leaver:
        if streams:
            with leaver.stream("POST", f"/v1/{path}", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx2.ReadTimeout):
                leaver.post(f"/v1/{path}", json=body)
    wait_until_idle(deployment)
    assert metric(http, "vllm:request_success_total", finished_reason="abort") == aborted + 2
    assert metric(http, made) < tokens + 800


# Errors


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"temprature": 1}, "temprature", "did you mean temperature?"),
    ("completions", {"prompt": []}, "prompt", "none empty"),
    ("completions", {"prompt": [1, "a"]}, "prompt", "none empty"),
    ("completions", {"prompt": None}, "prompt", "none empty"),
    ("completions", {"prompt": [[]]}, "prompt", "at least one token"),
    ("completions", {"prompt": [-1]}, "prompt[0]", "must be in [0, 280)"),
    ("completions", {"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ("completions", {"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
    ("completions", {"model": "\ud800"}, "model", "half of a surrogate pair"),
    ("completions", {"stop": ["a\udfff"]}, "stop", "half of a surrogate pair"),
    ("completions", {"a\ud800": 1}, "a\\ud800", "not a known field"),
    ("completions", {"model": 3}, "model", "it must be a text"),
    ("completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("completions", {"max_tokens": 1.5}, "max_tokens", "an integer"),
    ("completions", {"max_tokens": "5"}, "max_tokens", "an integer"),
    ("completions", {"max_tokens": 600}, "max_tokens", "fit after a prompt"),
    ("completions", {"temperature": -0.5}, "temperature", "must be in [0, inf)"),
    ("completions", {"temperature": True}, "temperature", "a number"),
    ("completions", {"temperature": float("nan")}, "temperature", "must be in [0, inf)"),
    ("completions", {"top_p": 0}, "top_p", "must be in (0, 1]"),
    ("completions", {"top_k": -2}, "top_k", "at least 0"),
    ("completions", {"min_p": 2}, "min_p", "must be in [0, 1]"),
    ("completions", {"seed": -1}, "seed", "2**64"),
    ("completions", {"seed": 2**64}, "seed", "2**64"),
    ("completions", {"n": 0}, "n", "at least 1"),
    ("completions", {"n": 129}, "n", "at most 128"),
    ("completions", {"stop": [""]}, "stop", "empty"),
    ("completions", {"stop": 3}, "stop", "a text or a list of texts"),
    ("completions", {"stop": ["x"] * 17}, "stop", "at most 16"),
    ("completions", {"stop_token_ids": [99999]}, "stop_token_ids", "must be in [0, 280)"),
    ("completions", {"best_of": 2}, "best_of", "not supported"),
    ("completions", {"suffix": "end"}, "suffix", "not supported"),
    ("completions", {"use_beam_search": True}, "use_beam_search", "not supported"),
    ("completions", {"acceptance": "typical"}, "acceptance", "'match', 'ratio' or 'block'"),
    ("completions", {"draft_length": 65}, "draft_length", "at most 64"),
    ("completions", {"timeout": 0}, "timeout", "must be in (0"),
    ("completions", {"stream_options": {}}, "stream_options", "stream: true only"),
    ("completions", {"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "not a known field"),
    ("completions", {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'user'"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "only text is read",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate pair"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x" * 600}]},
        "messages",
        "at most 511 fit this model",
    ),
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ("chat/completions", {"functions": [{}]}, "functions", "use tools"),
    ("chat/completions", {"modalities": ["audio"]}, "modalities", "only text"),
    ("completions", {"draft_model": "elsewhere"}, "draft_model", "this server has tiny-draft (model)"),
    ("completions", {"draft_length": "all"}, "draft_length", "an integer or auto"),
    ("completions", {"draft_length": True}, "draft_length", "an integer or auto"),
    ("chat/completions", {"tool_choice": {"type": "function"}}, "tool_choice", "a function by its name"),
    ("chat/completions", {"tool_choice": 3}, "tool_choice", "a function by its name"),
    ("chat/completions", {"tool_choice": "auto"}, "tool_choice", "with tools only"),
    (
        "chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "no place for them",
    ),
    ("completions", {"logprobs": 21}, "logprobs", "must be in [0, 20]"),
    ("completions", {"logprobs": True}, "logprobs", "an integer"),
    ("completions", {"prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "stream: false only"),
    ("completions", {"frequency_penalty": 3}, "frequency_penalty", "must be in [-2, 2]"),
    ("completions", {"repetition_penalty": 0}, "repetition_penalty", "must be in (0"),
    ("completions", {"min_tokens": 5}, "min_tokens", "at most max_tokens"),
    ("completions", {"logit_bias": {"7": 101}}, "logit_bias of token 7", "must be in [-100, 100]"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "goes with"),
    ("completions", {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "json_object"),
    ("completions", {"structured_outputs": {"json_object": True}, "min_tokens": 2}, "min_tokens", "json_object"),
    ("completions", {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not JSON"),
    ("completions", {"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ("completions", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
    ("responses", {"top_logprobs": 2}, "top_logprobs", "goes with include"),
    ("responses", {"input": []}, "input", "at least 1 item"),
    ("responses", {"input": None}, "input", "a list"),
    ("responses", {"input": [{"type": "reasoning"}]}, "input[0].type", "'function_call'"),
    ("responses", {"input": [{"role": "user"}]}, "input[0].content", "message has role, content"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ("responses", {"max_tokens": 5}, "max_tokens", "did you mean"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ("responses", {"background": True}, "background", "not supported"),
    ("responses", {"input": "x" * 600}, "input", "at most 511 fit this model"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"), REFUSED, ids=[f"{each[2]}-{i}" for i, each in enumerate(REFUSED)]
)
def test_what_is_wrong_is_named(
    http: httpx2.Client, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    match path:
        case "completions":
            body["prompt"] = PROMPT
        case "chat/completions":
            body["messages"] = CHAT
        case "responses":
            body |= {"input": PROMPT, "max_output_tokens": 4}
    if path == "responses" or "max_completion_tokens" in fields:
        del body["max_tokens"]
    content, headers = json.dumps(body | fields), {"Content-Type": "application/json"}
    answer = http.post(f"/v1/{path}", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    found = error(answer)
    assert found["param"] == param
    assert message in found["message"]
    assert found["type"] == "invalid_request_error"


def test_harmless_values_and_ignored_fields_pass(client: openai.OpenAI, http: httpx2.Client) -> None:
    plain = client.chat.completions.create(messages=CHAT, max_tokens=8, **GREEDY)
    ignored = {"user": "ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    harmless = {"modalities": ["text"], "functions": [], "n": None, "logit_bias": None, "stop": None, "tools": None}
    body = {"messages": CHAT, "max_tokens": 8, **GREEDY, **ignored, **harmless}
    found = http.post("/v1/chat/completions", json=body)
    assert found.json()["choices"][0]["message"]["content"] == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b'{"model": ', {}, 400, "the body is not JSON"),
        (b"\xff\xfe{}", {}, 400, "the body is not JSON"),
        (b"[1]", {}, 400, "no JSON object"),
        (b"", {}, 400, "the body is missing"),
        (b"[" * 100_000, {}, 400, "the body cannot be read"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "must be application/json"),
        (b"{" + b" " * (9 << 20) + b"}", {}, 413, "larger than 8388608 bytes"),
    ],
)
def test_a_body_that_is_none_is_refused(
    http: httpx2.Client, content: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json", **headers})
    assert answer.status_code == status
    assert message in error(answer)["message"]


@pytest.mark.parametrize("depth", [200, 700, 950])
def test_a_body_may_be_nested_deeply_and_no_deeper(http: httpx2.Client, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1, "user": ' + nested + b"}"
    answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    if depth == 200:
        assert answer.status_code == 200
    else:
        assert (answer.status_code, error(answer)["message"]) == (400, "user is nested too deeply")


def test_openais_client_knows_the_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x", stream=True)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")


def test_unknown_places_and_methods_are_named(http: httpx2.Client) -> None:
    answer = http.get("/v1/embeddings")
    assert answer.status_code == 404
    assert "/v1/chat/completions" in error(answer)["message"]
    answer = http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "does not take GET" in error(answer)["message"]


def test_a_deadline_is_408_and_frees_the_row(deployment: Deployment, http: httpx2.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "timeout": 0.001}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 408
    assert error(answer)["code"] == "timeout"
    assert answer.headers["x-should-retry"] == "false"
    wait_until_idle(deployment)


# Other endpoints


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "pilotfish")
    assert model.max_model_len == 512  # type: ignore[attr-defined]
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_tokens_there_and_back(http: httpx2.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "the cat é<|im_end|>", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["token_strs"][-3:] == ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert found["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "the cat é<|im_end|>"}
    chat = http.post("/tokenize", json={"messages": CHAT}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text.endswith("<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n")
    open_end = http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
    assert open_end["tokens"] == chat["tokens"][: open_end["count"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/detokenize", {"tokens": [1, 280]}, "tokens[1]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_tokens_that_are_none_are_named(http: httpx2.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert error(answer)["param"] == param


def test_metrics_count_what_was_served(deployment: Deployment, client: openai.OpenAI, http: httpx2.Client) -> None:
    names = {
        "prompt": "vllm:prompt_tokens_total",
        "completion": "vllm:generation_tokens_total",
        "drafts": "vllm:spec_decode_num_drafts_total",
        "drafted": "vllm:spec_decode_num_draft_tokens_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "per position": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "ended": "vllm:request_success_total",
        "hits": "vllm:prefix_cache_hits_total",
        "first": "vllm:time_to_first_token_seconds_count",
        "between": "vllm:inter_token_latency_seconds_count",
        "all": "vllm:e2e_request_latency_seconds_count",
    }
    before = {key: metric(http, name) for key, name in names.items()}
    usage = client.completions.create(prompt="a new prompt of some length", max_tokens=24, **GREEDY).usage
    assert usage is not None
    with deployment.client() as sdk:  # whichever protocol
        other = sdk.generate("a new prompt of some length").usage
    grown = {key: metric(http, name) - before[key] for key, name in names.items()}
    speculation: Any = usage.speculation  # type: ignore[attr-defined]
    assert grown["prompt"] == usage.prompt_tokens + other.prompt_tokens
    assert grown["completion"] == usage.completion_tokens + other.completion_tokens
    assert grown["drafted"] == speculation["drafted"] + other.drafted
    assert grown["accepted"] == grown["per position"] == speculation["accepted"] + other.accepted
    assert 0 < grown["drafts"] <= speculation["rounds"] + other.rounds
    assert grown["ended"] == grown["first"] == grown["all"] == 2
    assert grown["hits"] == other.cached_tokens + (usage.prompt_tokens_details.cached_tokens or 0)  # type: ignore[union-attr]
    assert grown["between"] > 0
    assert metric(http, "vllm:num_requests_running") == metric(http, "vllm:kv_cache_usage_perc") == 0
    assert metric(http, "pilotfish:draft_replicas") == 1


def test_metrics_do_not_count_what_was_refused(http: httpx2.Client) -> None:
    names = ("vllm:request_params_n_count", "vllm:request_success_total")
    before = [metric(http, name) for name in names]
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT}
    for refused in ({"temperature": -1}, {"structured_outputs": {"regex": "("}}):  # the latter by the target
        assert http.post("/v1/completions", json=body | refused).status_code == 400
    assert [metric(http, name) for name in names] == before


# Keys, limits, a target that is away


def test_keys(tiny_folder: Path, tiny_target: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# of ann\nsecret-2\n\nsecret-3\n")
    settings: dict[str, Any] = {"http": "127.0.0.1:0", "api_key": ["secret-1"], "api_key_file": file}
    with (
        Deployment(tiny_folder, tiny_target, **settings) as deployment,
        httpx2.Client(base_url=url(deployment)) as http,
    ):
        for key in ("secret-1", "secret-2", "secret-3"):
            with openai.OpenAI(base_url=f"{url(deployment)}/v1", api_key=key, max_retries=0) as client:
                assert client.completions.create(prompt="x", max_tokens=2, **GREEDY).choices
        with (
            openai.OpenAI(base_url=f"{url(deployment)}/v1", api_key="secret", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError) as refused,
        ):
            stranger.completions.create(prompt="x", **GREEDY)
        assert refused.value.code == "invalid_api_key"
        assert http.get("/health").status_code == 200
        for path in ("/metrics", "/v1/models", "/nowhere"):
            answer = http.get(path)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "wants an API key" in error(answer)["message"]
            assert http.get(path, headers={"Authorization": "Basic secret-1"}).status_code == 401
    assert "secret" not in caplog.text


class _Gated(TargetEngine):
    """A target that answers while its gate is open."""

    gate = threading.Event()

    def run(self, grant: Grant, step: TargetStep) -> TargetResult:
        assert self.gate.wait(60)
        return super().run(grant, step)


def test_too_many_at_once_are_429(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    def engine() -> TargetEngine:
        return _Gated(tiny_target, pages=256, page_size=16)

    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    settings: dict[str, Any] = {"http": "127.0.0.1:0", "http_max_requests": 3, "max_rows": 1, "max_waiting": 1}
    _Gated.gate.clear()
    with (
        Deployment(tiny_folder, engine, **settings) as deployment,
        httpx2.Client(base_url=url(deployment), timeout=60) as http,
        ThreadPoolExecutor() as pool,
    ):
        try:
            first = [pool.submit(http.post, "/v1/completions", json=body)]
            wait_for(lambda: deployment.look(lambda scheduler: len(scheduler.rows)) == 1)
            first.append(pool.submit(http.post, "/v1/completions", json=body))
            wait_for(lambda: deployment.look(lambda scheduler: len(scheduler.waiting)) == 1)
            full = http.post("/v1/completions", json=body)  # of the queue
            assert (full.status_code, error(full)["code"]) == (429, "rate_limit_exceeded")
            assert "1 requests are waiting" in error(full)["message"]
            pool.submit(http.post, "/tokenize", json={"prompt": "x"}).result()
            more = [pool.submit(http.post, "/v1/completions", json=body | {"prompt": ["a", "b"]}) for _ in range(4)]
            assert {answer.result().status_code for answer in more} == {429}
            assert int(full.headers["retry-after"]) > 0
            assert http.get("/health").status_code == 200
        finally:
            _Gated.gate.set()
        assert [answer.result().status_code for answer in first] == [200, 200]
        wait_until_idle(deployment)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_target_that_is_away_is_503(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    with (
        Deployment(tiny_folder, tiny_target, http="127.0.0.1:0", target_timeout_s=0.3) as deployment,
        httpx2.Client(base_url=url(deployment), timeout=60) as http,
    ):
        assert http.get("/health").json() == {"status": "ok", "model": MODEL, "draft_replicas": 0}
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            deployment.call(deployment.target.stop())
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert rest[-1]["error"]["code"] == "service_unavailable"  # too late for a status
        answer = http.get("/health")
        assert (answer.status_code, error(answer)["code"]) == (503, "service_unavailable")
        for streams in (False, True):
            answer = http.post("/v1/completions", json=body | {"stream": streams})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert "the target has been away" in error(answer)["message"]


def test_a_server_that_stops_tells_those_who_still_read(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True}
    with httpx2.Client(timeout=60) as http:
        with Deployment(tiny_folder, tiny_target, http="127.0.0.1:0") as deployment:
            assert http.get(f"{url(deployment)}/health").status_code == 200  # leaves an idle connection behind
            request = http.build_request("POST", f"{url(deployment)}/v1/completions", json=body)
            answer = http.send(request, stream=True)
            lines = answer.iter_lines()
            next(lines)
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        answer.close()
    assert rest[-1]["error"]["message"] == "the server is shutting down"
