"""The plots of a report, as SVG that takes its colours and its type from the page around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pilotfish.bench import svg
from pilotfish.check.report import Report
from pilotfish.check.results import Counts
from pilotfish.check.significance import SAFETY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = 6  # tests shown, those with the smallest p-values
_OUTCOMES = 16  # of a test, at most
_SMALLEST = 1e-12  # p-values below it are drawn there


def plots(report: Report) -> list[svg.Plot]:
    """All that the results have something for."""
    figures = [
        ("All p-values", _P_VALUES_NOTE, _p_values),
        ("The least likely counts", _COUNTS_NOTE, _counts),
    ]
    return svg.plots(report, figures)


_P_VALUES_NOTE = (
    "Each dot is a test. Of a sound deployment they lie along the diagonal, since its p-values are even "
    "between 0 and 1; those below the dashed line fail (Holm's procedure)."
)
_COUNTS_NOTE = (
    "Bars: how often each outcome came. Dots: how often it should have come, with the span that one standard deviation "
    "gives. Shown are the tests with the smallest p-values, passed or not."
)


def _p_values(report: Report, shape: svg.Shape) -> Figure | None:
    results = report.statistical
    if len(results) < 2:
        return None
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a screen

    figure = Figure(figsize=(shape.width, 3.4))
    axes = figure.subplots()
    count = len(results)
    even = [(rank + 0.5) / count for rank in range(count)]
    shown = [max(result.p_value or 0.0, _SMALLEST) for result in results]
    axes.plot(even, even, color=svg.FAINT, linewidth=1.2, label="even")
    limits = [report.setting.false_alarms / SAFETY / (count - rank) for rank in range(count)]
    axes.plot(even, limits, color=svg.INK, linewidth=1, linestyle=(0, (4, 3)), label="fails below")
    for colour, status in ((svg.SERIES[1], "passed"), (svg.SERIES[2], "failed")):
        points = [(x, y) for x, y, each in zip(even, shown, results, strict=True) if each.status == status]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, label=status)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("share of tests that should have a p-value so small")
    axes.set_ylabel("p-value")
    figure.legend(loc="outside upper left", ncols=min(4, shape.legend), handlelength=1.6)
    return figure


def _counts(report: Report, shape: svg.Shape) -> Figure | None:
    results = [each for each in report.statistical if each.counts is not None and each.counts.labels][:_PANELS]
    if not results:
        return None
    from matplotlib.figure import Figure

    columns = min(2, shape.columns)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(shape.width, 2.4 * rows))
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in grid[len(results) :]:
        unused.set_visible(False)
    for axes, result in zip(grid, results, strict=False):
        assert result.counts is not None
        _outcomes(axes, result.counts, svg.SERIES[2] if result.status == "failed" else svg.SERIES[1])
        axes.set_title(f"{result.name}, p = {result.p_value:.1g}", fontsize=9)
    return figure


def _outcomes(axes: Axes, counts: Counts, colour: str) -> None:
    labels, observed, expected = counts.labels[:_OUTCOMES], counts.observed[:_OUTCOMES], counts.expected[:_OUTCOMES]
    at = range(len(labels))
    axes.bar(at, observed, color=colour, width=0.7)
    axes.errorbar(at, expected, [each**0.5 for each in expected], fmt="o", color=svg.INK, markersize=3, linewidth=1)
    axes.set_xticks(at, labels, fontsize=7, rotation=45 if len(labels) > 8 else 0)
    axes.grid(visible=False, axis="x")
    axes.set_ylim(bottom=0)
