"""The round without its tokens, thousands a second, so that rates settle.

Rows keep each draft token with a chance of their own, and steps take what a cost function says, times noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from orchestrator.core.draft_length import CHAINS, DraftLengths, Round
from orchestrator.core.pages import PagePool, RowCache
from orchestrator.core.requests import PROPOSE_BEHIND, DraftPlace, Params, Request

PREFILL = 2e-4  # seconds that a caught up token takes from the target's step
LEVEL = 8  # nodes that a level of a tree runs
CATCH_UP = 64  # tokens a round and row


@dataclass
class Virtual:
    """A target, a draft and so many rows at a time; a row that ends is followed by a new one.

    Attributes:
        rows: at once.
        target: seconds of a step over its tokens.
        draft: seconds until proposals are there, over their depth and the rows of a pass.
        chance: that a row keeps a draft token, given all before it, at a time.
        noise: of the logarithm of every time.
        length: of every request; None adapts.
        sizes: of trees that may be chosen; of one alone if every request names a length.
        seed: of the noise and of what is kept.
    """

    rows: int
    target: Callable[[float], float]
    draft: Callable[[int, float], float]
    chance: Callable[[float, Request], float]
    noise: float = 0.1
    length: int | None = None
    completion: int = 200
    now: float = 0.0
    tokens: int = 0
    catch_up_tokens: int = 0
    sizes: tuple[int, ...] = (CHAINS,)
    seed: int = 1
    lengths: list[list[int]] = field(default_factory=list)  # round by round
    sizes_asked: list[int] = field(default_factory=list)  # alike

    def __post_init__(self) -> None:
        self.choice = DraftLengths(self.sizes)
        self._draws = np.random.default_rng(self.seed)
        self._pool = PagePool(0, 4000, 16)
        self._running: list[Request] = []
        self._count = 0

    def run(self, rounds: int) -> float:
        """Tokens per second over so many rounds."""
        since, before = self.now, self.tokens
        for _ in range(rounds):
            self.round()
        return (self.tokens - before) / (self.now - since)

    def round(self) -> None:
        self._running = [request for request in self._running if request.draft_room >= 0 and not self._ended(request)]
        while len(self._running) < self.rows:
            self._running.append(self._new())
        rows, began = self._running, self.now
        asked = [row.draft_limit if row.draft_lag <= PROPOSE_BEHIND else 0 for row in rows]
        size, depth = max(row.tree_nodes for row in rows), max(asked)
        nodes = [max(length, size) if length else 0 for length in asked]
        width = (min(size, LEVEL) * sum(map(bool, asked)) if size else sum(asked) / depth) if depth else 0
        waited = self.draft(depth, width) * self._noise() if depth else 0.0
        verified = self.target(len(rows) + sum(nodes)) * self._noise()
        runs = [self._kept_run(row, length) for row, length in zip(rows, asked, strict=True)]
        self.choice.choose(rows, replicas=1, trees=True)
        caught_up = sum(self._catch_up(row) for row in rows)
        self.now += waited + verified + PREFILL * caught_up
        self.lengths.append(asked)
        self.sizes_asked.append(size)
        self.catch_up_tokens += caught_up
        self.choice.learn(self._accept(rows, asked, nodes, runs, size, self.now - began, waited, caught_up > 0))

    def _kept_run(self, row: Request, length: int) -> int:
        """Draft tokens kept before the first that is not."""
        misses = np.flatnonzero(self._draws.random(length) >= self.chance(self.now, row))
        return int(misses[0]) if len(misses) else length

    def _accept(
        self,
        rows: list[Request],
        asked: list[int],
        nodes: list[int],
        runs: list[int],
        size: int,
        seconds: float,
        waited: float,
        caught_up: bool,
    ) -> Round:
        judged, kept, spoken_on, committed = [], [], [], 0
        for row, length, accepted in zip(rows, asked, runs, strict=True):
            got = min(accepted + 1, row.draft_room + 1)
            if length:
                assert row.draft is not None
                row.draft.cache.length = row.length + min(accepted, got - 1)
                judged.append(row)
                kept.append(min(accepted, got))
                spoken_on.append(min(accepted + 1, length, got))
            row.append([0] * got)
            row.round_index += 1
            committed += got
        self.tokens += committed
        return Round(
            seconds=seconds,
            draft_seconds=waited,
            rows=len(rows),
            tokens=len(rows) + sum(nodes),
            committed=committed,
            depth=max(asked),
            drafted=sum(nodes),
            nodes=size if any(asked) else CHAINS,
            replicas=1,
            has_prefill=False,
            caught_up=caught_up,
            was_delayed=False,
            judged=judged,
            kept=np.array(kept, np.int64),
            spoken_on=np.array(spoken_on, np.int64),
        )

    def _catch_up(self, row: Request) -> int:
        if row.draft_limit == 0 or row.draft_lag <= PROPOSE_BEHIND:
            return 0
        assert row.draft is not None
        count = min(CATCH_UP, row.draft_lag - 1)
        row.draft.cache.length += count
        return count

    def _new(self) -> Request:
        self._count += 1
        prompt, more = int(self._draws.integers(40, 80)), int(self._draws.integers(0, self.completion))
        params = Params(max_tokens=self.completion + more, draft_length=self.length)
        request = Request(str(self._count), np.zeros(prompt, np.int32), params)
        request.tree_nodes = self.sizes[0]
        request.draft = DraftPlace("d0", RowCache(self._pool))
        return request

    def _ended(self, request: Request) -> bool:
        return request.generated >= request.params.max_tokens

    def _noise(self) -> float:
        return float(np.exp(self._draws.normal(0, self.noise)))


def cpu(tokens: float) -> float:
    """A target whose verification is almost free, as on a CPU: 20 ms, 1.5 % more for each token."""
    return 0.020 * (1 + 0.015 * tokens)


def saturated(tokens: float) -> float:
    """A target that is bound by arithmetic from eight tokens on."""
    return 0.020 * max(1.0, tokens / 8)


def draft(seconds: float, overhead: float = 0.0) -> Callable[[int, float], float]:
    """So long a pass for one row, and 1 % more for each other one; a step takes ``overhead`` beside its passes."""
    return lambda depth, rows: overhead + depth * seconds * (1 + 0.01 * rows)


def always(chance: float) -> Callable[[float, Request], float]:
    return lambda now, row: chance
