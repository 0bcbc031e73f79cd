"""The page of a report: one HTML file with everything in it."""

from __future__ import annotations

from collections.abc import Callable

from pilotfish.bench.plots import plots
from pilotfish.bench.render import render
from pilotfish.bench.report import Report
from pilotfish.bench.summary import Result
from pilotfish.bench.tables import remarks, tables, where


def page(report: Report) -> str:
    """The whole page, for light and dark screens."""
    return render(
        "pilotfish.bench",
        report=report,
        facts=_facts(report),
        headlines=_headlines(report),
        tables=tables(report),
        remarks=remarks(report),
        plots=plots(report),
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    """(name, value) of what the numbers belong to."""
    info = report.origin.server
    draft = f"{report.draft}, {info.draft_replica_count} replicas" if info.draft_replica_count > 1 else report.draft
    models = [("model", info.model)] if report.origin.is_foreign else [("target", info.model), ("draft", draft)]
    return [
        *models,
        *report.origin.facts,
        ("prompts", report.prompts),
        (
            "a pass",
            f"{report.requests} requests of at most {report.max_tokens} tokens; {report.repeats} passes of a setting",
        ),
        ("date", report.origin.date.replace("T", " ")),
    ]


def _headlines(report: Report) -> list[tuple[str, str, bool]]:
    """(value, what it is, whether it is a loss): the most that was reached, and beside the best speed-up the worst."""
    found = []

    def tell(value: str, what: str, result: Result, *, is_loss: bool = False) -> None:
        found.append((value, f"{what} ({where(report, result)})", is_loss))

    if sped := _ranked(report, lambda each: each.speed_up if each.setting.draft_length != 0 else None):
        (best, at_best), (worst, at_worst) = sped[0], sped[-1]
        tell(f"{best:.2f}×", "best speed-up over speculation off", at_best, is_loss=best < 1)
        if len(sped) > 1:
            what = "where speculation loses most" if worst < 1 else "where speculation gains least"
            tell(f"{worst:.2f}×", what, at_worst, is_loss=worst < 1)
    if rates := _ranked(report, lambda each: each.tokens_per_s):
        tell(f"{rates[0][0]:.0f}", "tokens per second at most", rates[0][1])
    if drafting := _ranked(report, lambda each: each.tokens_per_round if each.drafted else None):
        value, result = drafting[0]
        tell(f"{value:.2f}", "tokens per round at most", result)
        found.append(
            (f"{result.acceptance_rate:.0%}", "of its draft tokens kept, of those with all parents kept", False)
        )
    return found


def _ranked(report: Report, value_of: Callable[[Result], float | None]) -> list[tuple[float, Result]]:
    """The results that have a value, and it, the highest first."""
    found = [(value, each) for each in report.results if (value := value_of(each)) is not None]
    return sorted(found, key=lambda pair: -pair[0])
