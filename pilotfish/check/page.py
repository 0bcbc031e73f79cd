"""The page of a report: one HTML file with everything in it."""

from __future__ import annotations

from pilotfish.bench.render import render
from pilotfish.check.plots import plots
from pilotfish.check.report import POWER_NOTE, Report, numbers, verdict
from pilotfish.check.setting import Setting


def page(report: Report) -> str:
    """The whole page, for light and dark screens."""
    return render(
        "pilotfish.check",
        report=report,
        verdict=verdict(report),
        headlines=_headlines(report),
        facts=_facts(report),
        numbers=numbers,
        plots=plots(report),
    )


def _headlines(report: Report) -> list[tuple[str, str, str]]:
    """(value, what it is, its look)."""
    counts = report.counts(report.results)
    found = [(f"{counts['passed']}", "passed", "none" if report.unfinished else "passed")]
    if report.unfinished:
        found.insert(0, (f"{len(report.unfinished)}", "checks that did not come to their end", "failed"))
    found.append((f"{counts['failed']}", "failed", "failed" if counts["failed"] else "none"))
    if counts["skipped"]:
        found.append((f"{counts['skipped']}", "skipped, with the reason", "none"))
    found.append((f"{report.requests:,}", f"answers of {report.tokens:,} tokens, in {report.seconds:.0f} s", "none"))
    return found


def _extent(setting: Setting) -> str:
    return "everything in full" if setting.budget_s is None else f"what fits into {setting.budget_s:.0f} s"


def _facts(report: Report) -> list[tuple[str, str]]:
    """(name, value) of what the findings belong to."""
    info = report.origin.server
    replicas = f", {info.draft_replica_count} replicas" if info.draft_replica_count > 1 else ""
    return [
        ("target", info.model),
        ("draft", info.draft_model + replicas if info.draft_replica_count else "no draft"),
        *report.origin.facts,
        ("run", f"{_extent(report.setting)}, seed {report.setting.seed}"),
        (
            "statistics",
            f"{len(report.statistical)} tests; by chance alone any of them fails in one of "
            f"{1 / report.setting.false_alarms:,.0f} runs against a sound deployment",
        ),
        ("power", POWER_NOTE),
        ("date", report.origin.date.replace("T", " ")),
    ]
