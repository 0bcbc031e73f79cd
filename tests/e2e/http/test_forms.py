"""Forms of the text and calls of tools over HTTP: random models that could write anything write just what they must."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import chat_choice, url
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from tiny_models import make_tiny_llama

from pilotfish.runtime.loading import LoadedModel, load_model

MODEL = "tools"
CHAT: list[Any] = [{"role": "user", "content": "what is the weather?"}]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}CALL {{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Ulm", "Oslo"]},
        "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "maxProperties": 0}}},
]


def make_deployment(folder: Path, template: str) -> Deployment:
    """A random model that takes tools, and a draft that is most of it."""
    make_tiny_llama(folder, layers=4, seed=1, max_position_embeddings=2048)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    target: LoadedModel = load_model(folder, dtype="float32", name=MODEL)
    draft = load_model(folder, dtype="float32", layers=3, name="draft")
    return Deployment(folder, target, (draft,), pages=1024, http="127.0.0.1:0")


@pytest.fixture(scope="module", params=["hermes", "bare"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    template = TEMPLATE.replace("CALL", "<tool_call>") if request.param == "hermes" else TEMPLATE
    with make_deployment(tmp_path_factory.mktemp("tools"), template) as deployment:
        yield deployment


def fits(text: str) -> bool:
    """Whether a text follows SCHEMA."""
    found = json.loads(text)
    return (
        found.keys() == {"city", "days"}
        and found["city"] in ("Ulm", "Oslo")
        and len(found["days"]) <= 3
        and set(found["days"]) <= {1, 2}
    )


# Forms


def test_a_json_schema_is_followed_in_all_endpoints(client: openai.OpenAI) -> None:
    class Forecast(BaseModel):
        city: str
        days: list[int]

    chat_format: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "response_format": chat_format, "seed": seed}
        whole = client.chat.completions.create(**settings)
        assert whole.choices[0].finish_reason == "stop"
        assert fits(whole.choices[0].message.content or "")
        Forecast.model_validate_json(whole.choices[0].message.content or "")
        stream = client.chat.completions.create(**settings, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content
    completion = client.completions.create(
        model=MODEL, prompt="x", max_tokens=200, extra_body={"response_format": chat_format}
    )
    assert fits(completion.choices[0].text)
    response_format: Any = {"format": {"type": "json_schema", "name": "forecast", "schema": SCHEMA}}
    response = client.responses.create(model=MODEL, input="what is the weather?", text=response_format)
    assert response.status == "completed"
    assert fits(response.output_text)


def test_openais_client_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        sunny: bool
        city: Literal["Ulm", "Oslo"]

    found = client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Answer, seed=1, max_tokens=400)
    assert isinstance(found.choices[0].message.parsed, Answer)
    parsed = client.responses.parse(model=MODEL, input="x", text_format=Answer, max_output_tokens=400)
    assert isinstance(parsed.output_parsed, Answer)


def test_every_other_form_is_followed(client: openai.OpenAI) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": "[ab]{3}-[0-9]+"}, r"[ab]{3}-[0-9]+"),
        ({"choice": ["yes", "no", 'say "no"\n']}, r'yes|no|say "no"\n'),
        ({"grammar": 'root ::= "a" root | "b"'}, r"a*b"),
        ({"json": json.dumps({"type": "boolean"})}, r"true|false"),
    ]
    for form, pattern in forms:
        for seed in range(3):
            extra = {"structured_outputs": form}
            found = client.completions.create(model=MODEL, prompt="x", max_tokens=60, seed=seed, extra_body=extra)
            choice = found.choices[0]
            if choice.finish_reason == "stop":
                assert re.fullmatch(pattern, choice.text), (form, choice.text)
            else:
                assert "regex" in form or "grammar" in form  # they may go on for ever
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "seed": 3, "max_tokens": 300}
    found_chat = client.chat.completions.create(**settings, response_format={"type": "json_object"})
    text = found_chat.choices[0].message.content or ""
    assert text.startswith("{")
    if found_chat.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= nowhere"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_form_that_is_none_fails_its_own_request_by_name(
    deployment: Deployment, fields: dict[str, Any], param: str
) -> None:
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        for streams in (False, True):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 4, "stream": streams}
            answer = http.post("/v1/completions", json=body | fields)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == param, error
        assert http.post("/v1/completions", json=body | {"stream": False}).status_code == 200


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}}}
UNIQUE_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": UNIQUE}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE, "strict": True}}},
            "response_format.json_schema.schema",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE}}, "tools": TOOLS},
            "response_format.json_schema.schema",
        ),
        ("chat/completions", {"structured_outputs": {"json": UNIQUE}}, "structured_outputs.json"),
        ("chat/completions", {"tools": [*TOOLS, UNIQUE_TOOL], "tool_choice": "required"}, "tools"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": UNIQUE}}}, "text.format.schema"),
        ("responses", {"tools": [{"type": "function", **UNIQUE_TOOL["function"]}], "tool_choice": "required"}, "tools"),
    ],
)
def test_a_schema_that_is_not_kept_to_is_refused_by_keyword_and_path(
    path: str, fields: dict[str, Any], param: str, deployment: Deployment
) -> None:
    asked = {"model": MODEL, **({"input": "x"} if path == "responses" else {"messages": CHAT})}
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        answer = http.post(f"/v1/{path}", json=asked | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param} at ")
    assert "#/properties/a/uniqueItems is True; a grammar does not keep to it" in error["message"]


def test_strict_false_leaves_out_what_is_not_kept_to(client: openai.OpenAI) -> None:
    chat_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE, "strict": False}}
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "seed": 1, "max_tokens": 300}
    for seed in range(3):
        found = client.chat.completions.create(**settings | {"seed": seed}, response_format=chat_format)
        if found.choices[0].finish_reason == "stop":
            value = json.loads(found.choices[0].message.content or "")
            assert value.keys() <= {"a"}
            assert set(value.get("a", [])) <= {1}
    tool: Any = {"type": "function", "function": UNIQUE_TOOL["function"] | {"strict": False}}
    called = client.chat.completions.create(**settings, tools=[tool], tool_choice="required")
    assert called.choices[0].message.tool_calls


def test_sixteen_at_once_all_write_json(deployment: Deployment) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        form: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}
        settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "response_format": form, "seed": seed}
        stream = await client.chat.completions.create(**settings, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url(deployment)}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    texts = asyncio.run(ask_all())
    assert all(map(fits, texts))
    assert len(set(texts)) > 4


# Tools


def test_the_model_is_told_of_tools_and_calls(deployment: Deployment) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        ids = http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '"name": "weather", "description": "Tells it."' in text
    assert '{"name": "weather", "arguments": {"city": "Ulm"}}' in text
    assert "<|im_start|>tool\n42<|im_end|>" in text


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_a_call_that_must_come_comes_and_streams(client: openai.OpenAI, choice: str) -> None:
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    names = set()
    for seed in range(4):
        settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "tool_choice": named}
        settings |= {"seed": seed, "parallel_tool_calls": False, "max_tokens": 300}
        whole = client.chat.completions.create(**settings)
        ChatCompletion.model_validate(whole.model_dump())
        message = whole.choices[0].message
        assert message.content is None
        assert whole.choices[0].finish_reason == "tool_calls"
        [call] = message.tool_calls or []
        assert call.type == "function"
        assert fits(call.function.arguments) if call.function.name == "weather" else call.function.arguments == "{}"
        names.add(call.function.name)
        again = chat_choice(client, settings, streams=True)
        assert again.finish_reason == "tool_calls"
        [streamed] = again.message.tool_calls or []
        assert streamed.function.name == call.function.name
        assert streamed.function.arguments == call.function.arguments
    assert names <= ({"weather", "stop"} if choice == "required" else {"weather"})


def test_arguments_stream_in_pieces(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=choice, stream=True, seed=2, max_tokens=300
    )
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].id
    assert calls[0].function is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("weather", "")
    assert len(calls) > 2
    assert fits("".join(call.function.arguments or "" for call in calls if call.function))


def test_calls_where_the_model_is_free_are_told_from_text(client: openai.OpenAI, deployment: Deployment) -> None:
    is_hermes = "<tool_call>" in deployment.orchestrator._tokenizer.template_source(True)
    call = '{"name": "stop", "arguments": {}}'
    written = f"Well.\n<tool_call>\n{call}\n</tool_call>" if is_hermes else call
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        [first, *_] = http.post("/tokenize", json={"prompt": written}).json()["tokens"]
    # A form and a bias have the model write just that, as a form beside tools is of text that may be a call, too.
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS[1:], "max_tokens": 200}
    settings |= {"logit_bias": {str(first): 99}, "extra_body": {"structured_outputs": {"choice": [written]}}}
    for streams in (False, True):
        choice = chat_choice(client, settings, streams=streams)
        if is_hermes:
            assert choice.message.content == "Well."
        assert choice.finish_reason == "tool_calls"
        [found] = choice.message.tool_calls or []
        assert (found.function.name, found.function.arguments) == ("stop", "{}")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**settings | {"extra_body": {"structured_outputs": {"structural_tag": "{}"}}})
    assert refused.value.param == "structured_outputs.structural_tag"


TWO_CALLS = {
    "hermes": (
        "Say <tool_call>.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "</tool_call>"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}\n</tool_call>'
    ),
    "bare": (
        ' {"name": "weather", "parameters": {"city": "</tool_call>"}}; '
        '{"name": "weather", "parameters": "{\\"city\\": \\"Ulm\\"}"}'
    ),
}


@pytest.mark.parametrize("parallel", [None, True, False])
def test_two_calls_in_one_answer_are_two(client: openai.OpenAI, deployment: Deployment, parallel: bool | None) -> None:
    is_hermes = "<tool_call>" in deployment.orchestrator._tokenizer.template_source(True)
    written = TWO_CALLS["hermes" if is_hermes else "bare"]
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        [first, *_] = http.post("/tokenize", json={"prompt": written[0]}).json()["tokens"]
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS[:1], "max_tokens": 400}
    settings |= {"logit_bias": {str(first): 99}, "extra_body": {"structured_outputs": {"choice": [written]}}}
    settings |= {} if parallel is None else {"parallel_tool_calls": parallel}
    for streams in (False, True):
        message = chat_choice(client, settings, streams=streams).message
        assert (message.content or "") == ("Say <tool_call>." if is_hermes else "")
        found = [json.loads(call.function.arguments) for call in message.tool_calls or ()]
        assert found == [{"city": "</tool_call>"}, {"city": "Ulm"}][: 1 if parallel is False else 2]
        # The conversation goes on with what OpenAI's client makes of the answer.
        results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
        for dump in (message.model_dump(), message.model_dump(exclude_none=True), message.to_dict()):
            client.chat.completions.create(model=MODEL, messages=[*CHAT, dump, *results], max_tokens=1)


def test_several_calls_may_have_to_come(client: openai.OpenAI, deployment: Deployment) -> None:
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        ids = [http.post("/tokenize", json={"prompt": separator}).json()["tokens"][0] for separator in ";\n"]
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS[1:], "tool_choice": "required"}
    settings |= {"logit_bias": dict.fromkeys(map(str, ids), 50), "max_tokens": 200}  # it goes on rather than to end
    found = client.chat.completions.create(**settings).choices[0].message.tool_calls or ()
    assert len(found) > 1
    assert {call.function.name for call in found if call.type == "function"} == {"stop"}
    assert len({call.id for call in found}) == len(found)
    one = client.chat.completions.create(**settings, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls or ()) == 1
    assert one.finish_reason == "tool_calls"


def test_a_call_that_was_cut_off_may_be_sent_back(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "tools": TOOLS[:1], "tool_choice": "required", "seed": 1}
    for max_tokens in (45, 55):
        choice = client.chat.completions.create(messages=CHAT, max_tokens=max_tokens, **settings).choices[0]
        assert choice.finish_reason == "length"
        [call] = choice.message.tool_calls or ()
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "cut"}
        messages: list[Any] = [*CHAT, choice.message.model_dump(), result]
        client.chat.completions.create(messages=messages, max_tokens=1, **settings)


def test_a_strict_tool_is_called_rightly_or_not_at_all(client: openai.OpenAI) -> None:
    strict: list[Any] = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    for seed in range(3):
        found = client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=strict, seed=seed, max_tokens=60
        ).choices[0]
        assert all(fits(call.function.arguments) for call in found.message.tool_calls or () if call.type == "function")


def test_tools_and_a_form_give_either(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA}}
    for seed in range(4):
        found = client.chat.completions.create(
            model=MODEL, messages=CHAT, tools=TOOLS, response_format=form, seed=seed, max_tokens=300
        ).choices[0]
        if found.finish_reason == "stop":
            assert fits(found.message.content or "")
        elif found.finish_reason == "tool_calls":
            assert found.message.tool_calls


@pytest.mark.parametrize("dump", ["model_dump", "exclude_none", "by_alias", "to_dict"])
def test_the_items_of_a_response_may_be_sent_back(client: openai.OpenAI, dump: str) -> None:
    tools: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
    question: Any = {"role": "user", "content": "what is the weather?"}
    settings: dict[str, Any] = {"model": MODEL, "tools": tools, "extra_body": {"seed": 5}}
    first = client.responses.create(input=[question], tool_choice="required", max_output_tokens=300, **settings)
    dumps = {
        "model_dump": lambda item: item.model_dump(),
        "exclude_none": lambda item: item.model_dump(exclude_none=True),
        "by_alias": lambda item: item.model_dump(by_alias=True),
        "to_dict": lambda item: item.to_dict(),
    }
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    items: list[Any] = [question, *map(dumps[dump], first.output), *results]
    second = client.responses.create(input=items, tool_choice="none", max_output_tokens=4, **settings)
    assert second.usage is not None
    assert first.usage is not None
    items += [*map(dumps[dump], second.output), question]
    third = client.responses.create(input=items, tool_choice="none", max_output_tokens=4, **settings)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_responses_call_tools_in_items(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
    settings: dict[str, Any] = {"model": MODEL, "input": "what is the weather?", "tools": tools}
    settings |= {"tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 300}
    settings["extra_body"] = {"seed": 5}
    whole = client.responses.create(**settings)
    openai.types.responses.Response.model_validate(whole.model_dump())
    [call] = whole.output
    assert call.type == "function_call"
    assert fits(call.arguments)
    with client.responses.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        [again] = stream.get_final_response().output
    assert again.type == "function_call"
    assert (again.name, again.arguments) == ("weather", call.arguments)
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
