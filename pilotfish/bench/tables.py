"""The tables of a report, as text in cells; the terminal and the page draw the same ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotfish.bench.report import Report
from pilotfish.bench.summary import Result, Spread

_PLACES = 4  # settings that a remark names

Column = tuple[str, Callable[[Result], str]]


@dataclass(frozen=True)
class Table:
    """A table whose first ``labels`` columns say which setting a row is of."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int
    groups: tuple[int, ...]
    """Indices of the rows that begin another load or temperature."""

    def is_loss(self, column: int, cell: str) -> bool:
        """Whether a cell tells of a speed-up that is none."""
        return self.header[column] == "speed-up" and cell.startswith("0.")


def tables(report: Report) -> list[Table]:
    """Speed, what speculation did, latencies, and where a round's time went."""
    is_open = any(result.setting.load.rate is not None for result in report.results)
    has_features = any(result.feature_kb is not None for result in report.results)
    labels: list[Column] = [("req/s" if is_open else "at once", lambda result: result.setting.load.number)]
    if len({result.setting.temperature for result in report.results}) > 1:
        labels.append(("T", lambda result: f"{result.setting.temperature:g}"))
    if report.origin.is_foreign:
        return [
            _table(report, labels, "Speed", _THROUGHPUT_NOTE, _THROUGHPUT),
            _table(report, labels, "Latency, ms", _CHUNKS_NOTE, _LATENCY),
        ]
    labels.append(("K", lambda result: result.setting.draft_label))
    return [
        _table(report, labels, "Speed", _SPEED_OPEN_NOTE if is_open else _SPEED_NOTE, _SPEED),
        _table(report, labels, "Speculation", _SPECULATION_NOTE, _SPECULATION),
        _table(report, labels, "Latency, ms", _LATENCY_NOTE, _LATENCY),
        _table(report, labels, "A round, ms", _ROUND_NOTE, [*_ROUND, *_FEATURES] if has_features else _ROUND),
    ]


def remarks(report: Report) -> list[str]:
    """What a reader should know beside the tables, most important first."""
    found = []
    for result in report.results:
        for failure, count in result.failures.items():
            found.append(f"{count} of {result.requests} requests failed ({where(report, result)}): {failure}")
    found += _losses(report)
    compared = sum(result.compared_texts for result in report.results)
    if compared:
        same = sum(result.same_texts or 0 for result in report.results)
        near = "; the others part where two tokens are almost equally likely" if same < compared else ""
        found.append(f"{same} of {compared} greedy texts are those of speculation off, token for token{near}")
    prompt_tokens = sum(result.prompt_tokens for result in report.results)
    cached_tokens = sum(result.cached_tokens for result in report.results)
    if prompt_tokens and (cached_tokens or not report.origin.is_foreign):  # others need not tell
        cached = cached_tokens / prompt_tokens
        found.append(f"{cached:.0%} of the prompt tokens were found in the server's prefix cache")
    found += report.notes
    busiest = max((result.generator_cpu for result in report.results), default=0)
    found.append(f"the load generator used up to {busiest:.0%} of a core of this machine")
    return found


def _losses(report: Report) -> list[str]:
    """Where speculation was slower than none, if it was anywhere."""
    speculating = [result for result in report.results if result.setting.draft_length != 0 and result.speed_up]
    lost = [result for result in speculating if result.speed_up is not None and result.speed_up < 1]
    if not lost:
        return []
    places = "; ".join(f"{_speed_up(result.speed_up)} {where(report, result)}" for result in lost[:_PLACES])
    more = f"; and {len(lost) - _PLACES} more" if len(lost) > _PLACES else ""
    return [f"speculation was slower than none in {len(lost)} of {len(speculating)} settings: {places}{more}"]


def where(report: Report, result: Result) -> str:
    """The setting that a result is of, in words."""
    draft = "" if report.origin.is_foreign else f", K {result.setting.draft_label}"
    many = len({each.setting.temperature for each in report.results}) > 1
    return result.setting.load.label + (f", T {result.setting.temperature:g}" if many else "") + draft


def _table(report: Report, labels: Sequence[Column], title: str, note: str, columns: Sequence[Column]) -> Table:
    every = [*labels, *columns]
    rows = tuple(tuple(cell(result) for _, cell in every) for result in report.results)
    keys = [(result.setting.load, result.setting.temperature) for result in report.results]
    begins = tuple(index for index, key in enumerate(keys) if index and key != keys[index - 1])
    groups = begins if len(begins) + 1 < len(rows) else ()  # where each row is one, they are none
    return Table(title, note, tuple(name for name, _ in every), rows, len(labels), groups)


