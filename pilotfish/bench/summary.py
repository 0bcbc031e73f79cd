"""From passes to numbers. Pure.

Rates are medians over the passes of a setting, speed-ups medians over pairs of passes of one repeat, latencies
percentiles over all its requests, counts sums.

Inter-token latency: a round brings several tokens at once, so that the pause before a piece is divided evenly over its
tokens, and each counts (SGLang's convention, ``bench_serving.py``). The pauses themselves, which vLLM's
``benchmark_serving.py`` calls inter-token latency, are given beside it.

Acceptance rate α: of the draft tokens that were judged and whose parents were all kept, the share that was kept; the
maximum-likelihood estimate if every token is kept with the same probability, as section 3.1 of
https://arxiv.org/abs/2211.17192 assumes. A round that drafts K tokens then brings (1 - α^(K+1)) / (1 - α).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from pilotfish.bench.records import Pass, Record, Setting

if TYPE_CHECKING:
    from pilotfish.client.results import Completion, RoundTimes


@dataclass(frozen=True)
class Spread:
    """How a latency is distributed; milliseconds."""

    median: float
    p90: float
    p99: float
    percentiles: tuple[float, ...]
    """0 to 100, 101 values."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """Percentiles with linear interpolation; None without values."""
        if not seconds:
            return None
        values = [round(float(value), 3) for value in np.percentile(np.array(seconds) * 1e3, range(101))]
        return cls(values[50], values[90], values[99], tuple(values))


@dataclass(frozen=True)
class Split:
    """Parts of a round, which together are all of it; milliseconds."""

    target: float
    draft: float
    hops: float
    orchestrator: float

    @property
    def total(self) -> float:
        return self.target + self.draft + self.hops + self.orchestrator


@dataclass(frozen=True)
class Result:
    """One setting, summed up."""

    setting: Setting
    requests: int
    failures: Mapping[str, int]
    """What went wrong, and how often."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the server's prefix cache had."""
    output_tokens: int
    tokens_per_s: float | None
    """Of all requests together; None if all failed."""
    pass_tokens_per_s: tuple[float, ...]
    """Of each pass."""
    speed_up: float | None
    """Over speculation off: of tokens per second, and in an open loop, where arrivals decide on those, of the tokens
    per second that a request gets. None where one of the two has nothing."""
    pass_speed_ups: tuple[float, ...]
    same_texts: int | None
    """Completions that equal speculation off's, at temperature 0; None at others, and for off itself."""
    compared_texts: int
    first_token: Spread | None
    """From sending (in an open loop: from being due) to the first piece."""
    inter_token: Spread | None
    pause: Spread | None
    """Between pieces."""
    whole: Spread | None
    """From sending to the end."""
    rounds: int
    drafted: int
    accepted: int
    judged_per_position: tuple[int, ...]
    """Element i: rounds that had a draft token at depth i + 1 and kept all before it."""
    kept_per_position: tuple[int, ...]
    """Element i: rounds that kept the draft token at depth i + 1, and so all before it."""
    acceptance_rate: float | None
    """α; None if nothing was drafted."""
    tokens_per_round: float | None
    predicted_tokens_per_round: float | None
    """By α and each round's number of draft tokens."""
    median_round: Split | None
    """Medians of each part."""
    feature_kb: float | None
    """Median of the target's features that a round moved, in thousands of bytes; None if none ever did."""
    target_idle: float | None
    """Share of the rounds' time in which the target waits."""
    draft_idle: float | None
    """Share of the rounds' time in which the slowest draft replica waits; None if it never drafted."""
    generator_cpu: float
    """Share of a core that the load generator used."""


def summarize(measured: Sequence[tuple[Setting, Pass]]) -> list[Result]:
    """A result for every setting, in the order in which they first came."""
    passes: dict[Setting, list[Pass]] = {}
    for setting, each in measured:
        passes.setdefault(setting, []).append(each)
    return [_result(setting, own, passes.get(_off(setting), [])) for setting, own in passes.items()]


def expected_tokens(acceptance_rate: float, draft_length: int) -> float:
    """Tokens of a round that drafts so many, each kept with the same probability: (1 - α^(K+1)) / (1 - α)."""
    return sum(acceptance_rate**position for position in range(draft_length + 1))


def inter_token(record: Record) -> list[float]:
    """The time that each token after the first piece took, in seconds."""
    pairs = pairwise(record.arrivals)
    return [(at - before) / tokens for (before, _), (at, tokens) in pairs for _ in range(tokens)]


def pauses(record: Record) -> list[float]:
    """The times between pieces, in seconds."""
    times = [at for at, _ in record.arrivals]
    return [after - before for before, after in pairwise(times)]


def _off(setting: Setting) -> Setting:
    return Setting(setting.load, setting.temperature, 0)


