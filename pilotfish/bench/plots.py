"""The plots of a report, as SVG that takes its colours and its type from the page around it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from pilotfish.bench import svg
from pilotfish.bench.records import Load, Setting
from pilotfish.bench.report import Report
from pilotfish.bench.summary import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PARTS = ("target", "draft", "hops", "orchestrator")

Value = TypeVar("Value")


def plots(report: Report) -> list[svg.Plot]:
    """All that the results have something for."""
    figures = [
        ("Speed-up against K", _SPEED_UP_NOTE, _speed_up),
        ("Tokens per second", _THROUGHPUT_NOTE, _throughput),
        ("Acceptance per position", _ACCEPTANCE_NOTE, _acceptance),
        ("Where a round's time goes", _SPLIT_NOTE, _split),
        ("Latency", _LATENCY_NOTE, _latency),
    ]
    return svg.plots(report, figures)


_SPEED_UP_NOTE = (
    "Over speculation off in the same run, which wins where it is shaded. Points are medians; the bars span the "
    "repeats, from the least to the most."
)
_THROUGHPUT_NOTE = "All requests together. Points are medians; the bars span the repeats."
_ACCEPTANCE_NOTE = "Of the draft tokens at each depth whose parents were all kept, the share that was kept."
_SPLIT_NOTE = "Medians of each part of a round; the number at the end is the tokens that a round brings."
_LATENCY_NOTE = "The share of requests, or of tokens, that waited at most so long."


def _speed_up(report: Report, shape: svg.Shape) -> Figure | None:
    if not any(result.speed_up for result in report.results if result.setting.draft_length != 0):
        return None
    lengths, loads = _draft_lengths(report)[1:], _loads(report)
    figure, panels = _temperature_panels(report, shape, 3.2)
    for axes, temperature in panels:
        axes.axhline(1, color=svg.INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.axhspan(0, 1, color=svg.FAINT, alpha=0.18, linewidth=0)
        for index, (colour, load) in enumerate(zip(_colours(), loads, strict=False)):
            results = _where(report, load=load, temperature=temperature)
            found = [result for result in results if result.setting.draft_length != 0 and result.speed_up]
            at = [lengths.index(result.setting.draft_label) + _beside(index, len(loads)) for result in found]
            _points(axes, at, [result.pass_speed_ups for result in found], colour, load.label)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_xlim(-0.4, len(lengths) - 0.6)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("most draft tokens a round, K")
    panels[0][0].set_ylabel("speed-up")
    return _with_legend(figure, panels[0][0], shape)


def _throughput(report: Report, shape: svg.Shape) -> Figure | None:
    loads, lengths = _loads(report), _draft_lengths(report)
    if len(loads) < 2:
        return None
    figure, panels = _temperature_panels(report, shape, 3.2)
    for axes, temperature in panels:
        for index, (colour, length) in enumerate(zip(_colours(), lengths, strict=False)):
            found = [result for result in _where(report, length=length, temperature=temperature) if result.tokens_per_s]
            at = [loads.index(result.setting.load) + _beside(index, len(lengths)) for result in found]
            _points(axes, at, [result.pass_tokens_per_s for result in found], colour, f"K {length}")
        axes.set_xticks(range(len(loads)), [load.number for load in loads])
        axes.set_xlim(-0.4, len(loads) - 0.6)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at once" if loads[0].rate is None else "requests a second")
    panels[0][0].set_ylabel("tokens per second")
    return _with_legend(figure, panels[0][0], shape)


def _acceptance(report: Report, shape: svg.Shape) -> Figure | None:
    if not any(result.judged_per_position for result in report.results):
        return None
    figure, panels = _temperature_panels(report, shape, 2.8)
    for axes, temperature in panels:
        for colour, length in zip(_colours(), _draft_lengths(report), strict=False):
            shares = _shares(_where(report, length=length, temperature=temperature))
            if shares:
                axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour, label=f"K {length}")
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("position in the draft")
    panels[0][0].set_ylabel("kept")
    return _with_legend(figure, panels[0][0], shape)


def _split(report: Report, shape: svg.Shape) -> Figure | None:
    shown = [(result, split) for result in report.results if (split := result.median_round) is not None]
    if not shown:
        return None
    row_height = 0.5 if shape.is_narrow else 0.34
    figure, [(axes, _)] = _panels([None], shape, 0.9 + row_height * len(shown))
    left = [0.0] * len(shown)
    for colour, part in zip(_colours(), _PARTS, strict=False):
        values = [getattr(split, part) for _, split in shown]
        axes.barh(
            range(len(shown)), values, left=left, height=0.36 if shape.is_narrow else 0.66, color=colour, label=part
        )
        left = [before + value for before, value in zip(left, values, strict=True)]
    labels = [f"{_cell_label(report, result.setting)}, K {result.setting.draft_label}" for result, _ in shown]
    ends = [f"{split.total:.3g} ms, {result.tokens_per_round:.2f} tokens" for result, split in shown]
    for row, (label, end) in enumerate(zip(labels, ends, strict=True)):
        # On a narrow figure both stand above the bar, where there is room for them.
        at, text = ((0.0, row - 0.36), f"{label}: {end}") if shape.is_narrow else ((left[row], row), end)
        offset = (0, 0) if shape.is_narrow else (5, 0)
        axes.annotate(text, at, offset, textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(shown)), [""] * len(shown) if shape.is_narrow else labels)
    axes.set_xlim(0, max(left) * (1 if shape.is_narrow else 1.22))
    axes.set_xlabel("milliseconds")
    axes.grid(visible=False, axis="y")
    axes.set_ylim(len(shown) - 0.4, -0.6)  # the first row on top
    return _with_legend(figure, axes, shape)


def _latency(report: Report, shape: svg.Shape) -> Figure | None:
    results = [result for result in report.results if result.first_token is not None]
    if not results:
        return None
    cells = list({(each.setting.load, each.setting.temperature): each.setting for each in results}.values())
    columns = shape.columns
    bands = [cells[first : first + columns] for first in range(0, len(cells), columns)]
    panels_of = [(kind, cell) for band in bands for kind in ("first_token", "inter_token") for cell in band]
    figure, panels = _panels(panels_of, shape, 2.6, min(len(cells), columns))
    for axes, (kind, cell) in panels:
        slowest = 0.0
        for colour, length in zip(_colours(), _draft_lengths(report), strict=False):
            for result in _where(report, load=cell.load, temperature=cell.temperature, length=length):
                if (spread := getattr(result, kind)) is not None:
                    axes.plot(spread.percentiles, range(101), color=colour, label=f"K {length}")
                    slowest = max(slowest, spread.p99)
        axes.set_title(_cell_label(report, cell))
        axes.set_xlabel(f"{kind.replace('_', ' ')}, ms")
        axes.set_xlim(0, 1.05 * slowest or 1)  # one straggler must not squeeze the rest
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter("{x:.0f} %")
        axes.locator_params(axis="x", nbins=4)
    return _with_legend(figure, panels[0][0], shape)


def _where(
    report: Report, load: Load | None = None, temperature: float | None = None, length: str | None = None
) -> list[Result]:
    """The results of a load, a temperature and a draft length; None takes all."""
    wanted = (load, temperature, length)
    return [
        result
        for result in report.results
        if all(
            value in (None, own)
            for value, own in zip(
                wanted, (result.setting.load, result.setting.temperature, result.setting.draft_label), strict=True
            )
        )
    ]


def _temperatures(report: Report) -> list[float]:
    return list(dict.fromkeys(result.setting.temperature for result in report.results))


def _loads(report: Report) -> list[Load]:
    return list(dict.fromkeys(result.setting.load for result in report.results))


def _draft_lengths(report: Report) -> list[str]:
    lengths = dict.fromkeys(result.setting.draft_label for result in report.results)
    return sorted(lengths, key=lambda label: label != "off")  # off first: every plot gives it the first colour


def _cell_label(report: Report, setting: Setting) -> str:
    many = len(_temperatures(report)) > 1
    return setting.load.label + (f", temperature {setting.temperature:g}" if many else "")


def _shares(results: Sequence[Result]) -> list[float]:
    """Per position, over several results."""
    depth = max((len(result.judged_per_position) for result in results), default=0)

    def total(counts: Sequence[tuple[int, ...]], position: int) -> int:
        return sum(each[position] for each in counts if position < len(each))

    kept, judged = [result.kept_per_position for result in results], [result.judged_per_position for result in results]
    return [total(kept, position) / total(judged, position) for position in range(depth)]


def _colours() -> Iterator[str]:
    while True:
        yield from svg.SERIES


def _beside(index: int, count: int) -> float:
    """How far from its place a point stands, so that spans at one place can be told apart."""
    return 0.04 * (index - (count - 1) / 2)


def _points(axes: Axes, at: list[float], values: list[tuple[float, ...]], colour: str, label: str) -> None:
    """A dotted line through medians, and at each the span of what it is the median of."""
    axes.plot(at, [statistics.median(each) for each in values], "o:", linewidth=1.2, color=colour, label=label)
    for x, each in zip(at, values, strict=True):
        axes.vlines(x, min(each), max(each), color=colour, linewidth=1.5)


def _with_legend(figure: Figure, axes: Axes, shape: svg.Shape) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(
            handles, labels, loc="outside upper left", ncols=shape.legend, handlelength=1.2, columnspacing=1.4
        )
    return figure


def _temperature_panels(report: Report, shape: svg.Shape, height: float) -> tuple[Figure, list[tuple[Axes, float]]]:
    """A panel for each temperature."""
    temperatures = _temperatures(report)
    figure, panels = _panels(temperatures, shape, height, is_same_scale=True)
    if len(temperatures) > 1:
        for axes, temperature in panels:
            axes.set_title(f"temperature {temperature:g}")
    return figure, panels


def _panels(
    values: Sequence[Value], shape: svg.Shape, height: float, columns: int | None = None, is_same_scale: bool = False
) -> tuple[Figure, list[tuple[Axes, Value]]]:
    """A figure with a panel for each value, ``columns`` of them beside one another; ``height`` of a row in inches."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a screen

    columns = columns or min(len(values), shape.columns)
    rows = -(-len(values) // columns)
    figure = Figure(figsize=(shape.width, height * rows))
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=is_same_scale).flat)
    for unused in grid[len(values) :]:
        unused.set_visible(False)
    return figure, list(zip(grid, values, strict=False))
