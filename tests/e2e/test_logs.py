"""A line of the log for each request, by whatever protocol, with its id and its counts; and one for all of them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from deployment import Deployment, wait_until_idle
from http_api import CHAT as MESSAGES
from http_api import GREEDY, MODEL, error, url
from waiting import eventually

from orchestrator import totals
from orchestrator.metrics import Load
from pilotfish import PilotfishError, SamplingParams
from pilotfish.logs import JsonFormatter
from pilotfish.runtime.loading import LoadedModel
from pilotfish.v1 import generation_pb2 as pb
from pilotfish.v1 import generation_pb2_grpc

CHAT = {"model": MODEL, "messages": MESSAGES}
SECRET = "a prompt that nobody else may read"


@pytest.fixture(scope="module")
def deployment(tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel) -> Iterator[Deployment]:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), http="127.0.0.1:0") as deployment:
        yield deployment


@pytest.fixture
def http(deployment: Deployment) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        yield http


class Lines:
    """What was logged since, as JSON has it."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        caplog.clear()
        self._caplog = caplog

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(JsonFormatter().format(record)) for record in list(self._caplog.records)]

    def of(self, request_id: str) -> dict[str, Any]:
        """The one line of a request; it may come a moment after the answer."""
        found = lambda: [line for line in self.all() if line.get("request_id") == request_id]  # noqa: E731
        assert eventually(lambda: bool(found()))
        (line,) = found()
        return line


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    return Lines(caplog)


def new_id() -> str:
    return f"test-{secrets.token_hex(4)}"


def post(http: httpx2.Client, request_id: str, path: str = "/v1/chat/completions", **body: Any) -> httpx2.Response:
    return http.post(path, json=CHAT | GREEDY | body, headers={"X-Request-Id": request_id})


# What was served


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_over_http_has_one_line(http: httpx2.Client, lines: Lines, stream: bool) -> None:
    mine = new_id()
    answer = post(http, mine, max_tokens=12, stream=stream)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == mine
    line = lines.of(mine)
    assert line["answer_id"].startswith("chatcmpl-")
    assert line["answer_id"] in answer.text
    assert (line["level"], line["protocol"], line["call"]) == ("info", "http", "POST /v1/chat/completions")
    assert (line["model"], line["status"], line["finish_reason"]) == (MODEL, 200, "length")
    assert (line["completion_tokens"], line["sample_count"]) == (12, 1)
    assert line["prompt_tokens"] > 0
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]
    assert 0 < line["accepted"] <= line["drafted"]
    assert line["acceptance_rate"] == pytest.approx(line["accepted"] / line["drafted"], abs=1e-3)
    assert line["acceptance_length"] > 1
    assert line["message"].startswith(f"{mine} ({line['answer_id']}) http POST /v1/chat/completions: ")
    assert " 12 completion tokens; length; queue " in line["message"]


def test_a_line_counts_what_usage_counts(http: httpx2.Client, lines: Lines) -> None:
    mine = new_id()
    body = {"model": MODEL, "prompt": ["one two", "three"], "n": 2, "max_tokens": 5, "temperature": 0}
    usage = http.post("/v1/completions", json=body, headers={"X-Request-Id": mine}).json()["usage"]
    line = lines.of(mine)
    assert line["sample_count"] == 4
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert line["accepted"] == usage["speculation"]["accepted"]
    assert line["drafted"] == usage["speculation"]["drafted"]


def test_without_an_id_the_answer_has_one(http: httpx2.Client, lines: Lines) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT | GREEDY)
    assert answer.headers["x-request-id"] == answer.json()["id"]
    assert "answer_id" not in lines.of(answer.json()["id"])
    others = [http.get(path) for path in ("/v1/models", "/health", "/metrics", "/")]
    others += [
        http.get("/nowhere"),
        http.post("/v1/completions", json={}),
        http.post("/tokenize", json={"prompt": "x"}),
    ]
    ids = {each.headers["x-request-id"] for each in others}
    assert len(ids) == len(others)
    assert all(found.startswith("req-") for found in ids)
    assert lines.of(others[0].headers["x-request-id"])["level"] == "debug"


def test_a_request_over_grpc_has_one_line(deployment: Deployment, lines: Lines) -> None:
    mine = new_id()
    with deployment.client() as client:
        usage = client.generate("hello", SamplingParams(max_tokens=9), request_id=mine).usage
    line = lines.of(mine)
    assert (line["protocol"], line["call"], line["status"]) == ("grpc", "Generate", "OK")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage.prompt_tokens, 9)
    assert (line["drafted"], line["accepted"]) == (usage.drafted, usage.accepted)
    assert line["finish_reason"] == "length"


