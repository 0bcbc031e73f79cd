"""What is wrong with a call is named."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment, wait_until_idle
from http_api import CHAT, GREEDY, MODEL, PROMPT, error

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
    ("completions", {"temperature": float("nan")}, "temperature", "the number nan, which JSON does not know"),
    ("responses", {"text": {"format": {"type": "json_schema", "schema": {"a": [1e999]}}}}, "text", "the number inf"),
    ("completions", {"top_p": 0}, "top_p", "must be in (0, 1]"),
    ("completions", {"top_k": -2}, "top_k", "at least 0"),
    ("completions", {"min_p": 2}, "min_p", "must be in [0, 1]"),
    ("completions", {"seed": -(2**63) - 1}, "seed", "must be in [-2**63, 2**64)"),
    ("completions", {"seed": 2**64}, "seed", "2**64"),
    ("completions", {"n": 0}, "n", "at least 1"),
    ("completions", {"n": 129}, "n", "at most 128"),
    ("completions", {"stop": ["x", ""]}, "stop[1]", "empty"),
    ("completions", {"stop": 3}, "stop", "a text or a list of texts"),
    ("completions", {"stop": ["x"] * 17}, "stop", "at most 16"),
    ("completions", {"stop_token_ids": [99999]}, "stop_token_ids[0]", "must be in [0, 280)"),
    ("completions", {"best_of": 2}, "best_of", "not supported"),
    ("completions", {"suffix": "end"}, "suffix", "not supported"),
    ("completions", {"use_beam_search": True}, "use_beam_search", "not supported"),
    ("completions", {"acceptance": "typical"}, "acceptance", "'match', 'ratio' or 'block'"),
    ("completions", {"draft_length": 65}, "draft_length", "at most 64"),
    ("completions", {"timeout": 0}, "timeout", "must be in (0"),
    ("completions", {"stream_options": {}}, "stream_options", "stream: true only"),
    ("completions", {"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "not a known field"),
    ("completions", {"banned_token_ids": [99999]}, "banned_token_ids[0]", "must be in [0, 280)"),
    ("completions", {"logit_bias": {"99999": 1}}, "logit_bias", "of token 99999; ids must be in [0, 280)"),
    ("completions", {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    ("completions", {"max_tokens": 10**12}, "max_tokens", "at most 502 fit after a prompt of 10 tokens"),
    ("chat/completions", {"max_completion_tokens": 2**62}, "max_completion_tokens", "fit after a prompt of"),
    ("responses", {"max_output_tokens": 2**62}, "max_output_tokens", "fit after a prompt of"),
    ("completions", {"n": 2**40}, "n", "at most 128"),
    ("completions", {"x" * 1_000_000: 1}, "x" * 117 + "...", "is not a known field"),
    ("completions", {"top_k": 2**63}, "top_k", "at most 2147483647"),
    ("completions", {"priority": 2**31}, "priority", "at most 2147483647"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": ""}] * 5000},
        "messages",
        "at most 4096 are allowed",
    ),
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
    ("responses", {"input": [{"type": "item_reference"}]}, "input[0].type", "'function_call'"),
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