def _number(value: float | None, shape: str) -> str:
    return "–" if value is None else format(value, shape)


def _latencies(spread: Spread | None) -> str:
    """Median, p90, p99, each with three digits."""
    return "–" if spread is None else "/".join(_digits(value) for value in (spread.median, spread.p90, spread.p99))


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _speed_up(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _positions(result: Result) -> str:
    pairs = zip(result.kept_per_position, result.judged_per_position, strict=True)
    shares = [f"{kept / judged:.0%}".rstrip("%") for kept, judged in pairs]
    return " ".join(shares[:8]) + (" …" if len(shares) > 8 else "") if shares else "–"


def _part(name: str) -> Callable[[Result], str]:
    def cell(result: Result) -> str:
        value = getattr(result.median_round, name, None)
        return "–" if value is None or (name == "draft" and not result.drafted) else _digits(value)

    return cell


_SPEED: list[Column] = [
    ("failed", lambda result: f"{sum(result.failures.values())} of {result.requests}"),
    ("tokens", lambda result: str(result.output_tokens)),
    ("tokens/s", lambda result: _number(result.tokens_per_s, ".1f")),
    ("speed-up", lambda result: _speed_up(result.speed_up)),
    ("from", lambda result: _speed_up(min(result.pass_speed_ups, default=None))),
    ("to", lambda result: _speed_up(max(result.pass_speed_ups, default=None))),
]
_SPEED_NOTE = (
    "K: most draft tokens a round. Speed-up: tokens/s over K off in the same run; median, least and most of the "
    "repeats, in which the settings take turns"
)
_SPEED_OPEN_NOTE = (
    "K: most draft tokens a round. Speed-up: a request's tokens per second of its time over K off in the same run; "
    "median, least and most of the repeats, in which the settings take turns. Arrivals decide on tokens/s"
)
_THROUGHPUT: list[Column] = [
    ("failed", lambda result: f"{sum(result.failures.values())} of {result.requests}"),
    ("tokens", lambda result: str(result.output_tokens)),
    ("tokens/s", lambda result: _number(result.tokens_per_s, ".1f")),
    ("from", lambda result: _number(min(result.pass_tokens_per_s, default=None), ".1f")),
    ("to", lambda result: _number(max(result.pass_tokens_per_s, default=None), ".1f")),
]
_THROUGHPUT_NOTE = "Of all requests together; median, least and most of the repeats"
_SPECULATION: list[Column] = [
    ("tokens/round", lambda result: _number(result.tokens_per_round, ".2f")),
    ("predicted", lambda result: _number(result.predicted_tokens_per_round, ".2f")),
    ("α", lambda result: _number(result.acceptance_rate, ".3f")),
    ("drafted/round", lambda result: _number(result.drafted / result.rounds if result.rounds else None, ".2f")),
    ("by position, %", _positions),
]
_SPECULATION_NOTE = (
    "α: of the draft tokens whose parents were all kept, the share that was kept; by position: at each depth; "
    "predicted: (1−α^(K+1))/(1−α), each round with the K that it had"
)
_LATENCY: list[Column] = [
    ("first token", lambda result: _latencies(result.first_token)),
    ("inter-token", lambda result: _latencies(result.inter_token)),
    ("pieces", lambda result: _latencies(result.pause)),
]
_LATENCY_NOTE = (
    "Median/p90/p99. A round's tokens come as one piece: inter-token divides the wait for it by its tokens, as "
    "SGLang's benchmark does; pieces is the wait itself, which vLLM's calls inter-token"
)
_CHUNKS_NOTE = (
    "Median/p90/p99. First token: from sending to the first chunk with text. A chunk may bring several tokens: "
    "inter-token divides the wait for it by them, as SGLang's benchmark does; pieces is the wait itself, as vLLM's"
)
_ROUND: list[Column] = [
    ("target", _part("target")),
    ("draft", _part("draft")),
    ("hops", _part("hops")),
    ("orchestrator", _part("orchestrator")),
    ("target idle", lambda result: _number(result.target_idle, ".0%")),
    ("draft idle", lambda result: _number(result.draft_idle, ".0%")),
]
_FEATURES: list[Column] = [("features, KB", lambda result: _number(result.feature_kb, ".1f"))]
_ROUND_NOTE = "Medians of each part. Idle: the share of all rounds' time in which that model waits for the others"
