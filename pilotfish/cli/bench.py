"""``pilotfish bench``: what a deployment does under load, with speculation and without it, side by side."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pilotfish.cli import options
from pilotfish.cli.console import note, stderr, stdout
from pilotfish.cli.running import INTERRUPTED, running_server, up_flags
from pilotfish.cli.up import MAX_DRAFT_LENGTH
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from pilotfish.bench import tables
    from pilotfish.bench.experiment import Sweep
    from pilotfish.bench.load import Client
    from pilotfish.bench.openai_client import Endpoint
    from pilotfish.bench.origin import Origin
    from pilotfish.bench.prompts import Prompt
    from pilotfish.bench.records import Load, Pass, Setting
    from pilotfish.bench.report import Report
    from pilotfish.client.results import ServerInfo

_SYNTHETIC_COUNT = 24  # requests of a pass, as many as there are prompts of our own
_CONTRADICTIONS = {
    ("up", "server"): "--up starts a server and --server names a running one; give one of them",
    ("base_url", "server"): "--base-url and --server both say whom to ask; give one",
    (
        "base_url",
        "up",
    ): "--up is asked over gRPC; leave --base-url out, or start the server yourself",
    (
        "base_url",
        "draft_length",
    ): "--draft-length is a field of Pilotfish's own; name its server with --server",
    ("base_url", "synthetic"): "--synthetic needs the size of the vocabulary, which OpenAI's API does not tell; "
    "give --prompts",
    ("rate", "concurrency"): "--rate sends requests whether or not others run, --concurrency waits; give one",
    ("prompts", "synthetic"): "--prompts and --synthetic both say what to ask; give one",
    ("synthetic", "max_tokens"): "--synthetic has the number of tokens already, as OUT; leave --max-tokens out",
}

_ONLY_WITH_BASE_URL = ("api_key", "model", "endpoint")

Number = TypeVar("Number", int, float)


def bench(
    context: typer.Context,
    server: options.Server = options.ADDRESS,
    up: Annotated[
        str | None,
        typer.Option(
            "--up", metavar="FLAGS", help='Start `pilotfish up FLAGS` for the measurement; "" takes its defaults.'
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask any server of OpenAI's API instead: vLLM, SGLang, llama.cpp, Pilotfish over HTTP.",
        ),
    ] = None,
    api_key: Annotated[
        str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="Of that server.", show_envvar=True)
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model of that server. Left out: the only one that it has.")
    ] = "",
    endpoint: Annotated[
        Literal["chat", "completions"],
        typer.Option(help="Of that server: prompts as a user's turns, or as plain text."),
    ] = "chat",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with `turns`; the first one is asked. Left out: 24 of our own."),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(metavar="IN,OUT", help="Random prompts of IN token ids, new in every pass; OUT tokens each."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests of a pass. Left out: every prompt once.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,...", help="Requests at once: a closed loop.  [dim]\\[default: 1][/]")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,...", help="Requests a second, at random: an open loop instead.")
    ] = None,
    draft_length: Annotated[
        str | None,
        typer.Option(metavar="K,...", help="Most draft tokens a round, or `auto`, beside 0. Left out: as the server."),
    ] = None,
    temperature: Annotated[str, typer.Option(metavar="T,...", help="0 is greedy.")] = "0",
    max_tokens: options.MaxTokens = 64,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Passes of each setting; medians count.")] = 3,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Of arrivals and random prompts.")] = 0,
    timeout: options.Timeout = None,
    out: Annotated[
        Path | None, typer.Option(metavar="NAME", help="Write NAME.json and NAME.html, a page with plots.")
    ] = None,
) -> None:
    """Measure a server, with speculation and without, in turns.

    A pass asks every prompt once. For each load and temperature, passes of
    every draft length take turns with passes of speculation off, so that a
    busy moment of the machine hits all alike. Asks a running server, or
    starts one with [bold]--up[/], or any other server with [bold]--base-url[/],
    of which it measures what OpenAI's API shows. Ctrl-C reports what was measured until then.

    [dim]$ pilotfish bench --requests 6 --repeats 2[/]
    [dim]$ pilotfish bench --concurrency 1,2,4,8 --draft-length 2,4,8 --out results/sweep[/]
    [dim]$ pilotfish bench --up "--target smollm2 --draft-layers 28" --temperature 0,0.8[/]
    [dim]$ pilotfish bench --synthetic 512,64 --rate 0.5,1,2[/]
    [dim]$ pilotfish bench --base-url http://127.0.0.1:8000/v1 --concurrency 1,8[/]
    """
    from pilotfish.bench.experiment import Sweep, Synthetic

    _refuse_contradictions(context)
    flags = None if up is None else up_flags(up)
    if out is not None:
        _prepare(out)
    lengths = _lengths(synthetic)
    sweep = Sweep(
        prompts=_prompts(prompts, requests) if lengths is None else Synthetic(requests or _SYNTHETIC_COUNT, lengths[0]),
        loads=_loads(concurrency, rate),
        temperatures=_numbers("--temperature", temperature, float, 0),
        draft_lengths=[] if draft_length is None else _draft_lengths(draft_length),
        repeats=repeats,
        max_tokens=max_tokens if lengths is None else lengths[1],
        seed=seed,
    )
    asked = f"random, {lengths[0]} token ids" if lengths is not None else "our own" if prompts is None else prompts.name
    if base_url is not None:
        report, is_whole = asyncio.run(_measure_openai(sweep, base_url, endpoint, api_key, model, timeout, asked))
    else:
        with nullcontext(server) if flags is None else running_server(flags) as address:
            report, is_whole = asyncio.run(_measure(sweep, address, timeout, asked, up))
    _show(report)
    if out is not None:
        _write(report, out)
    if not is_whole:
        raise typer.Exit(INTERRUPTED)
    if any(result.failures for result in report.results):
        raise typer.Exit(1)


def _refuse_contradictions(context: typer.Context) -> None:
    """Refuses options that stand on the command line together and cannot both be meant."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    for pair, why in _CONTRADICTIONS.items():
        if given >= set(pair):
            raise typer.BadParameter(why)
    for name in _ONLY_WITH_BASE_URL:
        if name in given and "base_url" not in given:
            raise typer.BadParameter(f"--{name.replace('_', '-')} is for --base-url; gRPC knows none")


