"""``pilotfish check``: whether a deployment does what it promises."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from pilotfish.check.setting import LABORATORY, QUICK_S, Setting
from pilotfish.cli import options
from pilotfish.cli.check_progress import shown
from pilotfish.cli.console import note, stdout
from pilotfish.cli.running import running_servers, up_flags
from pilotfish.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pilotfish.check.checks import Check
    from pilotfish.check.report import Outcome, Report
    from pilotfish.check.results import Status

_STYLES: dict[Status, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}
_VERDICTS: dict[Outcome, str] = {"passed": "green", "failed": "red", "skipped": "yellow", "incomplete": "yellow"}


def check(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT", envvar="PILOTFISH_SERVER", help="Orchestrator to ask. Left out: one is started."
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
        bool, typer.Option("--quick", metavar="", help="Two minutes: --budget 120. Finds what is badly wrong.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Measure the server's speed, and ask as much as fits into so long. Left out: everything in full.",
        ),
    ] = None,
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

    Without --server, two tiny models that disagree are started beside the
    server, the laboratory: very many of their tokens are judged in a short time.

    Exits with 0 if nothing failed, with 1 if something did or a check did
    not come to its end, with 2 if the command line is wrong.

    [dim]$ pilotfish check --quick[/]
    [dim]$ pilotfish check --server 10.0.0.5:50050 --report check.html[/]
    [dim]$ pilotfish check --up "--draft smollm2-mtp" --only greedy --only ends[/]
    [dim]$ pilotfish check --list[/]
    """
    checks = _chosen(only or [])
    if show_list:
        _show_list(checks)
        return
    if quick and budget is not None:
        raise typer.BadParameter("--quick is --budget 120; give one of them")
    flags = _flags(up, server)
    if report is not None:
        _prepare(report)
    setting = Setting(
        seed=seed,
        budget_s=QUICK_S if quick else budget,
        false_alarms=false_alarms,
        near_tie=near_tie,
        concurrency=concurrency,
        timeout_s=timeout,
    )
    with _servers(server, flags, has_laboratory=any(check.name == LABORATORY for check in checks)) as addresses:
        found, signalled = asyncio.run(_run(checks, setting, addresses, None if server else up))
    _show(found)
    if report is not None:
        from pilotfish.check.page import page

        report.write_text(page(found), encoding="utf-8")
        note(f"wrote {report}")
    if signalled is not None:
        raise typer.Exit(128 + signalled)
    if found.status in ("failed", "incomplete"):
        raise typer.Exit(1)


@contextmanager
def _servers(server: str | None, flags: Sequence[str], has_laboratory: bool) -> Iterator[list[str]]:
    """The address to ask, and that of the laboratory if it runs: beside a server that this command starts."""
    if server is not None:
        yield [server]
        return
    with tempfile.TemporaryDirectory(prefix="pilotfish-") as scratch:
        asked = [list(flags)]
        if has_laboratory:
            from pilotfish.check.tiny_models import write_models

            target, draft = write_models(Path(scratch))
            asked.append(["--target", str(target), "--draft", str(draft), "--draft-length", "4", "--draft-tree", "off"])
        with running_servers(*asked) as addresses:
            yield addresses


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


async def _run(
    checks: Sequence[Check], setting: Setting, addresses: Sequence[str], up: str | None
) -> tuple[Report, signal.Signals | None]:
    """Runs the checks; the report, and the signal that ended it early."""
    from pilotfish.bench.origin import of_this_process
    from pilotfish.check.asking import Asker
    from pilotfish.check.laboratory import GROWTH, PLENTY
    from pilotfish.check.report import Report
    from pilotfish.check.results import EVERY_ANSWER
    from pilotfish.check.run import Run
    from pilotfish.check.significance import decide
    from pilotfish.client.aio import AsyncClient

    began, started = datetime.now().astimezone(), time.perf_counter()
    run = Run(checks)
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(shown())
        asker: Asker | None = None
        for address in reversed(addresses):  # the laboratory comes second, and is given to the first
            client = await stack.enter_async_context(AsyncClient(address))
            info = await client.server_info(timeout=setting.timeout_s)
            capabilities = await client.capabilities(timeout=setting.timeout_s)
            asker = Asker(client, info, capabilities, setting, progress, asker)
        assert asker is not None
        if asker.laboratory is not None:
            asker.laboratory.plenty, asker.laboratory.growth = PLENTY, GROWTH
        with _cancelled_by_signals() as signals:
            try:
                await run.go(asker, progress)
            except asyncio.CancelledError:
                if not signals:
                    raise
                run.stopped = f"stopped by {signals[0].name}"
    askers = [each for each in (asker, asker.laboratory) if each is not None]
    report = Report(
        origin=of_this_process(asker.info, addresses[0], up, began),
        setting=setting,
        about={check.name: check.about for check in checks} | {EVERY_ANSWER: "counts, ends and ids of all answers"},
        results=decide(run.results, setting.false_alarms),
        requests=sum(each.requests for each in askers),
        tokens=sum(each.tokens for each in askers),
        seconds=time.perf_counter() - started,
        unfinished=tuple(check.name for check in checks if check.name not in run.ended),
        stopped=run.stopped,
    )
    return report, signals[0] if signals else None


@contextmanager
def _cancelled_by_signals() -> Iterator[list[signal.Signals]]:
    """Ctrl-C and SIGTERM cancel this task, so that what was found so far is still told; a second one ends the command.

    Yields the signal that came, once it has.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    came: list[signal.Signals] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(number: signal.Signals) -> None:
        came.append(number)
        restore()
        assert task is not None
        task.cancel()

    def restore() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else before[number])

    try:
        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
    except (NotImplementedError, ValueError):  # Windows, or not the main thread
        yield came
        return
    try:
        yield came
    finally:
        if came:
            assert task is not None
            task.uncancel()
        else:
            restore()


def _show(report: Report) -> None:
    """Prints a line for each check, what failed or was skipped, and the verdict."""
    from pilotfish.check.report import POWER_NOTE, numbers, smallest, verdict

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("check", style="cyan")
    for name in ("passed", "failed", "skipped", "smallest p", "finds"):
        table.add_column(name, justify="right")
    for name, results in report.groups.items():
        counts, least = report.counts(results), smallest(results)
        cells = [
            Text(f"{counts[status] or '–'}", style=style if counts[status] else "dim")
            for status, style in _STYLES.items()
        ]
        share = report.finds(results)
        cells += [Text("–" if least is None else f"{least:.2g}"), Text("–" if share is None else f"{share:.1%}")]
        table.add_row(name, *cells)
    stdout.print()
    stdout.print(table)
    if report.statistical:
        stdout.print(Text(POWER_NOTE, style="dim"), soft_wrap=True)
    for result in report.results:
        if result.status != "passed" or result.why:
            stdout.print()
            stdout.print(Text.assemble((result.status, _STYLES[result.status]), f"  {result.check}: {result.name}"))
            for line in filter(None, (result.why, numbers(result))):
                stdout.print(Text(f"  {line}", style="" if line == result.why else "dim"), soft_wrap=True)
    stdout.print()
    stdout.print(Text(verdict(report), style=_VERDICTS[report.status]), soft_wrap=True)
