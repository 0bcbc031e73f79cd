"""The load generator against a scripted server, and the order of a sweep."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from fake_generation import FakeGeneration, Status, answer, serving, started, unused_address

from pilotfish import AsyncClient, SamplingParams
from pilotfish.bench.experiment import Sweep, Synthetic, measure, warm_up
from pilotfish.bench.load import LoadGenerator, poisson
from pilotfish.bench.prompts import Prompt
from pilotfish.bench.records import Load, Pass, Setting

PROMPTS = [Prompt("", f"question {index}") for index in range(6)]
PARAMS = SamplingParams(max_tokens=8)


class Busy(FakeGeneration):
    """Counts how many are asked for at once; a prompt with a 3 in it fails."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._running = 0
        self.most = 0

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        try:
            threading.Event().wait(0.02)  # so that those that may run at once meet
            self.script = answer()
            if "3" in str(request.messages):
                yield started()
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            yield from super().Generate(request, context)
        finally:
            with self._lock:
                self._running -= 1


@contextmanager
def busy_server() -> Iterator[tuple[Busy, str]]:
    fake = Busy()
    with serving(fake) as address:
        yield fake, address


def ask(address: str, load: Load, prompts: list[Prompt] = PROMPTS) -> tuple[Pass, int]:
    done = []

    async def go() -> Pass:
        async with AsyncClient(address) as client:
            generator = LoadGenerator(client, 10.0, lambda: done.append(1))
            return await generator.run(prompts, PARAMS, load, np.random.default_rng(1))

    return asyncio.run(go()), len(done)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_closed_loop_keeps_so_many_running(concurrency: int) -> None:
    with busy_server() as (fake, address):
        one, done = ask(address, Load(concurrency=concurrency))
    assert fake.most == min(concurrency, len(PROMPTS))
    assert len(fake.requests) + 1 == len(one.records) == done == len(PROMPTS)  # one fails before it is noted


def test_records_are_in_the_order_of_the_prompts_and_failures_among_them() -> None:
    with busy_server() as (_, address):
        one, _ = ask(address, Load(concurrency=4))
    assert [record.error for record in one.records] == [None] * 3 + ["the queue is full"] + [None] * 2
    assert len(one.completions) == 5
    first = one.records[0]
    assert first.completion is not None
    assert first.completion.token_ids == (1, 2, 3, 4)
    assert [tokens for _, tokens in first.arrivals] == [1, 2, 1]
    times = [first.began_at, *(at for at, _ in first.arrivals), first.ended_at, one.duration_s]
    assert times == sorted(times)
    assert one.cpu_s > 0


def test_an_open_loop_sends_come_what_may() -> None:
    with busy_server() as (fake, address):
        one, _ = ask(address, Load(rate=10_000.0))
    assert fake.most == len(PROMPTS)
    assert [record.began_at for record in one.records] == poisson(10_000.0, len(PROMPTS), np.random.default_rng(1))


def test_nobody_there_is_a_failure_of_every_request() -> None:
    one, done = ask(unused_address(), Load(concurrency=2))
    assert done == len(PROMPTS)
    assert all(record.error is not None and "nobody answers" in record.error for record in one.records)


def test_token_ids_are_sent_as_they_are() -> None:
    fake = FakeGeneration(script=[started(), Status(grpc.StatusCode.INTERNAL, "enough")])
    with serving(fake) as address:
        ask(address, Load(concurrency=1), [Prompt("", (4, 5))])
    assert list(fake.requests[0].token_ids.ids) == [4, 5]


def test_poisson_arrivals_keep_their_rate() -> None:
    moments = poisson(5.0, 20_000, np.random.default_rng(2))
    gaps = np.diff(moments)
    assert moments[0] == 0
    assert np.mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / 5, rel=0.05)  # of an exponential, its mean


SWEEP = Sweep(
    prompts=PROMPTS,
    loads=[Load(concurrency=1), Load(concurrency=2)],
    temperatures=[0.0, 0.5],
    draft_lengths=[0, 4, None],
    repeats=3,
    max_tokens=8,
    seed=7,
)


def test_settings_take_turns() -> None:
    order = list(SWEEP.order())
    assert len(order) == SWEEP.pass_count == 36
    assert len(set(order)) == 36
    first = [(repeat, setting.draft_length) for repeat, setting in order[:9]]
    assert first == [(0, 0), (0, 4), (0, None), (1, None), (1, 4), (1, 0), (2, 0), (2, 4), (2, None)]
    cells = [(setting.load, setting.temperature) for _, setting in order]
    assert [cells[index] for index in range(0, 36, 9)] == [
        (load, temperature) for load in SWEEP.loads for temperature in SWEEP.temperatures
    ]


def test_a_sweep_asks_what_its_settings_say() -> None:
    fake, seen = FakeGeneration(), list[tuple[int, Setting]]()
    sweep = dataclasses.replace(SWEEP, prompts=PROMPTS[:1], loads=SWEEP.loads[:1], repeats=1)

    async def go(address: str) -> list[tuple[Setting, Pass]]:
        async with AsyncClient(address) as client:
            generator = LoadGenerator(client, None, lambda: None)
            await warm_up(sweep, 9, generator)
            on_pass = lambda repeat, setting: seen.append((repeat, setting))  # noqa: E731
            return [found async for found in measure(sweep, 9, generator, on_pass)]

    with serving(fake) as address:
        measured = asyncio.run(go(address))
    assert seen == list(sweep.order())
    assert [setting for setting, _ in measured] == [setting for _, setting in sweep.order()]
    asked = [
        (sampling.temperature, sampling.draft_length if sampling.HasField("draft_length") else None)
        for sampling in (request.sampling for request in fake.requests)
    ]
    assert asked == [(0.0, None), *((s.temperature, s.draft_length) for _, s in sweep.order())]


def test_synthetic_prompts_are_new_in_every_pass_and_the_same_for_a_seed() -> None:
    sweep = dataclasses.replace(SWEEP, prompts=Synthetic(4, 10))
    assert sweep.count == 4
    assert sweep.prompts_of(1, 50) == sweep.prompts_of(1, 50)
    assert not {p.content for p in sweep.prompts_of(1, 50)} & {p.content for p in sweep.prompts_of(2, 50)}
    assert dataclasses.replace(sweep, seed=8).prompts_of(1, 50) != sweep.prompts_of(1, 50)
    assert sweep.params(Setting(Load(1), 0.0, 0)).ignore_eos
    assert not SWEEP.params(Setting(Load(1), 0.0, 0)).ignore_eos