def generate(
    deployment: Deployment, request: pb.GenerateRequest, *metadata: tuple[str, str]
) -> tuple[grpc.StatusCode, dict[str, Any], str]:
    """Status, initial metadata and the answer's own id."""
    started = ""
    with grpc.insecure_channel(deployment.address) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, metadata=metadata)
        with suppress(grpc.RpcError):
            for response in call:
                started = started or response.started.request_id
        return call.code(), dict(call.initial_metadata()), started


def test_an_id_in_grpc_metadata_comes_back_beside_the_request_s_own(deployment: Deployment, lines: Lines) -> None:
    proxys, request = new_id(), pb.GenerateRequest(text="hello")
    code, metadata, own = generate(deployment, request, ("x-request-id", proxys))
    assert (code, metadata["x-request-id"]) == (grpc.StatusCode.OK, proxys)
    assert own.startswith("gen-")
    assert lines.of(proxys)["answer_id"] == own
    code, metadata, own = generate(deployment, request)
    assert (code, metadata["x-request-id"]) == (grpc.StatusCode.OK, own)


# What was not


@pytest.mark.parametrize(
    "bad", ["two words", "a\tb", "ä", "x" * 257], ids=["space", "tab", "not ASCII", "longer than 256"]
)
def test_an_id_that_no_log_could_show_is_refused(
    deployment: Deployment, http: httpx2.Client, lines: Lines, bad: str
) -> None:
    headers = {"X-Request-Id": bad.encode("latin-1"), "Content-Type": "application/json"}
    for answer in (
        http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=headers),
        http.get("/health", headers=headers),
    ):
        assert answer.status_code == 400
        assert error(answer)["param"] == "X-Request-Id"
        line = lines.of(answer.headers["x-request-id"])
        assert line["param"] == "X-Request-Id"
        assert line["level"] == ("debug" if "GET" in line["call"] else "info")
    with deployment.client() as client, pytest.raises(PilotfishError, match="request_id is"):
        client.generate("x", request_id=bad)
    assert all(bad not in line.get("message", "") for line in lines.all() if line.get("event") == "request")


def test_the_longest_id_is_taken(http: httpx2.Client, lines: Lines) -> None:
    mine = new_id().ljust(256, "~")
    assert post(http, mine, max_tokens=1).headers["x-request-id"] == mine
    assert lines.of(mine)["status"] == 200


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"messages": [{"role": "user", "content": 3, "name": SECRET}]}, 400, "invalid_value", "messages[0].content"),
        ({"messages": SECRET}, 400, "invalid_type", "messages"),
        ({"stop": [SECRET] * 17}, 400, "invalid_value", "stop"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"model": "elsewhere"}, 404, "model_not_found", "model"),
        ({"\x1b[31mred" * 100: SECRET}, 400, "unknown_parameter", (" [31mred" * 100)[:117] + "..."),
    ],
)
def test_what_is_refused_has_a_line_without_a_text_of_the_client(
    http: httpx2.Client, lines: Lines, body: dict[str, Any], status: int, kind: str, param: str
) -> None:
    mine = new_id()
    answer = post(http, mine, **body)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, mine)
    line = lines.of(mine)
    assert (line["level"], line["status"], line["error"], line["param"]) == ("info", status, kind, param)
    assert line["finish_reason"] == "error"
    assert line["total_ms"] >= 0
    assert f": {status} {kind} ({param})" in line["message"]
    assert SECRET not in json.dumps(lines.all())


def test_what_is_refused_over_grpc_has_a_line_and_an_id(deployment: Deployment, lines: Lines) -> None:
    mine = new_id()
    request = pb.GenerateRequest(text=SECRET, request_id=mine, sampling=pb.SamplingParams(temperature=-1))
    code, metadata, _ = generate(deployment, request)
    assert (code, metadata["x-request-id"]) == (grpc.StatusCode.INVALID_ARGUMENT, mine)
    line = lines.of(mine)
    assert (line["level"], line["status"], line["param"]) == ("info", "INVALID_ARGUMENT", "temperature")
    code, metadata, _ = generate(deployment, pb.GenerateRequest(text=SECRET, model="other"))
    line = lines.of(metadata["x-request-id"])
    assert (line["status"], line["param"]) == ("NOT_FOUND", "model")
    assert "this server has 'tiny'" in line["message"]
    assert SECRET not in json.dumps(lines.all())