async def _measure(
    sweep: Sweep, address: str, timeout_s: float | None, asked: str, up: str | None
) -> tuple[Report, bool]:
    """Runs the sweep; the report, and whether it is of all of it."""
    from pilotfish.bench.origin import of_this_process
    from pilotfish.client.aio import AsyncClient

    began = datetime.now().astimezone()
    async with AsyncClient(address) as client:
        info = await client.server_info(timeout=timeout_s)
        sweep = _fitting(sweep, info)
        measured = await _passes(sweep, client, info.vocab_size, timeout_s)
    report = _report(sweep, of_this_process(info, address, up, began), asked, measured)
    return report, len(measured) == sweep.pass_count


async def _measure_openai(
    sweep: Sweep, base_url: str, endpoint: Endpoint, api_key: str, model: str, timeout_s: float | None, asked: str
) -> tuple[Report, bool]:
    """The same of any server; there is one setting for each load and temperature."""
    try:
        from pilotfish.bench.openai_client import OpenAIClient
    except ImportError as error:
        raise FailedPreconditionError(
            "--base-url needs httpx2; install it with `pip install 'pilotfish[bench]'`, or leave it out"
        ) from error
    from pilotfish.bench.origin import of_this_process

    began = datetime.now().astimezone()
    sweep = dataclasses.replace(sweep, draft_lengths=[None])
    async with OpenAIClient(base_url, endpoint, api_key, model) as client:
        info = await client.server_info(timeout_s)
        measured = await _passes(sweep, client, info.vocab_size, timeout_s)
    report = _report(sweep, of_this_process(info, client.base_url, None, began, api="OpenAI"), asked, measured)
    if client.counts_chunks:
        counted = "the server gives no usage in streams: what is counted are chunks, which may have several tokens"
        report = dataclasses.replace(report, notes=[counted])
    return report, len(measured) == sweep.pass_count


