"""The same workers over gRPC and in the orchestrator's process: what is on the wire changes no text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from deployment import Deployment
from in_process import in_process
from simulated import greedy, instant, model

from draft_svc.drafters.model import ModelDrafter
from draft_svc.engine import DraftEngine
from pilotfish import SamplingParams
from pilotfish.rpc.steps_service import ModelThread
from pilotfish.runtime.loading import LoadedModel
from pilotfish.tokenizer_hash import tokenizer_hash
from target_svc.engine import TargetEngine
from target_svc.service import Engine
from target_svc.simulated import SimulatedTarget

PAGES = 128
PROMPTS = ["The sea is", "A pilot fish swims", "Once upon a time"]


@contextmanager
def in_one_process(folder: Path, target: Engine, tiny: LoadedModel, draft: LoadedModel) -> Iterator[Deployment]:
    threads = ModelThread(), ModelThread()
    drafting = DraftEngine(ModelDrafter(draft, pages=PAGES), pages=PAGES)
    kinds = {
        "target_kind": in_process("target", target, threads[0]),
        "draft_kind": in_process("draft", drafting, threads[1], drafting.capabilities),
    }
    with Deployment(folder, tiny, (draft,), kinds=kinds, pages=PAGES) as deployment:
        yield deployment
    for thread in threads:
        thread.shutdown()


def texts(deployment: Deployment) -> list[str]:
    asked = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.5, "top_k": 9, "seed": 4}]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **each) for each in asked]  # type: ignore[arg-type]
    with deployment.client() as client, ThreadPoolExecutor(9) as threads:
        jobs = [threads.submit(client.generate, prompt, each) for prompt in PROMPTS for each in params]
        found = [job.result() for job in jobs]
    assert sum(completion.usage.accepted for completion in found)
    deployment.check_pools()
    return [completion.text for completion in found]


def test_texts_are_equal_over_both_transports(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel
) -> None:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), pages=PAGES) as deployment:
        over_grpc = texts(deployment)
    target = TargetEngine(tiny_target, pages=PAGES)
    with in_one_process(tiny_folder, target, tiny_target, tiny_draft) as deployment:
        assert texts(deployment) == over_grpc


def test_an_error_of_an_engine_ends_its_stream_in_one_process_too(
    tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    target = SimulatedTarget(instant(0.5), model(tokenizer_hash(tiny_folder)), pages=PAGES)
    prompt = [30, 40, 50, 60]
    with (
        in_one_process(tiny_folder, target, tiny_target, tiny_draft) as deployment,
        deployment.client() as client,
        client.stream(prompt, SamplingParams(max_tokens=200, ignore_eos=True)) as stream,
    ):
        next(iter(stream))
        marks = target._pages._marks
        marks[np.flatnonzero(marks)[2]] += 1
        list(stream)
    assert list(stream.result.token_ids) == greedy(prompt, 200)
    assert any("as its token 2" in record.message for record in caplog.records if record.levelno >= logging.WARNING)
