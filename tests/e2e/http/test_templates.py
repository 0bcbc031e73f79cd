"""How a conversation becomes a prompt: the ends of it, the template's variables, and what the model thought before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import GREEDY, MODEL, error
from tiny_models import make_tiny_llama

from pilotfish.runtime.loading import load_model

TEMPLATE = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if reasoning_effort %}effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
USER: dict[str, Any] = {"role": "user", "content": "hello there"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": " The sea is "}
PROMPT = "<|im_start|>user\nhello there<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("template"), seed=1)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    with Deployment(folder, load_model(folder, dtype="float32", name=MODEL), http="127.0.0.1:0") as deployment:
        yield deployment


CASES: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([USER], {}, PROMPT + ANSWER),
    ([USER], {"add_generation_prompt": True}, PROMPT + ANSWER),
    ([USER], {"add_generation_prompt": False}, PROMPT),
    ([USER, BEGUN], {"add_generation_prompt": False}, f"{PROMPT}{ANSWER}The sea is<|im_end|>\n"),
    ([USER, BEGUN], {"continue_final_message": True}, f"{PROMPT}{ANSWER}The sea is"),
    ([USER], {"continue_final_message": True, "add_generation_prompt": False}, "<|im_start|>user\nhello there"),
    ([USER, BEGUN | {"content": ""}], {"continue_final_message": True}, PROMPT + ANSWER),
    ([USER, BEGUN], {"continue_final_message": False}, f"{PROMPT}{ANSWER}The sea is<|im_end|>\n{ANSWER}"),
    ([USER], {"chat_template_kwargs": {"enable_thinking": False}}, f"{PROMPT}{ANSWER}<think>\n\n</think>\n\n"),
    ([USER], {"chat_template_kwargs": {"reasoning_effort": "vast"}}, f"{PROMPT}{ANSWER}effort: vast\n"),
    (
        [USER, BEGUN | {"reasoning_content": "so"}],
        {"continue_final_message": True},
        f"{PROMPT}{ANSWER}<think>so</think>The sea is",
    ),
    ([USER, BEGUN | {"reasoning": "so"}], {"add_generation_prompt": False},
     f"{PROMPT}{ANSWER}<think>so</think>The sea is<|im_end|>\n"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "fields", "text"), CASES)
def test_the_prompt_is_what_was_asked_for(
    client: openai.OpenAI, http: httpx2.Client, messages: list[Any], fields: dict[str, Any], text: str
) -> None:
    tokens = http.post("/tokenize", json={"messages": messages, **fields}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text
    chat = client.chat.completions.create(messages=messages, max_tokens=6, extra_body=fields, **GREEDY)
    plain = client.completions.create(prompt=tokens, max_tokens=6, **GREEDY)
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(tokens)


def test_effort_is_the_templates_variable(client: openai.OpenAI, http: httpx2.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": f"{PROMPT}{ANSWER}effort: low\n"}).json()["tokens"]
    plain = client.completions.create(prompt=tokens, max_tokens=6, **GREEDY)
    chat = client.chat.completions.create(messages=[USER], max_tokens=6, reasoning_effort="low", **GREEDY)  # type: ignore[list-item]
    response = client.responses.create(
        input="hello there", max_output_tokens=6, reasoning={"effort": "low", "summary": "auto"}, **GREEDY
    )
    assert chat.choices[0].message.content == response.output_text == plain.choices[0].text
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"


def test_reasoning_items_are_part_of_the_answer_that_they_led_to(http: httpx2.Client) -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
    body = {"model": MODEL, "input": [USER, reasoning, said, USER], "max_output_tokens": 1}
    text = f"{PROMPT}{ANSWER}<think>so</think>Hi.<|im_end|>\n{PROMPT}{ANSWER}"
    count = http.post("/tokenize", json={"prompt": text}).json()["count"]
    assert http.post("/v1/responses", json=body).json()["usage"]["input_tokens"] == count


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message",
     "add_generation_prompt: false only"),
    ("chat/completions", {"continue_final_message": 1}, "continue_final_message", "true or false"),
    ("chat/completions", {"add_generation_prompt": "no"}, "add_generation_prompt", "true or false"),
    ("chat/completions",
     {"continue_final_message": True, "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
     "continue_final_message", "without tool_calls"),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs",
     "chat_template_kwargs.enable_thinkin is no variable of this model's chat template; it reads enable_thinking, "),
    ("chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages is no variable"),
    ("chat/completions", {"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
    ("chat/completions", {"reasoning_effort": "vast"}, "reasoning_effort", "'low'"),
    ("chat/completions", {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
     "reasoning_effort", "chat_template_kwargs say otherwise"),
    ("chat/completions", {"messages": [USER | {"reasoning_content": "x"}]}, "messages[0].reasoning_content",
     "messages of the assistant"),
    ("chat/completions", {"messages": [USER, BEGUN | {"reasoning_content": "x", "reasoning": "x"}]},
     "messages[1].reasoning", "give one of them"),
    ("responses", {"reasoning": {"effort": 3}}, "reasoning.effort", "'low'"),
    ("responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode", "is not supported"),
    ("responses", {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "x is no variable"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "message"), BAD)
def test_bad_values_are_named(http: httpx2.Client, path: str, fields: dict[str, Any], param: str, message: str) -> None:
    prompt: dict[str, Any] = {"input": "x"} if path == "responses" else {"messages": [USER]}
    answer = http.post(f"/v1/{path}", json={"model": MODEL, **prompt, **fields})
    assert answer.status_code == 400, answer.text
    assert error(answer)["param"] == param
    assert message in error(answer)["message"]
