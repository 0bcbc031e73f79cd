"""What the orchestrator costs at the speed of GPUs: rounds over simulated workers.

    python bench/simulated.py [--profile NAME] [--batches 1,8,64,256] [--replicas 1,2,4,8] [--temperature T]

Starts the real services with `--simulate`, asks as many streams as a batch has rows, and reads the times that
come with every piece: how much of a round is not the models', what the orchestrator's process computes, and
how the round shrinks with draft replicas when drafting is what takes long. Everything, this load generator
included, shares the cores of one machine: their load is in the table too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from services import Service, service

from pilotfish.cli.pull import fetch
from pilotfish.rpc.channel import connect
from pilotfish.rpc.server import run
from pilotfish.v1 import generation_pb2 as pb

DRAFT_BOUND = """
# Not a real pair: a drafter whose time is all in its rows, beside a target that takes next to none.
agreement = 0.75
[target]
weights_us = 2_000
token_us = 0
[draft]
weights_us = 0
token_us = 1_000
"""
METHOD = "/pilotfish.v1.GenerationService/Generate"
PROMPT_TOKENS = 16
VOCABULARY = 40_000


@dataclass
class Fleet:
    target: Service
    drafts: list[Service]
    orchestrator: Service

    def cpu_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds of processor time so far: orchestrator, workers, load generator."""
        workers = sum(worker.cpu_s() for worker in (self.target, *self.drafts))
        return np.array([self.orchestrator.cpu_s(), workers, sum(os.times()[:2])])


@dataclass
class Measured:
    """Milliseconds of a round: medians of its parts; means of the whole and of processor time."""

    round_ms: float
    target_ms: float
    draft_ms: float
    hops_ms: float
    orchestrator_ms: float
    cpu_ms: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def overhead(self) -> float:
        """Share of the round that is not the models'."""
        rest = self.hops_ms + self.orchestrator_ms
        return rest / (self.target_ms + self.draft_ms + rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used (%(default)s)")
    parser.add_argument("--profile", default="llama-70b-8xh100", help="shipped profile or .toml file (%(default)s)")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 64, 256], help="rows in the batch (1,8,64,256)")
    parser.add_argument("--replicas", type=_numbers, default=[1, 2, 4, 8], help="for the second table (1,2,4,8)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds to measure for each line (%(default)s)")
    parser.add_argument("--draft-length", type=int, default=4, metavar="K", help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: unseeded, with supports (%(default)s)")
    run(measure(parser.parse_args()))


async def measure(arguments: argparse.Namespace) -> None:
    console, folder = Console(width=140), fetch(arguments.model)
    if arguments.batches:
        table = _table(f"{arguments.profile}, K = {arguments.draft_length}", "rows")
        with fleet(folder, arguments.profile, 1) as services:
            for rows in arguments.batches:
                _add(table, rows, await load(services, rows, arguments))
        console.print(table)
    if arguments.replicas:
        table = _table("drafting takes all the time, 64 rows", "replicas")
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as profile:
            profile.write(DRAFT_BOUND)
            profile.flush()
            rounds = {}
            for replicas in arguments.replicas:
                with fleet(folder, profile.name, replicas) as services:
                    found = await load(services, 64, arguments)
                _add(table, replicas, found)
                rounds[replicas] = found.round_ms
        console.print(table)
        fewest = min(rounds)
        ratios = [f"{fewest} → {replicas}: {rounds[fewest] / ms:.2f}" for replicas, ms in rounds.items()]
        console.print(f"rounds per second, {', '.join(ratios)} times")


@contextmanager
def fleet(folder: Path, profile: str, replicas: int) -> Iterator[Fleet]:
    """All services on this machine, ended with the block."""
    with ExitStack() as stack:

        def start(*argv: str) -> Service:
            common = ["--model", str(folder), "--listen", "127.0.0.1:0", "--log-level", "warning"]
            return stack.enter_context(service(["-m", "pilotfish", *argv, *common]))

        worker = ["--simulate", profile, "--pages", "16384"]
        target, drafts = start("target", *worker), [start("draft", *worker) for _ in range(replicas)]
        flags = [part for draft in drafts for part in ("--draft", draft.address)]
        yield Fleet(target, drafts, start("orchestrator", "--target", target.address, *flags, "--max-rows", "256"))


async def load(services: Fleet, rows: int, arguments: argparse.Namespace) -> Measured:
    """Keeps so many streams running; the first one tells how so many rounds went once all of them do."""
    seen = [0] * rows

    async def drain(row: int) -> None:
        async for _ in calls[row]:
            seen[row] += 1

    async with connect(services.orchestrator.address) as channel:
        calls = [_ask(channel, row, rows, arguments) for row in range(rows)]
        others = [asyncio.create_task(drain(row)) for row in range(1, rows)]
        try:
            warm = 0
            while warm < 5:
                await calls[0].read()
                warm += all(count > 1 for count in seen[1:])
            return await _watch(calls[0], services, arguments.rounds)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*others, return_exceptions=True)


def _ask(channel: grpc.aio.Channel, row: int, rows: int, arguments: argparse.Namespace) -> Any:
    """One stream of undecoded pieces, long enough for every round that is measured."""
    prompt = np.random.default_rng(row).integers(100, VOCABULARY, PROMPT_TOKENS).tolist()
    sampling = pb.SamplingParams(
        max_tokens=(arguments.rounds + 20 + rows) * (arguments.draft_length + 1),
        temperature=arguments.temperature,
        draft_length=arguments.draft_length,
        ignore_eos=True,
    )
    ask = channel.unary_stream(METHOD, request_serializer=pb.GenerateRequest.SerializeToString)
    return ask(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling))


async def _watch(call: Any, services: Fleet, rounds: int) -> Measured:
    pieces, before, began = [], services.cpu_s(), time.perf_counter()
    for _ in range(rounds):
        pieces.append(pb.GenerateResponse.FromString(await call.read()).piece)
    seconds, cpu_s = time.perf_counter() - began, services.cpu_s() - before
    times = [piece.times for piece in pieces]
    return Measured(
        round_ms=seconds / rounds * 1e3,
        target_ms=statistics.median(each.target_us for each in times) / 1e3,
        draft_ms=statistics.median(each.draft_us for each in times) / 1e3,
        hops_ms=statistics.median(each.hops_us for each in times) / 1e3,
        orchestrator_ms=statistics.median(each.orchestrator_us for each in times) / 1e3,
        cpu_ms=cpu_s / rounds * 1e3,
    )


COLUMNS = (
    "round",
    "target",
    "draft",
    "hops",
    "orchestrator",
    "overhead",
    "orchestrator CPU",
    "workers CPU",
    "load CPU",
)


def _table(title: str, first: str) -> Table:
    table = Table(title=f"{title}; medians in ms, processor time per round", title_justify="left")
    for column in (first, *COLUMNS):
        table.add_column(column, justify="right")
    return table


def _add(table: Table, first: int, found: Measured) -> None:
    parts = [found.round_ms, found.target_ms, found.draft_ms, found.hops_ms, found.orchestrator_ms]
    cpu = [f"{ms:.1f}" for ms in found.cpu_ms]
    table.add_row(str(first), *(f"{value:.2f}" for value in parts), f"{found.overhead:.1%}", *cpu)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
