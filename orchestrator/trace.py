"""A trace of what each process did when, in Chrome's format; ui.perfetto.dev and chrome://tracing open it.

The orchestrator's own spans are measured. A worker's clock is not ours, so that its spans are estimates: we know when a
step was sent, when its answer came and how long the worker computed. What is left are the two hops, and half of it is
put before the computing and half behind. A step that waited in the worker for an earlier one tells nothing of hops; it
ends the shortest hop seen before its answer came.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (JSON array of events).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from orchestrator.core.scheduler import Scheduler
from orchestrator.usage import RoundTimes
from pilotfish.errors import InvalidArgumentError
from pilotfish.steps import DraftResult, DraftStep, TargetResult, TargetStep

log = logging.getLogger(__name__)

Answered = Callable[[Any, Any, float, float], None]
"""Called with (step, result, when it was sent, when the answer came); ``time.perf_counter`` seconds."""

MAX_EVENTS = 1_000_000  # some 150 MB; viewers take no more

_ORCHESTRATOR = 1  # process ids of the trace
_ROUNDS, _WORK, _MODEL = 1, 2, 1  # thread ids, each within its process
_WATCHED = (
    "plan_proposals",
    "plan_target",
    "seal",
    "choose_draft_lengths",
    "plan_catch_up",
    "plan_reads",
    "plan_early",
    "draft_early",
    "accept",
    "timed",
)
_NOTHING = nullcontext()


class Trace:
    """Traces nothing: what the orchestrator has without ``--trace``, and what a trace is to it."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Traces a block of the orchestrator's own work, without an await in it."""
        return _NOTHING

    def watch(self, scheduler: Scheduler) -> None:
        """Traces what a round asks of a scheduler."""

    def worker(self, kind: str, address: str) -> Answered | None:
        """What to call with every answer of a worker; None if nobody wants them."""
        return None

    def round(self, begin: float, end: float, rows: int, times: RoundTimes) -> None:
        """Traces a whole round; ``time.perf_counter`` seconds."""

    def read(self, begin: float, end: float, slots: int) -> None:
        """Traces a read of so many slots' features; ``time.perf_counter`` seconds."""

    def close(self) -> None:
        """Completes the trace."""


NO_TRACE = Trace()


@dataclass(slots=True)
class _Worker:
    """What is known of a worker's timing so far; seconds."""

    process: int
    hop: float = 0.0
    """The shortest seen."""
    computed_until: float = 0.0
    answered_at: float = 0.0