def _result(setting: Setting, passes: Sequence[Pass], off: Sequence[Pass]) -> Result:
    records = [record for each in passes for record in each.records]
    good = [record for record in records if record.completion is not None]
    completions = [completion for each in passes for completion in each.completions]
    usages = [completion.usage for completion in completions]
    rates = [rate for each in passes if (rate := _tokens_per_s(each)) is not None]
    speed_ups = _speed_ups(setting, passes, off)
    same, compared = _same_texts(setting, passes, off)
    rounds, accepted = sum(usage.rounds for usage in usages), sum(usage.accepted for usage in usages)
    judged, kept = positions(completions)
    rate = sum(kept) / sum(judged) if judged else None
    totals = {
        part.name: sum(getattr(usage.round_total, f"{part.name}_us") for usage in usages) for part in fields(Split)
    }
    time = sum(totals.values())
    return Result(
        setting=setting,
        requests=len(records),
        failures=dict(Counter(record.error for record in records if record.error is not None)),
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        output_tokens=sum(usage.completion_tokens for usage in usages),
        tokens_per_s=statistics.median(rates) if rates else None,
        pass_tokens_per_s=tuple(rates),
        speed_up=statistics.median(speed_ups) if speed_ups else None,
        pass_speed_ups=tuple(speed_ups),
        same_texts=same if compared else None,
        compared_texts=compared,
        first_token=Spread.of([record.arrivals[0][0] - record.began_at for record in good if record.arrivals]),
        inter_token=Spread.of([latency for record in good for latency in inter_token(record)]),
        pause=Spread.of([latency for record in good for latency in pauses(record)]),
        whole=Spread.of([record.ended_at - record.began_at for record in good]),
        rounds=rounds,
        drafted=sum(usage.drafted for usage in usages),
        accepted=accepted,
        judged_per_position=judged,
        kept_per_position=kept,
        acceptance_rate=rate,
        tokens_per_round=1 + accepted / rounds if rounds else None,
        predicted_tokens_per_round=_predicted(completions, rounds, rate),
        median_round=_median_round(completions),
        feature_kb=_feature_kb(completions),
        target_idle=1 - totals["target"] / time if time else None,
        draft_idle=1 - totals["draft"] / time if totals["draft"] else None,
        generator_cpu=sum(each.cpu_s for each in passes) / sum(each.duration_s for each in passes),
    )


def _tokens_per_s(one: Pass) -> float | None:
    tokens = sum(completion.usage.completion_tokens for completion in one.completions)
    return tokens / one.duration_s if tokens else None


def _tokens_per_request_s(one: Pass) -> float | None:
    """Tokens for each second that a request was under way."""
    good = [record for record in one.records if record.completion is not None]
    tokens = sum(completion.usage.completion_tokens for completion in one.completions)
    return tokens / sum(record.ended_at - record.began_at for record in good) if tokens else None


def _speed_ups(setting: Setting, passes: Sequence[Pass], off: Sequence[Pass]) -> list[float]:
    """Of each repeat; a sweep that was stopped may lack the last of one of them."""
    speed = _tokens_per_s if setting.load.rate is None else _tokens_per_request_s
    pairs = [(speed(on), speed(without)) for on, without in zip(passes, off, strict=False)]
    return [on / without for on, without in pairs if on is not None and without is not None]


def _same_texts(setting: Setting, passes: Sequence[Pass], off: Sequence[Pass]) -> tuple[int, int]:
    """(equal, compared) completions of a greedy setting and of speculation off."""
    if setting.temperature or setting.draft_length == 0:
        return 0, 0
    pairs = [
        (mine.completion.token_ids, other.completion.token_ids)
        for on, without in zip(passes, off, strict=False)
        for mine, other in zip(on.records, without.records, strict=True)
        if mine.completion is not None and other.completion is not None
    ]
    return sum(mine == other for mine, other in pairs), len(pairs)


def positions(completions: Sequence[Completion]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(judged, kept) draft tokens per depth, as in ``Result``; behind one that failed none is judged."""
    judged: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    for piece in (piece for completion in completions for piece in completion.pieces):
        accepted = piece.kinds.count("accepted")
        kept.update(range(accepted))
        judged.update(range(min(accepted + 1, piece.drafted)))
    return tuple(judged[depth] for depth in range(len(judged))), tuple(kept[depth] for depth in range(len(judged)))


def _predicted(completions: Sequence[Completion], rounds: int, rate: float | None) -> float | None:
    if rate is None or not rounds:
        return None
    lengths = Counter(piece.drafted for completion in completions for piece in completion.pieces if piece.drafted)
    drafting = sum(expected_tokens(rate, length) * count for length, count in lengths.items())
    return (drafting + rounds - lengths.total()) / rounds


def _rounds(completions: Sequence[Completion]) -> list[RoundTimes]:
    """Without the prefills, whose tokens are the first pieces."""
    return [piece.times for completion in completions for piece in completion.pieces[1:]]


def _feature_kb(completions: Sequence[Completion]) -> float | None:
    moved = [times.feature_bytes for times in _rounds(completions)]
    return statistics.median(moved) / 1e3 if any(moved) else None


def _median_round(completions: Sequence[Completion]) -> Split | None:
    rounds = _rounds(completions)
    if not rounds:
        return None
    names = [part.name for part in fields(Split)]
    return Split(*(statistics.median(getattr(times, f"{name}_us") for times in rounds) / 1e3 for name in names))
