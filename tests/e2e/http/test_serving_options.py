"""How the orchestrator serves HTTP: pages of other origins, metrics without a key, leniency."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import CHAT, GREEDY, MODEL, error, url

from pilotfish.runtime.loading import LoadedModel

ORIGIN = "https://chat.example.org"
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def deployment(tiny_folder: Path, tiny_target: LoadedModel) -> Iterator[Deployment]:
    options: dict[str, Any] = {
        "allowed_origins": [ORIGIN],
        "api_key": ["secret"],
        "lenient": True,
        "metrics_without_key": True,
    }
    with Deployment(tiny_folder, tiny_target, http="127.0.0.1:0", **options) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url(deployment)}/v1", api_key="secret", max_retries=0) as client:
        yield client


# CORS


def test_a_browser_gets_leave_before_it_has_a_key(http: httpx2.Client) -> None:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    leave = http.options("/v1/chat/completions", headers=asked)
    assert leave.status_code == 200
    assert leave.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in leave.headers["access-control-allow-methods"]
    assert "authorization" in leave.headers["access-control-allow-headers"].lower()
    refused = http.options("/v1/chat/completions", headers=asked | {"Origin": "https://other.example.org"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_answers_and_errors_may_be_read_by_pages_of_that_origin(http: httpx2.Client) -> None:
    body = {"messages": CHAT, "max_tokens": 4, **GREEDY}
    for headers, status in (({"Origin": ORIGIN, **KEY}, 200), ({"Origin": ORIGIN}, 401)):
        for streams in (False, True):
            answer = http.post("/v1/chat/completions", json=body | {"stream": streams}, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    elsewhere = http.post("/v1/chat/completions", json=body, headers={"Origin": "https://other.example.org", **KEY})
    assert elsewhere.status_code == 200
    assert "access-control-allow-origin" not in elsewhere.headers


# Metrics


def test_metrics_need_no_key_and_all_else_does(http: httpx2.Client) -> None:
    assert "vllm:" in http.get("/metrics").text
    assert http.get("/v1/models").status_code == 401
    assert http.get("/v1/models", headers=KEY).status_code == 200


# Leniency


def test_unknown_fields_are_passed_over_and_named(client: openai.OpenAI) -> None:
    plain = client.chat.completions.with_raw_response.create(messages=CHAT, max_tokens=8, **GREEDY)
    assert "warning" not in plain.headers
    extra = {"temprature": 3, "colour": {"of": "money"}, "chat_template_kwargs": {"enable_thinking": False}}
    messages = [CHAT[0], CHAT[1] | {"mood": "good"}]
    for streams in (False, True):
        found = client.chat.completions.with_raw_response.create(
            messages=messages, max_tokens=8, stream=streams, extra_body=extra, **GREEDY
        )
        names = "temprature, colour, mood, chat_template_kwargs.enable_thinking"
        assert found.headers["warning"] == f'299 - "ignored: {names}"'
        if not streams:
            assert found.parse().choices == plain.parse().choices
    completion = client.completions.with_raw_response.create(prompt="x", max_tokens=1, extra_body={"a": 1}, **GREEDY)
    response = client.responses.with_raw_response.create(input="x", max_output_tokens=1, extra_body={"a": 1}, **GREEDY)
    assert completion.headers["warning"] == response.headers["warning"] == '299 - "ignored: a"'


def test_names_that_no_header_can_carry_are_shown_as_far_as_they_go(http: httpx2.Client) -> None:
    fields = {'a"b\r\nSet-Cookie: x': 1, "é\ud800": 1, "x" * 100: 1, **{f"f{i}": 1 for i in range(40)}}
    body = json.dumps({"prompt": "x", **fields})
    answer = http.post("/tokenize", content=body, headers={"Content-Type": "application/json", **KEY})
    assert answer.status_code == 200
    names = answer.headers["warning"].removeprefix('299 - "ignored: ').removesuffix('"').split(", ")
    assert names[:4] == ["a?b??Set-Cookie: x", "?xe9?ud800", "x" * 64, "f0"]
    assert names[-1] == "and 11 more"
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"logprobs": "no"}, "logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_known_fields_are_judged_as_strictly_as_ever(http: httpx2.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "unknown": 1}
    answer = http.post("/v1/completions", json=body | fields, headers=KEY)
    assert (answer.status_code, error(answer)["param"]) == (400, param)
    assert answer.headers["warning"] == '299 - "ignored: unknown"'
