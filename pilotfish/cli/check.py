"""``pilotfish check``: whether a deployment does what it promises."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from pilotfish.check.setting import Setting
from pilotfish.cli import options
from pilotfish.cli.console import note, stderr, stdout
from pilotfish.cli.running import INTERRUPTED, running_server, up_flags
from pilotfish.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pilotfish.check.checks import Check
    from pilotfish.check.report import Report
    from pilotfish.check.results import Result, Status

_STYLES: dict[Status, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}


def check(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", envvar="PILOTFISH_SERVER", help="Orchestrator to ask. Left out: one is started."
        ),
    ] = None,
    up: Annotated[
        str, typer.Option("--up", metavar="FLAGS", help="Of `pilotfish up`, for the server that is started.")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Just this check; repeatable.")
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", metavar="", help="Say what checks there are, and ask nothing.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", metavar="", help="A third of the questions: finds what is badly wrong.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="All seeds of requests come from it.")] = 0,
    false_alarms: Annotated[
        float,
        typer.Option(
            metavar="RATE", min=1e-12, max=0.5, help="Probability that chance alone fails a sound deployment."
        ),
    ] = 0.001,
    near_tie: Annotated[
        float,
        typer.Option(metavar="GAP", min=0, help="Logits so near may change places by rounding: told, and no failure."),
    ] = 0.05,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="Most requests at once.")] = 32,
    timeout: options.Timeout = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with all results and plots (.html).")
    ] = None,
) -> None:
    """Check that a deployment does what it promises, by asking it as a client would.

    What is exact is compared token for token: greedy and seeded text with
    speculation and without, ends, mixed batches. What is random is judged by
    chi-square tests, which together fail a sound deployment once in 1000
    runs (--false-alarms). Leave the server to the check alone if you can:
    others' requests do not change its answers, and make it slow.

    Exits with 0 if nothing failed, with 1 if something did, with 2 if the
    command line is wrong.

    [dim]$ pilotfish check --quick[/]
    [dim]$ pilotfish check --server 10.0.0.5:50050 --report check.html[/]
    [dim]$ pilotfish check --up "--draft smollm2-mtp" --only greedy --only ends[/]
    [dim]$ pilotfish check --list[/]
    """
    checks = _chosen(only or [])
    if show_list:
        _show_list(checks)
        return
    flags = _flags(up, server)
    if report is not None:
        _prepare(report)
    setting = Setting(
        seed=seed,
        is_quick=quick,
        false_alarms=false_alarms,
        near_tie=near_tie,
        concurrency=concurrency,
        timeout_s=timeout,
    )
    with running_server(flags) if server is None else nullcontext(server) as address:
        found, is_whole = asyncio.run(_run(checks, setting, address, None if server else up))
    _show(found)
    if report is not None:
        from pilotfish.check.page import page

        report.write_text(page(found), encoding="utf-8")
        note(f"wrote {report}")
    if not is_whole:
        raise typer.Exit(INTERRUPTED)
    if found.status == "failed":
        raise typer.Exit(1)


def _chosen(names: Sequence[str]) -> list[Check]:
    from pilotfish.check.checks import chosen

    try:
        return chosen(names)
    except InvalidArgumentError as error:
        raise typer.BadParameter(f"--only: {error}") from error


def _show_list(checks: Sequence[Check]) -> None:
    for each in checks:
        stdout.print(Text.assemble((f"{each.name:<12}", "cyan"), each.about), soft_wrap=True)


def _flags(up: str, server: str | None) -> list[str]:
    """What to start a server with."""
    if up and server is not None:
        raise typer.BadParameter("--up starts a server and --server names a running one; give one of them")
    return up_flags(up)


def _prepare(report: Path) -> None:
    """Finds out before anything is asked whether the report can be written.

    Raises:
        PilotfishError: it cannot.
    """
    from pilotfish.bench.svg import require_matplotlib

    require_matplotlib("--report")
    if not os.access(report.parent, os.W_OK) or report.is_dir():
        raise InvalidArgumentError(f"--report is {report}, which cannot be written: no such folder, or not allowed")


async def _run(checks: Sequence[Check], setting: Setting, address: str, up: str | None) -> tuple[Report, bool]:
    """Runs the checks; the report, and whether it is of all of them."""
    from pilotfish.bench.origin import of_this_process
    from pilotfish.check.asking import Asker
    from pilotfish.check.report import Report
    from pilotfish.check.run import EVERY_ANSWER, run
    from pilotfish.check.significance import decide
    from pilotfish.client.aio import AsyncClient

    began, started = datetime.now().astimezone(), time.perf_counter()
    results: list[Result] = []
    is_whole = True
    async with AsyncClient(address) as client:
        info = await client.server_info(timeout=setting.timeout_s)
        capabilities = await client.capabilities(timeout=setting.timeout_s)
        with _progress(len(checks)) as progress:
            asker = Asker(client, info, capabilities, setting, progress)
            try:
                async for result in run(asker, checks, progress.on_check):
                    results.append(result)
            except asyncio.CancelledError:  # Ctrl-C, once
                note("stopped before the end")
                is_whole = False
                if not results:
                    raise
    report = Report(
        origin=of_this_process(info, address, up, began),
        setting=setting,
        about={check.name: check.about for check in checks} | {EVERY_ANSWER: "counts, ends and ids of all answers"},
        results=decide(results, setting.false_alarms),
        requests=asker.requests,
        tokens=asker.tokens,
        seconds=time.perf_counter() - started,
    )
    return report, is_whole


class _Bars:
    """A bar of the checks, and one of the requests of the present step."""

    def __init__(self, progress: Progress, checks: int) -> None:
        self._progress = progress
        self._checks = progress.add_task("checks", total=checks)
        self._requests: TaskID = progress.add_task("", total=None)
        self._begun = 0

    def on_check(self, check: Check) -> None:
        self._progress.update(self._checks, description=check.name, completed=self._begun)
        self._begun += 1

    def begin(self, what: str, count: int) -> None:
        self._progress.reset(self._requests, description=f"  {what}", total=count)

    def advance(self) -> None:
        self._progress.advance(self._requests)


class _Lines:
    """A line for each check, where there is no terminal."""

    def on_check(self, check: Check) -> None:
        stderr.print(Text(f"{check.name}: {check.about}"), soft_wrap=True)

    def begin(self, what: str, count: int) -> None:
        pass

    def advance(self) -> None:
        pass


@contextmanager
def _progress(checks: int) -> Iterator[_Bars | _Lines]:
    """Shows how far the run is."""
    if not stderr.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        yield _Bars(progress, checks)


def _show(report: Report) -> None:
    """Prints a line for each check, what failed or was skipped, and the verdict."""
    from pilotfish.check.report import numbers, smallest, verdict

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("check", style="cyan")
    for name in ("passed", "failed", "skipped", "smallest p"):
        table.add_column(name, justify="right")
    for name, results in report.groups.items():
        counts, least = report.counts(results), smallest(results)
        cells = [
            Text(f"{counts[status] or '–'}", style=style if counts[status] else "dim")
            for status, style in _STYLES.items()
        ]
        table.add_row(name, *cells, "–" if least is None else f"{least:.2g}")
    stdout.print()
    stdout.print(table)
    for result in report.results:
        if result.status != "passed" or result.why:
            stdout.print()
            stdout.print(Text.assemble((result.status, _STYLES[result.status]), f"  {result.check}: {result.name}"))
            for line in filter(None, (result.why, numbers(result))):
                stdout.print(Text(f"  {line}", style="" if line == result.why else "dim"), soft_wrap=True)
    stdout.print()
    stdout.print(Text(verdict(report), style=_STYLES[report.status]), soft_wrap=True)
