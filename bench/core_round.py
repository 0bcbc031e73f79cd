"""What the orchestrator computes in one round, phase by phase, without processes, gRPC or waiting.

    python bench/core_round.py [--rows 64,256] [--rounds N] [--temperature T] [--draft-length K]

The pure core and the codec against simulated engines that take no time, in one thread with warm caches; medians over
rounds. What happens between an answer and the next step is on the critical path; what is done while a worker is
busy is not. Sending text to clients is not in it: `bench/simulated.py` measures whole processes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from draft_svc.drafters.simulated import SimulatedDrafter
from draft_svc.engine import DraftEngine
from orchestrator.core.acceptance import Rule
from orchestrator.core.requests import Params, Request
from orchestrator.core.scheduler import Limits, Scheduler
from pilotfish.cli.pull import fetch
from pilotfish.rpc import codec
from pilotfish.simulate.model import read_model
from pilotfish.simulate.profile import Cost, Profile
from pilotfish.v1 import draft_pb2, target_pb2
from target_svc.simulated import SimulatedTarget

Value = TypeVar("Value")

PAGES = 16384
WARM_UP = 20
CRITICAL = ("plan proposals", "draft step to bytes", "proposals from bytes", "seal", "target step to bytes", "accept")
HIDDEN = ("plan target", "choose draft lengths", "plan catch-up")


class Round:
    """One round of everything, with the time of each phase."""

    def __init__(self, folder: Path, rows: int, temperature: float, draft_length: int) -> None:
        free = Cost(weights_us=0, token_us=0)
        profile, model = Profile(agreement=0.75, target=free, draft=free), read_model(folder, "simulated", None)
        self._target = SimulatedTarget(profile, model, pages=PAGES)
        self._draft = DraftEngine(SimulatedDrafter(profile, model, pages=PAGES), pages=PAGES)
        self._grants = self._target.open(None), self._draft.open(None)
        self._scheduler = Scheduler(Limits(max_rows=rows))
        self._scheduler.target_opened(self._grants[0])
        self._scheduler.drafting.opened("draft", self._grants[1], self._draft.capabilities)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        rule = Rule.RATIO if temperature else Rule.MATCH
        for row in range(rows):
            prompt = np.random.default_rng(row).integers(100, 40_000, 16).astype(np.int32)
            params = Params(4000, temperature=temperature, seed=row, rule=rule, draft_length=draft_length)
            self._scheduler.submit(Request(f"r{row}", prompt, params))

    def run(self) -> None:
        scheduler, vocab_size = self._scheduler, self._grants[0].vocab_size
        drafts = self._timed("plan proposals", scheduler.plan_proposals)
        proposals: dict[str, Any] = {}
        answers = {name: self._propose(plan) for name, plan in drafts.items()}
        plan = self._timed("plan target", lambda: scheduler.plan_target(drafts.values()))
        for name, answer in answers.items():
            proposals |= self._timed(
                "proposals from bytes", lambda n=name, a=answer: _proposals(drafts[n], a, vocab_size)
            )
        batch = self._timed("seal", lambda: scheduler.seal(plan, proposals))
        assert batch is not None
        message = self._timed("target step to bytes", lambda: codec.target_step_to_pb(batch.step).SerializeToString())
        step = codec.target_step_from_pb(target_pb2.TargetStep.FromString(message))
        answer = codec.target_result_to_pb(self._target.run(self._grants[0], step)).SerializeToString()
        self._timed("choose draft lengths", scheduler.choose_draft_lengths)
        for catch_up in self._timed("plan catch-up", lambda: scheduler.plan_catch_up(batch)).values():
            self._draft.run(self._grants[1], catch_up.step)
        self._timed("accept", lambda: scheduler.accept(batch, _result(answer)))

    def _propose(self, plan: Any) -> bytes:
        message = self._timed("draft step to bytes", lambda: codec.draft_step_to_pb(plan.step).SerializeToString())
        step = codec.draft_step_from_pb(draft_pb2.DraftStep.FromString(message))
        return codec.draft_result_to_pb(self._draft.run(self._grants[1], step)).SerializeToString()

    def _timed(self, phase: str, function: Callable[[], Value]) -> Value:
        started = time.perf_counter()
        value = function()
        self.seconds[phase].append(time.perf_counter() - started)
        return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="64,256", help="rows in the batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: ratio, with supports (%(default)s)")
    parser.add_argument("--draft-length", type=int, default=4, metavar="K", help="(%(default)s)")
    arguments = parser.parse_args()
    folder, columns = fetch("smollm2"), [int(part) for part in arguments.rows.split(",")]
    found = [measure(folder, rows, arguments) for rows in columns]
    table = Table(title="one round, ms", title_justify="left")
    for column in ("phase", *(f"{rows} rows" for rows in columns)):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for phase in (*CRITICAL, *HIDDEN):
        table.add_row(phase, *(f"{times[phase]:.2f}" for times in found))
    table.add_section()
    table.add_row("on the critical path", *(f"{sum(times[phase] for phase in CRITICAL):.2f}" for times in found))
    table.add_row("in all", *(f"{sum(times.values()):.2f}" for times in found))
    Console().print(table)


def measure(folder: Path, rows: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of each phase, once all rows are running."""
    each = Round(folder, rows, arguments.temperature, arguments.draft_length)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # as the orchestrator does
    for _ in range(WARM_UP):
        each.run()
    each.seconds.clear()
    for _ in range(arguments.rounds):
        each.run()
    return {phase: statistics.median(seconds) * 1e3 for phase, seconds in each.seconds.items()}


def _proposals(plan: Any, answer: bytes, vocab_size: int) -> Any:
    return plan.proposals(codec.draft_result_from_pb(draft_pb2.DraftResult.FromString(answer)), vocab_size)


def _result(answer: bytes) -> Any:
    return codec.target_result_from_pb(target_pb2.TargetResult.FromString(answer))


if __name__ == "__main__":
    main()
