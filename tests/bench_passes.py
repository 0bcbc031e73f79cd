"""Passes and reports made by hand, for tests of what ``pilotfish bench`` makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish import Completion, Piece, RoundTimes, ServerInfo, Token, Usage
from pilotfish.bench.origin import Origin
from pilotfish.bench.records import Load, Pass, Record, Setting
from pilotfish.bench.report import Report
from pilotfish.bench.summary import summarize

INFO = ServerInfo(
    model="big", version="1", max_len=64, vocab_size=9, draft_length=4, draft_replica_count=1, draft_model="small",
    target_ready=True, adaptive_draft_length=True,
)  # fmt: skip
Round = tuple[int, int]
"""(accepted, drafted); the target's own token follows."""


def completion(rounds: Sequence[Round], times: RoundTimes | None = None, prompt_tokens: int = 10) -> Completion:
    """One token of a prefill, then rounds that take ``times`` each."""
    times = times if times is not None else RoundTimes(4000, 3000, 2000, 1000)
    pieces = [Piece((Token(0, "", "bonus"),), 0, times)]
    for accepted, drafted in rounds:
        last = Token(2, "", "recovered" if accepted < drafted else "bonus")
        pieces.append(Piece((*[Token(1, "", "accepted")] * accepted, last), drafted, times))
    count = len(rounds)
    total = RoundTimes(*(count * part for part in vars(times).values()))
    depth = max((drafted for _, drafted in rounds), default=0)
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(len(piece.tokens) for piece in pieces),
        cached_tokens=prompt_tokens // 2,
        rounds=count,
        drafted=sum(drafted for _, drafted in rounds),
        accepted=sum(accepted for accepted, _ in rounds),
        accepted_per_position=tuple(sum(accepted > i for accepted, _ in rounds) for i in range(depth)),
        drafted_per_position=tuple(sum(drafted > i for _, drafted in rounds) for i in range(depth)),
        queue_us=0,
        first_token_us=1000,
        total_us=1000 * count,
        round_total=total,
        round_median=times,
        preemptions=0,
    )
    token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
    return Completion("", token_ids, "length", usage, "r", "big", tuple(pieces))


def record(done: Completion, began_at: float = 0.0, gap_s: float = 0.1) -> Record:
    """Its first piece comes after 0.5 s, each later one after ``gap_s`` more."""
    arrivals = [(began_at + 0.5 + gap_s * index, len(piece.tokens)) for index, piece in enumerate(done.pieces)]
    return Record(began_at, tuple(arrivals), arrivals[-1][0], done)


def failed(error: str) -> Record:
    return Record(0.0, (), 0.1, None, error)


def one_pass(*records: Record, duration_s: float = 2.0) -> Pass:
    return Pass(records, duration_s, 0.1)


def setting(draft_length: int | None, load: Load | None = None, temperature: float = 0.0) -> Setting:
    return Setting(load if load is not None else Load(concurrency=1), temperature, draft_length)


def report(measured: Sequence[tuple[Setting, Pass]]) -> Report:
    return Report(
        origin=Origin(
            server=INFO,
            address="127.0.0.1:1",
            started_by="",
            command="pilotfish bench",
            date="2026-01-01T00:00:00+00:00",
            machine="a machine",
        ),
        prompts="our own",
        requests=1,
        repeats=1,
        max_tokens=8,
        seed=0,
        results=summarize(measured),
    )