class ChromeTrace(Trace):
    """Writes a trace to a file as it goes: whole once closed, and good for the viewers before.

    Events are handed to a thread that makes JSON of them, so that a round pays little for being watched.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """

    def __init__(self, path: Path, max_events: int = MAX_EVENTS) -> None:
        try:
            file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError(f"trace is {str(path)!r}, which cannot be written ({error.strerror})") from error
        self._origin = time.perf_counter()
        self._left = max_events
        self._reads = 0
        self._workers: dict[str, _Worker] = {}
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=_write, args=(file, self._events), name="trace", daemon=True)
        self._writer.start()
        self._name(_ORCHESTRATOR, "orchestrator", {_ROUNDS: "rounds", _WORK: "work"})

    def span(self, name: str) -> AbstractContextManager[None]:
        return _Span(self, name)

    def watch(self, scheduler: Scheduler) -> None:
        for name in _WATCHED:
            setattr(scheduler, name, self._watched(name.replace("_", " "), getattr(scheduler, name)))

    def worker(self, kind: str, address: str) -> Answered:
        name = f"{kind} {address}"
        if name not in self._workers:
            self._workers[name] = _Worker(process=_ORCHESTRATOR + 1 + len(self._workers))
            self._name(self._workers[name].process, name, {_MODEL: "model"})
        worker = self._workers[name]
        return lambda step, result, sent_at, arrived_at: self._answered(worker, step, result, sent_at, arrived_at)

    def round(self, begin: float, end: float, rows: int, times: RoundTimes) -> None:
        self._span(_ORCHESTRATOR, _ROUNDS, "round", begin, end, {"rows": rows, **asdict(times)})

    def read(self, begin: float, end: float, slots: int) -> None:
        self._reads += 1
        common = {"name": "read features", "cat": "read", "id": self._reads, "pid": _ORCHESTRATOR, "tid": _WORK}
        self._add({**common, "ph": "b", "ts": self._us(begin), "args": {"slots": slots}})
        self._add({**common, "ph": "e", "ts": self._us(end)})

    def work(self, name: str, begin: float, end: float) -> None:
        """A span of the orchestrator's own."""
        self._span(_ORCHESTRATOR, _WORK, name, begin, end, {})

    def close(self) -> None:
        self._events.put(None)
        self._writer.join()

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.span(name):
                return method(*args)

        return call

    def _answered(
        self,
        worker: _Worker,
        step: TargetStep | DraftStep,
        result: TargetResult | DraftResult,
        sent_at: float,
        arrived_at: float,
    ) -> None:
        begin, end = _computing(worker, result.compute_us / 1e6, sent_at, arrived_at)
        name, numbers = _described(step)
        self._span(worker.process, _MODEL, name, begin, end, numbers)
        # Steps under way overlap where one waits for another, which spans of a thread must not.
        common = {"name": "under way", "cat": "step", "id": step.step_id, "pid": worker.process, "tid": _MODEL}
        self._add({**common, "ph": "b", "ts": self._us(sent_at)})
        self._add({**common, "ph": "e", "ts": self._us(arrived_at)})

    def _span(self, process: int, thread: int, name: str, begin: float, end: float, numbers: dict[str, int]) -> None:
        ts = self._us(begin)
        span = {"name": name, "ph": "X", "pid": process, "tid": thread, "ts": ts, "dur": round(self._us(end) - ts, 1)}
        self._add({**span, "args": numbers})

    def _name(self, process: int, name: str, threads: dict[int, str]) -> None:
        """Names a process and its threads for the viewer."""
        self._add({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        self._add({"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}})
        for thread, label in threads.items():
            self._add({"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": label}})

    def _add(self, event: dict[str, Any]) -> None:
        self._left -= 1
        if self._left >= 0:
            self._events.put(event)
        elif self._left == -1:
            log.warning("the trace is full; what comes now is not traced")

    def _us(self, at: float) -> float:
        return round((at - self._origin) * 1e6, 1)


class _Span(AbstractContextManager[None]):
    """Measures a block."""

    __slots__ = ("_begin", "_name", "_trace")

    def __init__(self, trace: ChromeTrace, name: str) -> None:
        self._trace, self._name, self._begin = trace, name, 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._trace.work(self._name, self._begin, time.perf_counter())


def _computing(worker: _Worker, compute: float, sent_at: float, arrived_at: float) -> tuple[float, float]:
    """When a worker computed, as far as we can know; keeps what this tells about it. All in seconds.

    Never before the step before was done, and never outside (``sent_at``, ``arrived_at``).
    """
    if sent_at >= worker.answered_at:
        hop = max(0.0, arrived_at - sent_at - compute) / 2
        worker.hop = min(worker.hop, hop) if worker.answered_at else hop
    else:
        hop = worker.hop
    end = arrived_at - hop
    begin = max(end - compute, worker.computed_until, sent_at)
    worker.computed_until = max(begin, end)
    worker.answered_at = arrived_at
    return begin, worker.computed_until


def _described(step: TargetStep | DraftStep) -> tuple[str, dict[str, int]]:
    """A step's name and the numbers that its duration depends on."""
    numbers = {"rows": len(step.rows.lengths), "tokens": len(step.rows.token_ids)}
    if isinstance(step, DraftStep):
        if step.features is not None:
            numbers["feature bytes"] = step.features.nbytes
        longest = max(step.draft_lengths.tolist(), default=0)
        return ("propose" if longest else "catch up"), {**numbers, "longest draft": longest}
    wanted = len(step.output_nodes)
    prompt = numbers["tokens"] - wanted  # all of a row's tokens in a round have outputs, of a prompt at most the last
    name = "verify" if wanted > numbers["rows"] else "prefill" if prompt else "decode"
    return name, {**numbers, "prompt tokens": prompt}


def _write(file: TextIO, events: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Writes events until None comes; a viewer takes the file without the bracket at its end, too."""
    with file:
        separator = "[\n"
        while (event := events.get()) is not None:
            file.write(separator + json.dumps(event))
            separator = ",\n"
            if events.empty():
                file.flush()
        file.write("[]\n" if separator == "[\n" else "\n]\n")
