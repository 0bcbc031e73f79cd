"""Scenarios as readable text, replayed on the real core and held against their golden traces.

A file in ``testdata/`` is a list of commands, each followed by ``----`` and what the core did:

    limits rows=4 prefill=16 tree=0        before anything else; all optional
    clock target=1000+10 deadline=5000     microseconds per step + per token
    open-target pages=16 [features=yes]
    open-draft d0 pages=16 agree=0.8 cost=100+1 [features=yes]
    reads rounds=1                         after so many rounds features come that are read
    submit a prompt=10 max=8 k=4 [temperature=1 seed=3 rule=ratio]
    rounds 3 | run | cancel a | lose-draft d0 | lose-target | pools | texts

After a change that is meant to alter the traces: ``PILOTFISH_REWRITE=1 pytest tests/sim`` and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from fakes import STATES, VOCAB, plain_text
from simulator import Costs, Simulator

from orchestrator.core.acceptance import Rule
from orchestrator.core.scheduler import Limits

FILES = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    comment, blocks = parse(file.read_text())
    scenario = Scenario()
    replayed = [(commands, scenario.play(commands)) for commands, _ in blocks]
    if os.environ.get("PILOTFISH_REWRITE"):
        file.write_text(comment + "".join(f"{commands}\n----\n{output}\n\n" for commands, output in replayed))
        return
    for (commands, expected), (_, output) in zip(blocks, replayed, strict=True):
        assert output == expected, f"after:\n{commands}"


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 5


def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The leading comment, and the blocks of commands with their expected output."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    comment = "\n".join(lines[:start]) + "\n"
    blocks = []
    for block in "\n".join(lines[start:]).strip().split("\n\n"):
        commands, _, output = block.partition("----")
        blocks.append((commands.strip(), output.strip("\n")))
    return comment, blocks


class Scenario:
    """Plays commands on a simulator that keeps its state from block to block."""

    def __init__(self) -> None:
        self.simulator = Simulator()

    def play(self, commands: str) -> str:
        seen = len(self.simulator.trace)
        answers: list[str] = []
        for line in commands.splitlines():
            name, *words = line.split()
            options = dict(word.split("=", 1) for word in words if "=" in word)
            plain = [word for word in words if "=" not in word]
            answers += getattr(self, "do_" + name.replace("-", "_"))(plain, options) or []
        trace = self.simulator.trace[seen:]
        return "\n".join([*trace, *answers]) or "ok"

    def do_limits(self, _: list[str], options: dict[str, str]) -> None:
        limits = Limits(
            max_rows=int(options.get("rows", 64)),
            max_prefill_tokens=int(options.get("prefill", 512)),
            tree_nodes=int(options.get("tree", 0)),
        )
        self.simulator = Simulator(limits)

    def do_clock(self, _: list[str], options: dict[str, str]) -> None:
        self.simulator.target_costs = costs(options["target"])
        self.simulator.draft_deadline = int(options["deadline"])

    def do_open_target(self, _: list[str], options: dict[str, str]) -> None:
        features = STATES if "features" in options else ()
        self.simulator.open_target(int(options["pages"]), int(options.get("first", 0)), features)

    def do_open_draft(self, plain: list[str], options: dict[str, str]) -> None:
        self.simulator.open_draft(
            plain[0],
            int(options["pages"]),
            float(options.get("agree", 1)),
            int(options.get("branches", 1)),
            costs(options.get("cost", "100+1")),
            features=STATES if "features" in options else (),
        )

    def do_reads(self, _: list[str], options: dict[str, str]) -> None:
        self.simulator.read_rounds = int(options["rounds"])

    def do_submit(self, plain: list[str], options: dict[str, str]) -> None:
        seed = int(options.get("seed", 0))
        prompt = np.random.default_rng(seed).integers(0, VOCAB, int(options["prompt"])).tolist()
        self.simulator.submit(
            plain[0],
            prompt,
            int(options["max"]),
            int(options["k"]),
            temperature=float(options.get("temperature", 0)),
            seed=seed,
            rule=Rule[options.get("rule", "match").upper()],
        )

    def do_rounds(self, plain: list[str], _: dict[str, str]) -> None:
        for _round in range(int(plain[0])):
            self.simulator.round()

    def do_run(self, _: list[str], __: dict[str, str]) -> None:
        self.simulator.run()

    def do_cancel(self, plain: list[str], _: dict[str, str]) -> None:
        self.simulator.cancel(plain[0])

    def do_lose_draft(self, plain: list[str], _: dict[str, str]) -> None:
        self.simulator.lose_draft(plain[0])

    def do_lose_target(self, _: list[str], __: dict[str, str]) -> None:
        self.simulator.lose_target()

    def do_pools(self, _: list[str], __: dict[str, str]) -> list[str]:
        scheduler = self.simulator.scheduler
        pools = {name: replica.pool for name, replica in scheduler.drafting.replicas.items()}
        if scheduler.target is not None:
            pools = {"target": scheduler.target.pool, **pools}
        return [
            f"{name}: {pool.free_count} free, {pool.available - pool.free_count} cached, of {pool.page_count}"
            for name, pool in pools.items()
        ]

    def do_texts(self, _: list[str], __: dict[str, str]) -> list[str]:
        """Says of each request whether its text is the target's own; true of the match rule only."""
        lines = []
        for name, request in self.simulator.requests.items():
            text, params = self.simulator.texts[name], request.params
            own = plain_text(request.prompt.tolist(), len(text), params.temperature, params.seed)
            lines.append(f"{name}: {len(text)} tokens, {'the target’s own' if text == own else 'ANOTHER TEXT'}")
        return lines


def costs(text: str) -> Costs:
    step, token = text.split("+")
    return Costs(int(step), int(token))
