"""Reasoning apart from the answer, over HTTP: random models that write just what they must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import MODEL, chat_choice, extra_field
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import ValidationError
from tiny_models import byte_tokenizer, make_tiny_llama, write_tokenizer
from tokenizers import AddedToken

from orchestrator.http.settings import HttpSettings
from pilotfish.runtime.loading import load_model

CHAT: list[Any] = [{"role": "user", "content": "why <think>?"}]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
END_OF_THOUGHT = 281
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


@pytest.fixture(scope="module", params=["plain", "special"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Its marks are tokens of their own, special ones or not."""
    folder, tokenizer = tmp_path_factory.mktemp("reasoning"), byte_tokenizer()
    make_tiny_llama(folder, layers=3, seed=1, padded_vocab=288, max_position_embeddings=2048)
    special = request.param == "special"
    marks = [AddedToken(mark, special=special, normalized=False) for mark in ("<think>", "</think>", "<tool_call>")]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(marks)
    write_tokenizer(folder, tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    model = load_model(folder, dtype="float32", name=MODEL)
    with Deployment(folder, model, (model,), pages=1024, http="127.0.0.1:0", reasoning_parser="qwen3") as deployment:
        yield deployment


def writes(text: str, **fields: Any) -> dict[str, Any]:
    """Fields that make the model write a text: a structural tag is of the whole answer."""
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
    return {"structured_outputs": {"structural_tag": json.dumps(form)}, **fields}


CASES: list[tuple[str, dict[str, Any], str | None, str]] = [
    # what is written, fields, reasoning, answer
    ("<think>\nso be it\n</think>\n\nHi.", {}, "so be it", "Hi."),
    ("so be it\n</think>\n\nHi.", {"chat_template_kwargs": {"enable_thinking": True}}, "so be it", "Hi."),
    ("Hi.", {"chat_template_kwargs": {"enable_thinking": False}}, None, "Hi."),
    ("Hi </think>", {}, None, "Hi </think>"),
    ("<think></think>Hi.", {}, None, "Hi."),
    ("<think>on and on", {}, "on and on", ""),
]


@pytest.mark.parametrize(("written", "fields", "thought", "answer"), CASES)
def test_chats_give_reasoning_beside_the_content(
    client: openai.OpenAI, written: str, fields: dict[str, Any], thought: str | None, answer: str
) -> None:
    extra = writes(written, **fields)
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "n": 2, "extra_body": extra}
    found = client.chat.completions.create(**settings, logprobs=True)
    ChatCompletion.model_validate(found.model_dump())
    tokens = 0
    for choice in found.choices:
        assert choice.message.content == answer
        assert extra_field(choice.message, "reasoning_content") == thought
        assert choice.logprobs is not None
        texts = [token.token for token in choice.logprobs.content or ()]
        assert "".join(texts).removesuffix("<|im_end|>") == written
        ends = [place for place, text in enumerate(texts, start=1) if "".join(texts[:place]).endswith("</think>")]
        is_thought = written.startswith("<think>") or thought
        tokens += (ends[0] if ends else sum(text != "<|im_end|>" for text in texts)) if is_thought else 0
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    assert (
        tokens <= (found.usage.completion_tokens_details.reasoning_tokens or 0) <= tokens + 2
    )  # end tokens of cut ones
    content, reasoning = ["", ""], ["", ""]
    for chunk in client.chat.completions.create(**settings, stream=True):
        [choice] = chunk.choices
        content[choice.index] += choice.delta.content or ""
        more = (choice.delta.model_extra or {}).get("reasoning_content") or ""
        assert not more or not content[choice.index]
        reasoning[choice.index] += more
    assert content == [answer] * 2
    assert reasoning == [thought or ""] * 2


@pytest.mark.parametrize(("written", "fields", "thought", "answer"), CASES)
def test_responses_have_reasoning_as_an_item(
    client: openai.OpenAI, written: str, fields: dict[str, Any], thought: str | None, answer: str
) -> None:
    extra = writes(written, **fields)
    settings: dict[str, Any] = {"model": MODEL, "input": CHAT, "temperature": 0, "extra_body": extra}
    found = client.responses.create(**settings, include=["message.output_text.logprobs"])
    Response.model_validate(found.model_dump())
    kinds = ["reasoning"] * (thought is not None) + ["message"] * (thought is None or bool(answer))
    assert [item.type for item in found.output] == kinds
    assert found.output_text == answer
    if thought is not None:
        [item] = [item for item in found.output if item.type == "reasoning"]
        assert [part.text for part in item.content or ()] == [thought]
        assert item.summary == []
        assert found.usage is not None
        assert found.usage.output_tokens_details.reasoning_tokens > 0
    for item in found.output:
        if item.type == "message":
            [part] = item.content
            assert part.type == "output_text"
            logprobs = [logprob.token for logprob in part.logprobs or ()]
            assert "".join(logprobs).removesuffix("<|im_end|>") == answer
    with client.responses.stream(**settings) as stream:  # OpenAI's client checks the order of events itself
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == (thought or "")
    assert final.output_text == answer
    assert [item.type for item in final.output] == kinds
    order = list(dict.fromkeys(event.type for event in events))
    if thought is not None:
        assert order[2:7] == [
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
        ]


