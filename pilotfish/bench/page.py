"""The page of a report: one HTML file with everything in it."""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.bench.plots import plots
from pilotfish.bench.render import render
from pilotfish.bench.report import Report
from pilotfish.bench.summary import Result
from pilotfish.bench.tables import remarks, tables


def page(report: Report) -> str:
    """The whole page, for light and dark screens."""
    return render(
        "pilotfish.bench",
        report=report,
        facts=_facts(report),
        headlines=_headlines(report.results),
        tables=tables(report),
        remarks=remarks(report),
        plots=plots(report),
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """(name, value) of what the numbers belong to."""
    info = report.origin.server
    return [
        ("target", info.model),
        (
            "draft",
            f"{report.draft}, {info.draft_replica_count} replicas" if info.draft_replica_count > 1 else report.draft,
        ),
        *report.origin.facts,
        ("prompts", report.prompts),
        (
            "a pass",
            f"{report.requests} requests of at most {report.max_tokens} tokens; {report.repeats} passes of a setting",
        ),
        ("date", report.origin.date.replace("T", " ")),
    ]


def _headlines(results: Sequence[Result]) -> list[tuple[str, str]]:
    """(value, what it is): the most that was reached."""
    found = []
    if sped := [(value, result) for result in results if result.drafted and (value := result.speed_up)]:
        value, result = max(sped, key=lambda pair: pair[0])
        found.append((f"{value:.2f}×", f"best speed-up over speculation off ({_where(result)})"))
    if rates := [(value, result) for result in results if (value := result.tokens_per_s)]:
        value, result = max(rates, key=lambda pair: pair[0])
        found.append((f"{value:.0f}", f"tokens per second at most ({_where(result)})"))
    if drafting := [(value, result) for result in results if result.drafted and (value := result.tokens_per_round)]:
        value, result = max(drafting, key=lambda pair: pair[0])
        found.append((f"{value:.2f}", f"tokens per round at most ({_where(result)})"))
        found.append((f"{result.acceptance_rate:.0%}", "of its draft tokens kept, of those with all parents kept"))
    return found


def _where(result: Result) -> str:
    return f"{result.setting.load.label}, K {result.setting.draft_label}"
