"""Draft length and tree size: what each row drafts next round, from what the rounds so far have shown.

A row whose request names a length keeps it. For the others three things are learnt from every round:
how often draft tokens are kept (``Survival``), and as ``StepTimes`` what a round takes beside drafting,
over the tokens in the target's step, and as ``DraftTimes`` what drafting takes.
``goodput.best_lengths`` makes the lengths of it. Times are what the orchestrator waited, so that hops,
and cores that the draft takes from the target, are in them.

Where drafters grow trees, a round is one of chains or one of trees of a size on the menu. Of every size
survival and times are learnt apart; each is judged by the rate of its best lengths, and the best is taken.

    calibrating   at first: a few lengths in turn, until there are times to go by
    drafting      the best lengths, as long as one of them is above 0
    resting       no length above 0 pays; nothing is sent to the draft, not even a prompt,
                  but for one row now and then (``Probing``)

Pure: times come in as numbers, and nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from orchestrator.core.draft_times import DraftTimes
from orchestrator.core.goodput import Costs, Given, best_depths, best_lengths, rate
from orchestrator.core.probing import PROBE_LENGTH, Probing
from orchestrator.core.requests import MAX_ADAPTIVE_LENGTH, PROPOSE_BEHIND, Request
from orchestrator.core.step_times import FIRST, StepTimes
from orchestrator.core.survival import Doubles, Longs, Survival

Bools = npt.NDArray[np.bool_]

TRIAL = (4, 0, 2, 1)
"""Lengths tried in turn while calibrating."""

TRIAL_DRAFTED, TRIAL_PLAIN = 9, 3
"""Rounds with and without draft tokens that end it."""

CHAINS = 0
"""The size of chains, on the menu."""

SIZES = (CHAINS, 8, 16, 32, 64)
"""The menu where the server chooses."""

CHECK_COST, CHECK_GAP = 0.002, 40
"""Share of the rate that each kind of check may cost while drafting pays, and the rounds between two at least. What is
checked would be known from long ago only: rounds without drafting, of other lengths, and of the next sizes."""

CLEAR_GAIN = 0.1
"""Share of the rate that ends a rest at once. A smaller one may not repay the prefill of rows that are far behind,
or be of the past: it waits for a probe."""


class _Check(Enum):
    """What may be tried instead of the best plan: no drafting, other lengths, or the next size down or up."""

    PLAIN = auto()
    SHORTER = auto()
    LONGER = auto()
    SMALLER = auto()
    BIGGER = auto()


_RESIZED: dict[_Check, Callable[[Longs], Longs]] = {
    _Check.PLAIN: lambda lengths: 0 * lengths,
    _Check.SHORTER: lambda lengths: lengths // 2,
    _Check.LONGER: lambda lengths: np.minimum((3 * lengths + 1) // 2, MAX_ADAPTIVE_LENGTH),
}

RETHINK = 8
"""Rounds after which a rest is thought over; sooner if the number of rows changes."""

BETTER = 1.02
"""Lengths, and sizes, change only for a rate so much higher, so that noise in the times does not move them."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round showed.

    Attributes:
        seconds: from the end of the round before.
        draft_seconds: of those, waited for proposals; 0 if none were asked for.
        rows: verified.
        tokens: of the target's step.
        committed: tokens that the verified rows got.
        depth, drafted: the longest proposal, and the draft tokens, that were asked for.
        nodes: of the trees that were asked for; 0 for chains.
        replicas: that were asked.
        has_prefill: the target's step held prompts too.
        caught_up: draft replicas prefilled beside the target.
        was_delayed: a replica that proposes had still to prefill when the round began.
        judged: the rows whose proposals were judged.
        kept, spoken_on: of each, draft tokens kept, and those that the target spoke on, i64[judged]. Where a tree
            ends before its depth it has nothing to keep, and that counts as spoken on.
    """

    seconds: float
    draft_seconds: float
    rows: int
    tokens: int
    committed: int
    depth: int
    drafted: int
    replicas: int
    has_prefill: bool
    caught_up: bool
    was_delayed: bool
    judged: Sequence[Request]
    kept: Longs
    spoken_on: Longs
    nodes: int = CHAINS


class DraftLengths:
    """Learns from rounds and chooses lengths, and sizes.

    Args:
        sizes: the menu, from small to big: CHAINS, numbers of nodes of trees, or both.
    """

    def __init__(self, sizes: tuple[int, ...] = (CHAINS,)) -> None:
        self._rest = StepTimes()  # of a round beside its drafting, over the target's tokens
        self._menu = sizes
        self.forget_draft()

    def forget_draft(self) -> None:
        """Another drafter answers: what was learnt of the one before is void."""
        self._chains = _Size(CHAINS)
        self._sizes = {CHAINS: self._chains} | {size: _Size(size, self._chains) for size in self._menu if size}
        self._size = self._menu[0]  # of the last choice, checks and trials aside
        self._probing = Probing()
        self._trials = self._drafted = self._plain = 0
        self._since = dict.fromkeys(_Check, 0)  # rounds since the last one of a kind
        self._rested_rows = self._rested = 0

    def learn(self, seen: Round) -> None:
        """Takes in one round."""
        self._probing.observe(seen.seconds, self._lost(seen), seen.draft_seconds, bool(seen.judged))
        if seen.rows and not seen.has_prefill and not seen.caught_up and seen.seconds > seen.draft_seconds:
            self._rest.observe(seen.tokens, seen.seconds - seen.draft_seconds)
            self._plain += seen.depth == 0
        size = self._sizes.get(seen.nodes, self._chains)
        if seen.depth and not seen.was_delayed and seen.draft_seconds > 0:
            size.observe_step(seen)
            self._drafted += 1
        if seen.judged:
            size.survival.observe(seen.judged, seen.kept, seen.spoken_on)

    def choose(self, rows: Sequence[Request], replicas: int, *, trees: bool = False) -> None:
        """Sets the draft length of every row whose request names none, and the size of all rows' proposals.

        Args:
            rows: of the next round, as far as they are known.
            replicas: that can draft.
            trees: whether they grow trees.
        """
        if self._probing.is_resting and len(rows) == self._rested_rows and self._rested < RETHINK:
            self._rested += 1
            return  # every length is 0 already
        self._rested_rows, self._rested = len(rows), 0
        free = np.array([request.params.draft_length is None for request in rows], np.bool_)
        menu = self._menu if trees else (CHAINS,)
        if free.any() or len(menu) > 1:
            plan = self._plan(rows, free, replicas, menu)
            for request, length in zip(rows, plan.lengths.tolist(), strict=True):
                request.tree_nodes = plan.size
                if request.params.draft_length is None:
                    request.draft_length = length

    def _plan(self, rows: Sequence[Request], free: Bools, replicas: int, menu: tuple[int, ...]) -> _Plan:
        nothing = np.zeros(len(rows), np.int64)
        if not replicas:
            return _Plan(nothing, menu[0])
        if not free.any():
            is_known = self._rest.is_known and self._chains.times.is_known
            return self._best(rows, free, replicas, menu) if is_known else _Plan(nothing, menu[0])
        if self._drafted < TRIAL_DRAFTED or self._plain < TRIAL_PLAIN:
            self._trials += 1
            return _Plan(nothing + TRIAL[self._trials % len(TRIAL)], menu[0])
        found = self._best(rows, free, replicas, menu)
        if found.lengths.any() and (found.gain > CLEAR_GAIN or self._probing.is_beyond):
            self._probing.drafting()
            check = self._check(found, menu, self._rest.count(len(rows))) if found.all_ready else None
            return check or found
        return _Plan(self._probe(rows), menu[0])

    def _probe(self, rows: Sequence[Request]) -> Longs:
        """At most one row's length is above 0."""
        able = [row for row in rows if row.params.draft_length is None and row.draft_room > PROBE_LENGTH]
        if able and self._probing.begins():
            for size in self._sizes.values():
                size.survival.doubt()
        probed = self._probing.row(able) if able and self._probing.is_probing else None
        return np.array([PROBE_LENGTH * (row is probed) for row in rows], np.int64)

    def _check(self, found: _Plan, menu: tuple[int, ...], plain_seen: int) -> _Plan | None:
        """What to try instead this round, if a check is due: seldom what is thought much worse.

        Args:
            found: the best plan.
            menu: sizes that may be tried.
            plain_seen: rounds of so many rows without drafting; while they are few there are more.
        """
        for kind in self._since:
            self._since[kind] += 1
        plain_wait = min(found.gain / CHECK_COST, 2 * plain_seen)
        for kind, since in self._since.items():
            if since < (plain_wait if kind is _Check.PLAIN else CHECK_GAP):
                continue
            instead = found.instead(kind, menu)
            if kind is _Check.PLAIN or (instead is not None and since >= found.loss(instead) / CHECK_COST):
                self._since[kind] = 0
                return instead
        return None

    def _best(self, rows: Sequence[Request], free: Bools, replicas: int, menu: tuple[int, ...]) -> _Plan:
        """The best size and lengths; the present size unless another is clearly better.

        A row that is far behind gets what it is to draft once it has caught up, and counts as if it had; but one that
        has less to write than to catch up is past helping. (New rows catch up beside the target's own prefill.)
        """
        ready = np.array([request.draft_lag <= PROPOSE_BEHIND for request in rows], np.bool_)
        worthwhile = np.array([row.round_index == 0 or row.draft_room >= row.draft_lag for row in rows], np.bool_)
        candidates = free & (ready | worthwhile)
        outlooks, rates = {}, {}
        for size in self._within_reach(menu):
            costs = Costs(self._rest.seconds, self._sizes[size].times.seconds, replicas)
            chances = self._sizes[size].chances(rows)
            outlook = _Outlook(rows, free, chances, costs, size, is_present=size == self._size)
            lengths = outlook.best(candidates)
            outlooks[size] = outlook, lengths
            rates[size] = outlook.rate(lengths) * (BETTER if size == self._size else 1.0)
        self._size = size = max(rates, key=rates.__getitem__)
        outlook, lengths = outlooks[size]
        gain = outlook.gain(lengths)
        all_ready = bool(ready[candidates].all())
        if lengths.any() and not all_ready:
            lengths = np.where(ready, outlook.best(free & ready), lengths)
        return _Plan(lengths, size, gain, all_ready, outlooks)

    def _within_reach(self, menu: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes up to the first that too few rounds had: what a step of many more tokens takes is anybody's guess."""
        unknown = (index for index, size in enumerate(menu) if not self._sizes[size].is_tried)
        return menu[: next(unknown, len(menu)) + 1]

    def _lost(self, seen: Round) -> float:
        """Seconds beyond what plain decoding would have taken for the same tokens."""
        if not seen.rows or not self._rest.is_known:
            return 0.0
        plain = float(self._rest.seconds(np.array([seen.rows]))[0])
        if seen.has_prefill:  # what that took is not known
            return seen.draft_seconds - (seen.committed / seen.rows - 1) * plain
        return seen.seconds - seen.committed / seen.rows * plain


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all rows are to draft.

    Attributes:
        gain: the share of the rate that comes of it.
        all_ready: whether every row is ready to draft.
        outlooks: of the sizes it was chosen from, with the best lengths of each.
    """

    lengths: Longs
    size: int
    gain: float = 0.0
    all_ready: bool = False
    outlooks: Mapping[int, tuple[_Outlook, Longs]] = field(default_factory=dict)

    def instead(self, kind: _Check, menu: tuple[int, ...]) -> _Plan | None:
        """What such a check tries; None if there is no such size."""
        if kind in _RESIZED:
            return _Plan(_RESIZED[kind](self.lengths), self.size)
        place = menu.index(self.size) + (1 if kind is _Check.BIGGER else -1)
        if not 0 <= place < len(menu) or menu[place] not in self.outlooks:
            return None
        lengths = self.outlooks[menu[place]][1]
        return _Plan(lengths if lengths.any() else self.lengths, menu[place])

    def loss(self, other: _Plan) -> float:
        """Share of the rate that another plan is thought to lose."""
        return 1 - self._rate(other) / self._rate(self)

    def _rate(self, plan: _Plan) -> float:
        return self.outlooks[plan.size][0].rate(plan.lengths)


class _Size:
    """What was learnt of proposals of one size.

    Args:
        nodes: of trees, or CHAINS.
        chains: what was learnt of chains, to begin with.
    """

    def __init__(self, nodes: int, chains: _Size | None = None) -> None:
        self.survival: Survival = Survival(chains.survival if chains is not None else None, nodes)
        self.times: DraftTimes = DraftTimes(chains.times if chains is not None else None)
        self._nodes = nodes
        self._rounds = 0  # that were timed

    @property
    def is_tried(self) -> bool:
        """Whether enough rounds were timed to go by."""
        return self._rounds >= FIRST

    def chances(self, rows: Sequence[Request]) -> Doubles:
        """See ``Survival.chances``; none beyond ``TRIAL`` before they are tried: hope grows deep trees."""
        chances = self.survival.chances(rows)
        if self._nodes and not self.is_tried:
            chances[:, max(TRIAL) :] = 0.0
        return chances

    def observe_step(self, seen: Round) -> None:
        """Takes in how long a round waited for its proposals."""
        self._rounds += 1
        rows = seen.drafted / (self._nodes or seen.depth) / seen.replicas
        self.times.observe(seen.depth, max(1.0, rows), seen.draft_seconds)


class _Outlook:
    """What the next round could be."""

    def __init__(
        self, rows: Sequence[Request], free: Bools, chances: Doubles, costs: Costs, nodes: int, *, is_present: bool
    ) -> None:
        limits, within = np.array([request.draft_limit for request in rows], np.int64), np.arange(MAX_ADAPTIVE_LENGTH)
        named = np.where(free, 0, limits)
        drafted = np.maximum(named, nodes * (named > 0))
        self._given = Given(
            tokens=len(rows) + int(drafted.sum()),
            expected=len(rows) + float(chances[within < named[:, None]].sum()),
            depth=int(named.max()),
            drafted=int(np.count_nonzero(named) if nodes else named.sum()),
        )
        self._nodes = nodes
        self._rates: dict[bytes, float] = {}  # of lengths that were asked about: the same few again and again
        rooms = np.array([request.draft_room for request in rows])
        self._chances = np.where(within < rooms[:, None], chances, 0.0)
        self._present = np.where(free & is_present, np.minimum(limits, MAX_ADAPTIVE_LENGTH), 0)
        self._is_new = np.array([request.round_index == 0 for request in rows], np.bool_)
        self._costs = costs

    def best(self, candidates: Bools) -> Longs:
        """The best lengths of the candidates, 0 for all others; the present ones unless others are clearly better."""
        chances = np.where(candidates[:, None], self._chances, 0.0)
        best = (
            best_depths(chances, self._given, self._costs, self._nodes)
            if self._nodes
            else best_lengths(chances, self._given, self._costs)
        )
        present = np.where(candidates, self._present, 0)
        if present.any():
            present = np.where(candidates & self._is_new, best, present)
        base = max(np.zeros_like(best), present, key=self.rate)
        return best if self.rate(best) > BETTER * self.rate(base) else base

    def gain(self, lengths: Longs) -> float:
        """Share of the rate that would be lost without them."""
        return 1 - self.rate(np.zeros_like(lengths)) / self.rate(lengths)

    def rate(self, lengths: Longs) -> float:
        key = lengths.tobytes()
        if key not in self._rates:
            self._rates[key] = rate(self._chances, lengths, self._given, self._costs, self._nodes)
        return self._rates[key]