def test_a_conversation_with_reasoning_goes_on(client: openai.OpenAI, http: httpx2.Client) -> None:
    extra = writes("<think>so</think>Hi.")
    first = client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra)
    messages = [*CHAT, first.choices[0].message.model_dump(), CHAT[0]]
    told = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": told}).json()["prompt"]
    assert "assistant\n<think>so</think>Hi.<|im_end|>" in text
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    response = client.responses.create(
        model=MODEL, input=CHAT, include=["reasoning.encrypted_content"], store=False, extra_body=extra
    )
    assert [getattr(item, "encrypted_content", None) for item in response.output] == [None, None]
    assert not any(part.logprobs for item in response.output if item.type == "message" for part in item.content)
    items: list[Any] = [*CHAT, *(item.model_dump() for item in response.output), CHAT[0]]
    after = client.responses.create(model=MODEL, input=items, max_output_tokens=1)
    assert again.usage is not None
    assert after.usage is not None
    assert again.usage.prompt_tokens == after.usage.input_tokens == len(told)


def test_an_answer_begun_within_its_reasoning_goes_on_there(client: openai.OpenAI) -> None:
    for begun, thought, answer in (("<think>Well", ", so", "Hi."), ("Well", None, ", so</think>Hi.")):
        messages = [*CHAT, {"role": "assistant", "content": begun}]
        extra = writes(", so</think>Hi.", continue_final_message=True)
        found = client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)
        assert found.choices[0].message.content == answer
        assert extra_field(found.choices[0].message, "reasoning_content") == thought


def test_reasoning_is_left_out_where_it_is_not_wanted(client: openai.OpenAI) -> None:
    extra = writes("<think>so</think>Hi.", include_reasoning=False)
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "extra_body": extra}
    message = client.chat.completions.create(**settings).choices[0].message
    assert (message.content, extra_field(message, "reasoning_content")) == ("Hi.", None)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**settings, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Hi."
    assert not any(delta.model_extra for delta in deltas)


def test_marks_are_read_even_if_they_are_special_tokens(client: openai.OpenAI) -> None:
    extra = {"allowed_token_ids": [END_OF_THOUGHT], "chat_template_kwargs": {"enable_thinking": True}}
    found = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, extra_body=extra)
    assert found.choices[0].message.content == "</think>" * 2  # behind the first
    response = client.responses.create(model=MODEL, input=CHAT, max_output_tokens=3, extra_body=extra)
    assert response.output_text == "</think>" * 2


def soon(http: httpx2.Client, letters: str) -> dict[str, Any]:
    """Fields under which a random model that thinks writes these letters, and soon the end of its reasoning."""
    ids = [http.post("/tokenize", json={"prompt": letter}).json()["tokens"][0] for letter in sorted(set(letters))]
    allowed = {"allowed_token_ids": [2, END_OF_THOUGHT, *ids], "seed": 4}
    return {"chat_template_kwargs": {"enable_thinking": True}, **allowed}


def is_special(request: pytest.FixtureRequest) -> bool:
    return "special" in request.node.callspec.params.values()


def test_a_form_is_that_of_the_answer_behind_the_reasoning(
    request: pytest.FixtureRequest, client: openai.OpenAI, http: httpx2.Client
) -> None:
    extra = soon(http, '{}"a:12 ')
    chat: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    chat = {"model": MODEL, "messages": CHAT, "response_format": chat, "max_tokens": 900, "extra_body": extra}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    response: Any = {"model": MODEL, "input": CHAT, "text": form, "max_output_tokens": 900, "extra_body": extra}
    if is_special(request):
        for create, asked, param in (
            (client.chat.completions.create, chat, "response_format.json_schema.schema"),
            (client.responses.create, response, "text.format.schema"),
        ):
            with pytest.raises(openai.BadRequestError, match="does not go with this model's reasoning") as refused:
                create(**asked)
            assert refused.value.param == param
        return
    message = client.chat.completions.create(**chat).choices[0].message
    assert json.loads(message.content or "")["a"] in (1, 2)
    assert extra_field(message, "reasoning_content")
    found = client.responses.create(**response)
    assert json.loads(found.output_text)["a"] in (1, 2)
    assert [item.type for item in found.output] == ["reasoning", "message"]
    extra["chat_template_kwargs"] = {"enable_thinking": False}  # then it holds from the first token on
    message = client.chat.completions.create(**chat).choices[0].message
    assert json.loads(message.content or "")["a"] in (1, 2)
    assert extra_field(message, "reasoning_content") is None


def test_forced_calls_come_behind_the_reasoning(
    request: pytest.FixtureRequest, client: openai.OpenAI, http: httpx2.Client
) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": [TOOL], "max_tokens": 900}
    settings |= {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": soon(http, CALL)}
    settings["logit_bias"] = {END_OF_THOUGHT: 3.0}
    if is_special(request):
        with pytest.raises(openai.BadRequestError, match="tools does not go with this model's reasoning"):
            client.chat.completions.create(**settings)
        return
    for streams in (False, True):
        choice = chat_choice(client, settings, streams=streams)
        [call] = choice.message.tool_calls or ()
        assert json.loads(call.function.arguments)["a"] in (1, 2)
        assert extra_field(choice.message, "reasoning_content")
        assert choice.finish_reason == "tool_calls"


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(ValidationError, match="'deepseek_r1', 'deepseek_v3'"):
        HttpSettings.model_validate({"reasoning_parser": "gpt"})
