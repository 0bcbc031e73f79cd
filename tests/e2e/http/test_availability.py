"""Who is served and when: keys, limits, clients that leave, a target that is away, a server that stops."""

from __future__ import annotations

import json
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from deployment import Deployment, wait_until_idle
from http_api import CHAT, GREEDY, MODEL, PROMPT, error, metric, url
from waiting import eventually

from pilotfish.runtime.loading import LoadedModel
from pilotfish.steps import Grant, TargetResult, TargetStep
from target_svc.engine import TargetEngine


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
            assert eventually(lambda: deployment.look(lambda scheduler: len(scheduler.rows)) == 1)
            first.append(pool.submit(http.post, "/v1/completions", json=body))
            assert eventually(lambda: deployment.look(lambda scheduler: len(scheduler.waiting)) == 1)
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


def test_unfinished_bodies_have_a_budget_and_small_ones_pass(tiny_folder: Path, tiny_target: LoadedModel) -> None:
    settings: dict[str, Any] = {"http_max_body_bytes": 1 << 20, "http_body_budget_bytes": 3 << 20}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    unfinished = head + b"Content-Length: 1000000\r\n\r\n" + b" " * 999_999
    with (
        Deployment(tiny_folder, tiny_target, http="127.0.0.1:0", **settings) as deployment,
        httpx2.Client(base_url=url(deployment), timeout=60) as http,
        ExitStack() as connections,
    ):
        host, port = url(deployment).removeprefix("http://").split(":")
        taken = [connections.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        for connection in taken:
            with suppress(OSError):  # it was refused before it had sent all
                connection.sendall(unfinished)
        assert eventually(lambda: len(select.select(taken, [], [], 0)[0]) == 5), "the budget is for three"
        answers = []
        for connection in select.select(taken, [], [], 0)[0]:
            with suppress(ConnectionError):  # what was sent after it may have cost the answer
                answers.append(connection.recv(4096).lower())
        assert answers
        assert all(answer.startswith(b"http/1.1 503 ") and b"retry-after: 1" in answer for answer in answers)
        assert http.post("/v1/completions", json=body).status_code == 200
        connections.close()
        large = body | {"stop": ["x" * 1000] * 16, "user": "x" * 800_000}
        assert eventually(lambda: http.post("/v1/completions", json=large).status_code == 200)


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