def test_a_deadline_is_a_warning_that_says_how_far_it_came(deployment: Deployment, lines: Lines) -> None:
    mine = new_id()
    request = pb.GenerateRequest(text="x", request_id=mine, timeout_s=0.02, sampling=pb.SamplingParams(max_tokens=400))
    code, _, _ = generate(deployment, request)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    line = lines.of(mine)
    assert (line["level"], line["finish_reason"]) == ("warning", "error")
    assert line["completion_tokens"] < 400
    assert "did not end within its timeout_s" in line["message"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_that_leaves_is_an_abort(deployment: Deployment, lines: Lines, protocol: str) -> None:
    mine = new_id()
    if protocol == "grpc":
        with deployment.client() as client:
            stream = client.stream("x", SamplingParams(max_tokens=400, ignore_eos=True), request_id=mine)
            with stream:
                next(iter(stream))
    else:
        body = CHAT | {"max_tokens": 400, "ignore_eos": True, "stream": True}
        with (
            httpx2.Client(base_url=url(deployment), timeout=60) as http,
            http.stream("POST", "/v1/chat/completions", json=body, headers={"X-Request-Id": mine}) as answer,
        ):
            next(answer.iter_lines())
    wait_until_idle(deployment)
    line = lines.of(mine)
    assert (line["level"], line["finish_reason"]) == ("info", "abort")
    assert 0 < line["completion_tokens"] < 400


def test_a_path_cannot_write_lines_of_its_own(http: httpx2.Client, lines: Lines) -> None:
    answer = http.get("/x%0aINFO:%20all%20is%20well%1b[31m" + "y" * 5000)
    line = lines.of(answer.headers["x-request-id"])
    assert line["status"] == 404
    assert line["message"].isprintable()
    assert len(line["message"]) < 600


def test_what_uvicorn_says_goes_the_same_way(deployment: Deployment, lines: Lines) -> None:
    host, _, port = url(deployment).removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        assert b"400" in connection.recv(1000)
    (line,) = [line for line in lines.all() if line["logger"] == "uvicorn.error" and line["level"] != "debug"]
    assert (line["level"], line["message"]) == ("warning", "Invalid HTTP request received.")


# All together


def test_the_totals_of_a_busy_server(deployment: Deployment, lines: Lines) -> None:
    counted = totals.Totals(lambda: Load(2, 1, 0.25, True, 1), now=iter([0.0, 10.0, 20.0, 30.0]).__next__)
    deployment.orchestrator._generation.observers.append(counted.watch)
    try:
        with deployment.client() as client:
            first = client.generate("one two three four", SamplingParams(max_tokens=20)).usage
            again = client.generate("one two three four", SamplingParams(max_tokens=20)).usage
            counted.tell_once()
            counted.tell_once()
    finally:
        deployment.orchestrator._generation.observers.pop()
    line, quiet = [line for line in lines.all() if line.get("event") == "totals"]
    assert line["seconds"] == 10
    assert line["generation_tokens_per_s"] == 4
    assert line["prompt_tokens_per_s"] == pytest.approx((first.prompt_tokens + again.prompt_tokens) / 10)
    hits = (first.cached_tokens + again.cached_tokens) / (first.prompt_tokens + again.prompt_tokens)
    assert line["prefix_cache_hit_rate"] == pytest.approx(hits, abs=1e-3)
    assert (line["running"], line["waiting"], line["kv_cache_usage"]) == (2, 1, 0.25)
    drafted, accepted = first.drafted + again.drafted, first.accepted + again.accepted
    (found,) = line["drafters"].values()
    assert list(line["drafters"]) == ["tiny-draft"]
    assert (found["drafted"], found["accepted"]) == (drafted, accepted)
    assert found["acceptance_length"] == pytest.approx(1 + accepted / found["drafts"], abs=1e-2)
    told = "Avg generation throughput: 4.0 tokens/s, Running: 2 reqs, Waiting: 1 reqs, KV cache usage: 25.0%"
    assert told in line["message"]
    assert f"Accepted: {accepted} tokens, Drafted: {drafted} tokens" in line["message"]
    assert (quiet["generation_tokens_per_s"], quiet["drafters"]) == (0, {})  # rows still run: it says so


def test_an_idle_server_says_nothing(lines: Lines) -> None:
    totals.Totals(lambda: Load(0, 0, 0.0, True, 1)).tell_once()
    assert lines.all() == []


def test_the_server_tells_by_itself(deployment: Deployment, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals, "INTERVAL_S", 0.01)  # counts from the next time on: the first interval is long
    counted = totals.Totals(lambda: Load(1, 0, 0.0, True, 0))

    async def a_while() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(counted.tell(), 0.2)

    deployment.call(a_while())
    assert [line["running"] for line in lines.all()][:2] == [1, 1]
    assert deployment.orchestrator._telling is not None
    assert not deployment.orchestrator._telling.done()


@pytest.mark.parametrize("service", ["target_svc", "draft_svc", "orchestrator"])
def test_a_start_that_fails_is_json_to_the_last_line(tiny_folder: Path, service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = ["--model", str(tiny_folder), "--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--log-format", "json"]
        argv += [] if service == "orchestrator" else ["--simulate", "llama-8b-h100"]
        env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        command = [sys.executable, "-m", service, *argv]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    *_, last = [json.loads(line) for line in done.stderr.splitlines()]
    assert (last["level"], last["service"]) == ("error", service.removesuffix("_svc"))
    assert "cannot be bound" in last["message"]
