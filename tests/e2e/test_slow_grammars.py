"""A grammar that takes for ever to compile costs its own request, and nothing outlives that request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from deployment import Deployment, wait_until_idle
from http_api import error, url
from slow_grammars import SLOW, is_gone, only_pid, pids

from pilotfish import DeadlineExceededError, InvalidArgumentError, SamplingParams
from pilotfish.errors import PilotfishError
from pilotfish.runtime.grammar import Grammars
from pilotfish.runtime.grammar_limits import GrammarLimits
from pilotfish.runtime.loading import LoadedModel, load_model
from target_svc.engine import TargetEngine

PROMPT = [40, 41, 40, 41]
ASKED = SamplingParams(json_schema=SLOW, max_tokens=4)
LIMITS = GrammarLimits(timeout_s=600, memory_mib=4096)


@pytest.fixture(scope="module")
def engine(target: LoadedModel) -> TargetEngine:
    return TargetEngine(target, pages=256, grammar_limits=LIMITS)


@pytest.fixture(scope="module")
def grammars(engine: TargetEngine) -> Grammars:
    return engine._grammars


@pytest.fixture(scope="module")
def deployment(folder: Path, engine: TargetEngine) -> Iterator[Deployment]:
    near = load_model(folder, dtype="float32", layers=2)
    with Deployment(folder, lambda: engine, (near,), http="127.0.0.1:0") as deployment:
        yield deployment


def stop(grammars: Grammars) -> int:
    """The process that compiles now, made to take for ever."""
    os.kill(pid := only_pid(grammars), signal.SIGSTOP)
    return pid


def test_others_go_on_while_a_grammar_is_compiled(deployment: Deployment, grammars: Grammars) -> None:
    with deployment.client() as client, deployment.client() as slow_client, ThreadPoolExecutor(1) as pool:
        stream = client.stream(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
        pieces = iter(stream)
        next(pieces)
        slow = slow_client.stream(PROMPT, ASKED)
        failing = pool.submit(lambda: list(slow))
        pid = stop(grammars)
        for _ in pieces:  # a stream that was under way
            pass
        assert len(stream.result.token_ids) == 200
        assert client.generate(PROMPT, SamplingParams(regex="abc")).text == "abc"  # another user's grammar
        assert not failing.done()
        assert pids(grammars) == [pid]
        slow.close()
        assert is_gone(pid)
        assert failing.exception(timeout=60) is None or isinstance(failing.exception(), PilotfishError)
    wait_until_idle(deployment)


def test_a_request_past_its_time_takes_its_process_along(deployment: Deployment, grammars: Grammars) -> None:
    with deployment.client() as client, ThreadPoolExecutor(1) as pool:
        late = pool.submit(client.generate, PROMPT, ASKED, timeout=2.0)
        pid = stop(grammars)
        with pytest.raises(DeadlineExceededError):
            late.result()
        assert is_gone(pid)
    wait_until_idle(deployment)


@pytest.mark.parametrize("streams", [False, True])
def test_an_http_client_that_leaves_takes_its_process_along(
    streams: bool, deployment: Deployment, grammars: Grammars
) -> None:
    body: dict[str, Any] = {"prompt": "x", "stream": streams, "structured_outputs": {"json": SLOW}}
    with httpx2.Client(base_url=url(deployment), timeout=600) as http:
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]
        gone = threading.Event()

        def ask() -> None:
            try:
                with httpx2.Client(base_url=url(deployment), timeout=2) as leaving:
                    leaving.post("/v1/completions", json=body)
            except httpx2.TimeoutException:
                gone.set()

        asking = threading.Thread(target=ask)
        asking.start()
        pid = stop(grammars)
        assert is_gone(pid)
        asking.join()
        assert gone.is_set()
        body |= {"structured_outputs": {"regex": "ab"}, "stream": False}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "ab"
    wait_until_idle(deployment)


def test_past_the_memory_limit_is_a_bad_request(folder: Path, target: LoadedModel) -> None:
    limits = GrammarLimits(memory_mib=24)
    serve = Deployment(folder, lambda: TargetEngine(target, pages=256, grammar_limits=limits), http="127.0.0.1:0")
    with serve as deployment, httpx2.Client(base_url=url(deployment), timeout=60) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "x", "structured_outputs": {"json": SLOW}}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        found = error(answer)
        assert found["param"] == "structured_outputs.json"
        assert "takes more than 24 MiB to compile" in found["message"]
        with deployment.client() as client, pytest.raises(InvalidArgumentError, match="24 MiB"):
            client.generate(PROMPT, ASKED)
        body = {"model": model, "prompt": "x", "structured_outputs": {"regex": "ab"}}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "ab"
