"""Whatever we answer, and OpenAI's client makes of it, may be sent back as part of the next request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ParsedChatCompletion
from openai.types.responses import ParsedResponse, Response
from pydantic import BaseModel, ValidationError

from orchestrator.http.bodies.chat import ChatBody
from orchestrator.http.bodies.responses import ResponseBody
from orchestrator.http.errors import ApiError
from orchestrator.http.items import messages_of
from orchestrator.http.prompts import template_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "assistant", "content": "hi", "refusal": None, "annotations": []},
    {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [CALL, CALL]},
    {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "reasoning_content": "so"},
]
ITEMS: list[dict[str, Any]] = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "so"}],
        "encrypted_content": None,
    },
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [
            {
                "type": "output_text",
                "text": "hi",
                "annotations": [],
                "logprobs": [{"token": "hi", "logprob": -1.0, "bytes": [104, 105], "top_logprobs": []}],
            }
        ],
    },
    {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "c", "name": "f", "arguments": "{}"},
]
DUMPS: dict[str, Callable[[Any], Any]] = {
    "model_dump": lambda found: found.model_dump(),
    "exclude_none": lambda found: found.model_dump(exclude_none=True),
    "exclude_unset": lambda found: found.model_dump(exclude_unset=True),
    "by_alias": lambda found: found.model_dump(by_alias=True),
    "json": lambda found: found.model_dump(mode="json"),
    "to_dict": lambda found: found.to_dict(),
    "api_names_unset": lambda found: found.to_dict(exclude_unset=False),
}


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
@pytest.mark.parametrize("kind", [ChatCompletion, ParsedChatCompletion])
@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_a_chat(message: dict[str, Any], kind: type[Any], dump: Callable[[Any], Any]) -> None:
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None, "message": message}
    found = kind.model_validate(
        {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).choices[0]
    sent = dump(found.message)
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "?"}, sent]})
    [_, rendered] = template_messages(body.messages)
    assert rendered["content"] == (message["content"] or "")
    assert rendered.get("reasoning_content") == message.get("reasoning_content")
    assert len(rendered.get("tool_calls", ())) == len(message.get("tool_calls", ()))


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
@pytest.mark.parametrize("kind", [Response, ParsedResponse])
def test_the_items_of_a_response(kind: type[Any], dump: Callable[[Any], Any]) -> None:
    found = kind.model_validate(
        {
            "id": "r",
            "object": "response",
            "created_at": 1,
            "model": "m",
            "output": ITEMS,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
    )
    sent = [dump(item) for item in found.output]
    body = ResponseBody.model_validate({"model": "m", "input": [{"role": "user", "content": "?"}, *sent]})
    [_, message] = messages_of(body)
    assert (message.thought, message.content) == ("so", "hi")
    assert [call.function.name for call in message.tool_calls or ()] == ["f"]


class Weather(BaseModel):
    a: int


def test_what_openais_client_has_parsed() -> None:
    parsed = ParsedChatCompletion[Weather].model_validate(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": MESSAGES[1]
                    | {
                        "parsed": {"a": 1},
                        "tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {"a": 1}}}],
                    },  # type: ignore[operator]
                }
            ],
        }
    )
    ChatBody.model_validate({"model": "m", "messages": [parsed.choices[0].message.model_dump()]})
    item = ITEMS[2] | {"parsed_arguments": {"a": 1}}
    ResponseBody.model_validate({"model": "m", "input": [item]})


def test_deltas_of_calls_keep_their_index() -> None:
    calls = [CALL | {"index": 0}]
    ChatBody.model_validate({"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": calls}]})


def test_what_an_unknown_field_asks_for_is_refused_still() -> None:
    message = ChatCompletionMessage.model_validate(MESSAGES[0]).model_dump()
    for fields, name in (({"audio": {"id": "a"}}, "audio"), ({"colour": "red"}, "colour")):
        with pytest.raises(ValidationError) as refused:
            ChatBody.model_validate({"model": "m", "messages": [message | fields]})
        assert refused.value.errors()[0]["ctx"]["name"] == name
    for item in (ITEMS[2] | {"async": True}, ITEMS[0] | {"encrypted_content": "x"}, ITEMS[0] | {"name": "f"}):
        with pytest.raises(ValidationError):
            ResponseBody.model_validate({"model": "m", "input": [item]})


def test_items_of_one_answer_are_one_message() -> None:
    user, output = {"role": "user", "content": "?"}, {"type": "function_call_output", "call_id": "c", "output": "42"}
    reasoning, message, call = ITEMS
    given = [user, reasoning, call, call, output, reasoning, message, message, user, reasoning]
    body = ResponseBody.model_validate({"model": "m", "input": given, "instructions": "be brief"})
    found = [(each.role, each.thought, each.content, len(each.tool_calls or ())) for each in messages_of(body)]
    assert found == [
        ("system", None, "be brief", 0),
        ("user", None, "?", 0),
        ("assistant", "so", "", 2),
        ("tool", None, "42", 0),
        ("assistant", "so", "hi", 0),
        ("assistant", None, "hi", 0),
        ("user", None, "?", 0),
        ("assistant", "so", "", 0),
    ]


def arguments_of(text: str) -> Any:
    call = CALL | {"function": {"name": "f", "arguments": text}}
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]})
    [message] = template_messages(body.messages)
    return message["tool_calls"][0]["function"]["arguments"]


def test_a_call_that_was_cut_off_may_be_sent_back() -> None:
    """Arguments are an object for the template; those that max_tokens cut off stay the text that they are."""
    whole = '{"a": [1, {"b": "ü \\" "}], "c": null}'
    assert arguments_of(whole) == json.loads(whole)
    assert [arguments_of(text) for text in ("", " ")] == [{}, {}]
    for length in range(1, len(whole)):
        assert arguments_of(whole[:length]) == whole[:length]


@pytest.mark.parametrize("text", ["[1]", "3", "a", '{"a": b}', "{}}", "[" * 100_000, '{"a":' * 100_000, "[1"])
def test_arguments_that_are_no_object_are_named(text: str) -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\].tool_calls\[0\].function.arguments is no"):
        arguments_of(text)
