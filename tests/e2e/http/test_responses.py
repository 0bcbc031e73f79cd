"""/v1/responses."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
from http_api import CHAT, GREEDY, MODEL, extra_field


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
        assert extra_field(found.usage, "speculation")["drafted"] > 0


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
