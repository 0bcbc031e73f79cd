"""Draws rounds of a trace as a picture, for those who have no viewer at hand.

    pilotfish up --simulate llama-8b-h100 --trace trace.json     # ask it something, then stop it
    python bench/draw_trace.py trace.json --skip 20 --rounds 2 --out round.svg

One lane for the orchestrator and one for each worker; broken lines are where rounds begin. What the orchestrator does
while a worker has a step costs a round nothing. Spans of the workers are estimates, as orchestrator/trace.py says.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.bench import svg

DRAFT, TARGET, HIDDEN, EXPOSED = svg.SERIES[1], svg.SERIES[0], svg.SERIES[4], svg.SERIES[2]
UNDER_WAY = "under way"  # of a step, from being sent to being answered
SHORTEST_NAMED = 0.07  # of the picture's width


@dataclass(frozen=True)
class Span:
    """Times in milliseconds since the first round that is drawn began."""

    lane: str
    name: str
    begin: float
    end: float

    @property
    def is_ours(self) -> bool:
        """Whether the orchestrator did it."""
        return self.lane.startswith("orchestrator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="file that --trace wrote")
    parser.add_argument("--skip", type=int, default=20, help="rounds before the first that is drawn (20)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds to draw (2)")
    parser.add_argument(
        "--window",
        type=float,
        nargs=2,
        metavar=("BEGIN", "END"),
        help="milliseconds from where the first round begins (all rounds)",
    )
    parser.add_argument("--out", type=Path, default=Path("round.svg"), help="file to write (round.svg)")
    arguments = parser.parse_args()
    events = [event for event in json.loads(arguments.trace.read_text(encoding="utf-8")) if event]
    rounds = sorted(event["ts"] for event in events if event["name"] == "round")[arguments.skip :]
    if len(rounds) <= arguments.rounds:
        raise SystemExit(f"{arguments.trace} has no {arguments.rounds} rounds after the first {arguments.skip}")
    origin = rounds[0]
    bounds = [(ts - origin) / 1e3 for ts in rounds[: arguments.rounds + 1]]
    window = arguments.window or (0.0, bounds[-1])
    if window[0] >= window[1]:
        raise SystemExit(f"--window is {window[0]:g} {window[1]:g}; BEGIN must come before END")
    arguments.out.write_text(draw(spans(events, origin, *window), bounds, *window), encoding="utf-8")
    print(f"wrote {arguments.out}")


def spans(events: list[dict[str, Any]], origin: float, first: float, last: float) -> list[Span]:
    """What happened between two times, cut there.

    Args:
        events: of the trace.
        origin: its time at which the first round begins, in microseconds.
        first, last: milliseconds from there.
    """
    processes = {event["pid"]: event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = {(e["pid"], e["id"]): e["ts"] for e in events if e["ph"] == "b"}
    found = []
    for event in events:
        if event["ph"] == "e" and event["cat"] == "step":  # the target also answers reads of features, beside steps
            name, began, ended = UNDER_WAY, steps[event["pid"], event["id"]], event["ts"]
        elif event["ph"] == "X" and threads[event["pid"], event["tid"]] in ("work", "model"):
            name, began, ended = event["name"], event["ts"], event["ts"] + event["dur"]
        else:
            continue
        begin, end = max((began - origin) / 1e3, first), min((ended - origin) / 1e3, last)
        if begin < end:
            found.append(Span(f"{processes[event['pid']]} {event['pid']}", name, begin, end))
    return found


def draw(found: list[Span], bounds: list[float], first: float, last: float) -> str:
    """The picture as an SVG file.

    Args:
        found: what to draw.
        bounds: where rounds begin.
        first, last: ends of the picture; all in milliseconds.
    """
    kinds = ["draft", "orchestrator", "target"]
    lanes = sorted({span.lane for span in found}, key=lambda lane: (kinds.index(lane.split()[0]), lane))
    steps = [span for span in found if span.name == UNDER_WAY]
    title = "Rounds of a trace"
    with svg.style(title):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(svg.WIDTH, 1.0 + 0.5 * len(lanes)))
        axes = figure.subplots()
        for bound in bounds:
            axes.axvline(bound, color=svg.INK, linewidth=0.8, linestyle=(0, (4, 3)))
        for span in (span for span in found if span.name != UNDER_WAY):
            length, lane = span.end - span.begin, lanes.index(span.lane)
            axes.barh(lane, length, left=span.begin, height=0.6, color=_colour(span, steps))
            if length > SHORTEST_NAMED * (last - first):
                axes.annotate(span.name, (span.begin + length / 2, lane), ha="center", va="center", color="#ffffff")
        for label, colour in (("orchestrator, while a worker has a step", HIDDEN), ("while none has", EXPOSED)):
            axes.barh(0, 0, color=colour, label=label)
        axes.set_yticks(range(len(lanes)), [lane.split()[0] for lane in lanes])
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(first, last)
        axes.set_xlabel("milliseconds")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.0, columnspacing=1.4)
        return svg.standalone(figure, title)


def _colour(span: Span, steps: list[Span]) -> str:
    if not span.is_ours:
        return DRAFT if span.lane.startswith("draft") else TARGET
    middle = (span.begin + span.end) / 2
    return HIDDEN if any(other.begin <= middle <= other.end for other in steps) else EXPOSED


if __name__ == "__main__":
    main()