async def _passes(sweep: Sweep, client: Client, vocab_size: int, timeout_s: float | None) -> list[tuple[Setting, Pass]]:
    """All passes of the sweep, or those until Ctrl-C."""
    from pilotfish.bench.experiment import measure, warm_up
    from pilotfish.bench.load import LoadGenerator

    measured: list[tuple[Setting, Pass]] = []
    with _progress(sweep) as (on_pass, on_done):
        await warm_up(sweep, vocab_size, LoadGenerator(client, timeout_s, lambda: None))
        generator = LoadGenerator(client, timeout_s, on_done)
        try:
            async for setting, one in measure(sweep, vocab_size, generator, on_pass):
                measured.append((setting, one))
        except asyncio.CancelledError:  # Ctrl-C, once
            note(f"stopped after {len(measured)} of {sweep.pass_count} passes")
            if not measured:
                raise
    return measured


def _report(sweep: Sweep, origin: Origin, asked: str, measured: Sequence[tuple[Setting, Pass]]) -> Report:
    from pilotfish.bench.report import Report
    from pilotfish.bench.summary import summarize

    return Report(
        origin=origin,
        prompts=asked,
        requests=sweep.count,
        repeats=sweep.repeats,
        max_tokens=sweep.max_tokens,
        seed=sweep.seed,
        results=summarize(measured),
    )


def _fitting(sweep: Sweep, info: ServerInfo) -> Sweep:
    """The sweep as this server can do it; without a draft, that of speculation off alone.

    Raises:
        InvalidArgumentError: synthetic prompts are longer than the model takes.
        FailedPreconditionError: the server does not choose draft lengths itself.
    """
    from pilotfish.bench.experiment import Synthetic

    if isinstance(sweep.prompts, Synthetic) and sweep.prompts.length + sweep.max_tokens > info.max_len:
        raise InvalidArgumentError(
            f"--synthetic is {sweep.prompts.length},{sweep.max_tokens}; together they may be at most {info.max_len} "
            f"tokens for {info.model}"
        )
    if info.draft_replica_count == 0:
        note("this server has no draft, so that only K off is measured")
        return dataclasses.replace(sweep, draft_lengths=[0])
    if not sweep.draft_lengths:
        return dataclasses.replace(sweep, draft_lengths=[0, None if info.adaptive_draft_length else info.draft_length])
    if None in sweep.draft_lengths and not info.adaptive_draft_length:
        raise FailedPreconditionError(
            f"--draft-length has auto, but this server always drafts {info.draft_length} tokens a round; start it with "
            "--draft-length auto, or leave auto out"
        )
    return sweep


@contextmanager
def _progress(sweep: Sweep) -> Iterator[tuple[Callable[[int, Setting], None], Callable[[], None]]]:
    """Shows how far a measurement is: in a terminal a bar, elsewhere a line for each pass."""
    total = sweep.pass_count * sweep.count

    def describe(repeat: int, setting: Setting) -> str:
        temperature = f", temperature {setting.temperature:g}" if len(sweep.temperatures) > 1 else ""
        draft = "" if sweep.draft_lengths == [None] else f", K {setting.draft_label}"
        return f"{setting.load.label}{temperature}{draft}, pass {repeat + 1} of {sweep.repeats}"

    if not stderr.is_terminal:
        stderr.print("warming up")
        yield lambda repeat, setting: stderr.print(describe(repeat, setting), soft_wrap=True), lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("warming up", total=total)
        yield (
            lambda repeat, setting: progress.update(task, description=describe(repeat, setting)),
            lambda: progress.advance(task),
        )


