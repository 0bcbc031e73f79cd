"""Where texts and prompts end: fields of the generation that every protocol has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import CHAT, GREEDY, MODEL, PROMPT, error

from pilotfish import Client, InvalidArgumentError, SamplingParams

START, END = 1, 2  # <|im_start|> and <|im_end|>, the model's end token
Ask = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module", params=["completion", "chat", "chat stream", "response", "response stream"])
def ask(request: pytest.FixtureRequest, client: openai.OpenAI) -> Ask:
    """Text, and why it ended, by any endpoint."""

    def complete(max_tokens: int, **extra: Any) -> tuple[str, str]:
        found = client.completions.create(prompt=PROMPT, max_tokens=max_tokens, extra_body=extra, **GREEDY)
        return found.choices[0].text, found.choices[0].finish_reason

    def chat(max_tokens: int, **extra: Any) -> tuple[str, str]:
        found = client.chat.completions.create(messages=CHAT, max_tokens=max_tokens, extra_body=extra, **GREEDY)
        return found.choices[0].message.content or "", found.choices[0].finish_reason

    def stream_chat(max_tokens: int, **extra: Any) -> tuple[str, str]:
        settings: dict[str, Any] = {"messages": CHAT, "max_tokens": max_tokens, "extra_body": extra, **GREEDY}
        choices = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **settings)]
        return "".join(each.delta.content or "" for each in choices), choices[-1].finish_reason or ""

    def respond(max_tokens: int, **extra: Any) -> tuple[str, str]:
        found = client.responses.create(input=PROMPT, max_output_tokens=max_tokens, extra_body=extra, **GREEDY)
        return found.output_text, "stop" if found.status == "completed" else "length"

    def stream_response(max_tokens: int, **extra: Any) -> tuple[str, str]:
        text, last = "", ""
        settings: dict[str, Any] = {"input": PROMPT, "max_output_tokens": max_tokens, "extra_body": extra, **GREEDY}
        for event in client.responses.create(stream=True, **settings):
            text += event.delta if event.type == "response.output_text.delta" else ""
            last = event.type
        return text, "stop" if last == "response.completed" else "length"

    ways: dict[str, Ask] = {
        "completion": complete,
        "chat": chat,
        "chat stream": stream_chat,
        "response": respond,
        "response stream": stream_response,
    }
    way: Ask = ways[request.param]
    return way


def test_special_tokens_are_written_out_where_they_are_wanted(ask: Ask) -> None:
    only = {"allowed_token_ids": [START]}
    assert ask(3, **only) == ("", "length")
    assert ask(3, **only, skip_special_tokens=True) == ("", "length")
    assert ask(3, **only, skip_special_tokens=False) == ("<|im_start|>" * 3, "length")
    ignored = {"allowed_token_ids": [END], "ignore_eos": True, "skip_special_tokens": False}
    assert ask(2, **ignored) == ("<|im_end|>" * 2, "length")


def test_an_end_token_is_text_where_that_is_wanted(ask: Ask) -> None:
    only = {"allowed_token_ids": [END]}
    assert ask(3, **only, skip_special_tokens=False) == ("", "stop")
    assert ask(3, **only, include_stop_str_in_output=True) == ("", "stop")
    assert ask(3, **only, include_stop_str_in_output=True, skip_special_tokens=False) == ("<|im_end|>", "stop")


def test_a_stop_token_is_text_where_that_is_wanted(ask: Ask, http: httpx2.Client) -> None:
    [letter] = http.post("/tokenize", json={"prompt": "q"}).json()["tokens"]
    only = {"allowed_token_ids": [letter], "stop_token_ids": [letter]}
    assert ask(3, **only) == ("", "stop")
    assert ask(3, **only, include_stop_str_in_output=True) == ("q", "stop")


def test_a_stop_text_is_text_where_that_is_wanted(client: openai.OpenAI, http: httpx2.Client) -> None:
    ids = [http.post("/tokenize", json={"prompt": letter}).json()["tokens"][0] for letter in "xyz"]
    forced = {"structured_outputs": {"regex": "xyzzyxyzzy"}, "allowed_token_ids": [*ids, END]}
    settings: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20, "stop": ["zy", "zzy"], "logprobs": 0, **GREEDY}
    without = client.completions.create(**settings, extra_body=forced)
    included = client.completions.create(**settings, extra_body={"include_stop_str_in_output": True, **forced})
    assert [each.choices[0].text for each in (without, included)] == ["xy", "xyzzy"]
    for found in (without, included):  # log probabilities and counts end with the text
        logprobs, usage = found.choices[0].logprobs, found.usage
        assert logprobs is not None
        assert usage is not None
        assert "".join(logprobs.tokens or ()) == found.choices[0].text
        assert usage.completion_tokens == len(found.choices[0].text)
    stream = client.completions.create(
        **settings, stream=True, extra_body={"include_stop_str_in_output": True, **forced}
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "xyzzy"


def test_of_a_prompt_the_last_tokens_are_kept(client: openai.OpenAI, http: httpx2.Client) -> None:
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    settings: dict[str, Any] = {"max_tokens": 8, **GREEDY}
    found = client.completions.create(prompt=PROMPT, echo=True, extra_body={"truncate_prompt_tokens": 5}, **settings)
    short = client.completions.create(prompt=ids[-5:], echo=True, **settings)
    assert found.choices[0].text == short.choices[0].text
    assert found.usage is not None
    assert found.usage.prompt_tokens == 5
    long = ids * 512
    for fields, prompt_tokens in (({"truncate_prompt_tokens": -1}, 512 - 8), ({"truncate_prompt_tokens": 500}, 500)):
        cut = client.completions.create(prompt=long, extra_body=fields, **settings)
        assert cut.usage is not None
        assert cut.usage.prompt_tokens == prompt_tokens
    messages: list[Any] = [{"role": "user", "content": "hello " * 600}]
    fields = {"truncate_prompt_tokens": 400, "ignore_eos": True}
    chat = client.chat.completions.create(messages=messages, extra_body=fields, **GREEDY)
    response = client.responses.create(input=messages, extra_body=fields, **GREEDY)
    assert chat.usage is not None
    assert response.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (400, 112)  # up to the model's length
    assert (response.usage.input_tokens, response.usage.output_tokens) == (400, 112)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"truncate_prompt_tokens": 0}, "must be in [1, 512], or -1 for what fits"),
    ({"truncate_prompt_tokens": -2}, "must be in [1, 512], or -1"),
    ({"truncate_prompt_tokens": 513}, "must be in [1, 512], or -1"),
    ({"truncate_prompt_tokens": 2**62}, "must be in [1, 512], or -1"),
    ({"truncate_prompt_tokens": 1.5}, "an integer"),
    ({"truncate_prompt_tokens": "all"}, "an integer"),
    ({"skip_special_tokens": 0}, "true or false"),
    ({"include_stop_str_in_output": "yes"}, "true or false"),
    ({"spaces_between_special_tokens": False}, "is not supported"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=str)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_bad_values_are_named(http: httpx2.Client, path: str, fields: dict[str, Any], message: str) -> None:
    prompts = {
        "completions": {"prompt": PROMPT},
        "chat/completions": {"messages": CHAT},
        "responses": {"input": PROMPT},
    }
    answer = http.post(f"/v1/{path}", json={"model": MODEL, **prompts[path], **fields})
    assert answer.status_code == 400
    assert error(answer)["param"] == next(iter(fields))
    assert message in error(answer)["message"]


def test_the_sdk_gets_the_same(deployment: Deployment, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    fields |= {"truncate_prompt_tokens": 6, "allowed_token_ids": [START, END, 80, 81]}
    found = client.completions.create(prompt=PROMPT, max_tokens=8, extra_body=fields, **GREEDY)
    with deployment.client() as sdk:
        expected = sdk.generate(PROMPT, SamplingParams(max_tokens=8, **fields))
        assert found.choices[0].text == expected.text
        assert found.usage is not None
        assert found.usage.prompt_tokens == expected.usage.prompt_tokens == 6
        refuses_bad_counts(sdk)


def refuses_bad_counts(sdk: Client) -> None:
    for count in (0, -2, 513):
        with pytest.raises(InvalidArgumentError, match=rf"truncate_prompt_tokens is {count}; must be in \[1, 512\]"):
            sdk.generate(PROMPT, SamplingParams(truncate_prompt_tokens=count))
