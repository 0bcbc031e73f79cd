"""The page of a report: one HTML file with everything in it."""

from __future__ import annotations

from pilotfish.bench.render import render
from pilotfish.check.plots import plots
from pilotfish.check.report import Report, numbers, verdict


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
    found = [(f"{counts['passed']}", "passed", "passed")]
    found.append((f"{counts['failed']}", "failed", "failed" if counts["failed"] else "none"))
    if counts["skipped"]:
        found.append((f"{counts['skipped']}", "skipped, with the reason", "none"))
    found.append((f"{report.requests:,}", f"answers of {report.tokens:,} tokens, in {report.seconds:.0f} s", "none"))
    return found


def _facts(report: Report) -> list[tuple[str, str]]:
    """(name, value) of what the findings belong to."""
    info = report.origin.server
    replicas = f", {info.draft_replica_count} replicas" if info.draft_replica_count > 1 else ""
    return [
        ("target", info.model),
        ("draft", info.draft_model + replicas if info.draft_replica_count else "no draft"),
        *report.origin.facts,
        ("run", f"{'quick' if report.setting.is_quick else 'full'}, seed {report.setting.seed}"),
        (
            "statistics",
            f"{len(report.statistical)} tests; by chance alone any of them fails in one of "
            f"{1 / report.setting.false_alarms:,.0f} runs against a sound deployment",
        ),
        ("date", report.origin.date.replace("T", " ")),
    ]