def _show(report: Report) -> None:
    """Prints the tables and what there is to say beside them."""
    from pilotfish.bench.tables import remarks, tables

    for table in tables(report):
        stdout.print()
        stdout.print(_drawn(table))
        stdout.print(Text(table.note, style="dim"))
    stdout.print()
    for remark in remarks(report):
        stdout.print(Text(f"· {remark}", style="red" if "failed" in remark or "slower than none" in remark else ""))


def _drawn(table: tables.Table) -> Table:
    drawn = Table(
        title=table.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(table.header):
        drawn.add_column(
            name,
            justify="left" if index < table.labels else "right",
            style="cyan" if name == "speed-up" else "",
            min_width=max(map(len, name.split())),
        )
    for index, row in enumerate(table.rows):
        cells = [Text(cell, "red") if table.is_loss(column, cell) else cell for column, cell in enumerate(row)]
        drawn.add_row(*cells, end_section=index + 1 in table.groups)
    return drawn


def _prepare(out: Path) -> None:
    """Finds out before anything is measured whether the report can be written.

    Raises:
        PilotfishError: it cannot.
    """
    from pilotfish.bench.svg import require_matplotlib

    require_matplotlib("--out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"--out is {out}, whose folder cannot be made ({error.strerror})") from error
    if not os.access(out.parent, os.W_OK):
        raise InvalidArgumentError(f"--out is {out}, whose folder cannot be written to")


def _write(report: Report, out: Path) -> None:
    from pilotfish.bench.page import page

    for suffix, text in ((".json", report.as_json()), (".html", page(report))):
        path = out.with_name(out.name.removesuffix(".html").removesuffix(".json") + suffix)
        path.write_text(text, encoding="utf-8")
        note(f"wrote {path}")


def _loads(concurrency: str | None, rate: str | None) -> list[Load]:
    from pilotfish.bench.records import Load

    if rate is not None:
        return [Load(rate=each) for each in _numbers("--rate", rate, float, 0, is_open=True)]
    return [
        Load(concurrency=each)
        for each in _numbers("--concurrency", "1" if concurrency is None else concurrency, int, 1)
    ]


def _prompts(path: Path | None, count: int | None) -> list[Prompt]:
    from pilotfish.bench.prompts import read, shipped, take

    return take(shipped() if path is None else read(path), count)


def _lengths(synthetic: str | None) -> tuple[int, int] | None:
    if synthetic is None:
        return None
    lengths = _numbers("--synthetic", synthetic, int, 1)
    if len(lengths) != 2:
        raise typer.BadParameter(f"--synthetic is {synthetic!r}; it must be IN,OUT, such as 512,64")
    return lengths[0], lengths[1]


def _draft_lengths(text: str) -> list[int | None]:
    """Speculation off, then the others in the order given, each once."""
    parts = [part.strip() for part in text.split(",")]
    numbers = ",".join(part for part in parts if part != "auto")
    found = iter(_numbers("--draft-length", numbers, int, 0, MAX_DRAFT_LENGTH) if numbers else [])
    lengths = [None if part == "auto" else next(found) for part in parts]
    return list(dict.fromkeys([0, *lengths]))


def _numbers(
    flag: str, text: str, kind: Callable[[str], Number], low: float, high: float = math.inf, is_open: bool = False
) -> list[Number]:
    """Numbers with commas between them, each once; ``is_open`` leaves ``low`` itself out."""
    limits = f"{'above' if is_open else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
    what = f"{flag} is {text!r}; it must be {'whole ' if kind is int else ''}numbers {limits}, such as 1,2,4"
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(what) from error
    if not all(
        math.isfinite(number) and low <= number <= high and not (is_open and number == low) for number in numbers
    ):
        raise typer.BadParameter(what)
    return list(dict.fromkeys(numbers))
