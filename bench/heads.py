"""How many draft tokens the target accepts: every drafter, chains and trees, task by task, through the real services.

For each drafter and shape ``pilotfish up`` is started, and every prompt of every task is asked at each temperature. The
numbers are of rounds, so that they do not depend on how busy the machine is; the speeds beside them do.

    python bench/heads.py --drafter mtp=heads/mtp --drafter eagle3=heads/eagle3 \\
        --shape 'chain=--draft-length 4' --prompts PROMPTS --out bench/results/heads

PROMPTS is a folder of JSON lines, one file a task; left out: the 24 prompts of the package. NAME.json holds what was
measured; what it holds already is not measured again, so that an interrupted run goes on.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from head_results import Results, TaskResult, Variant, as_json, from_json, markdown, task_result
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pilotfish.bench.load import LoadGenerator
from pilotfish.bench.origin import this_machine
from pilotfish.bench.prompts import Prompt, read, shipped
from pilotfish.bench.records import Load, Pass
from pilotfish.cli.running import running_server
from pilotfish.client.aio import AsyncClient
from pilotfish.client.params import SamplingParams
from pilotfish.errors import InvalidArgumentError, PilotfishError

stderr = Console(stderr=True, highlight=False)


def read_tasks(folder: Path | None, count: int | None) -> dict[str, list[Prompt]]:
    """At most ``count`` prompts of each task."""
    if folder is None:
        tasks: dict[str, list[Prompt]] = {}
        for prompt in shipped():
            tasks.setdefault(prompt.category, []).append(prompt)
    else:
        tasks = {path.stem: read(path) for path in sorted(folder.glob("*.jsonl"))}
        if not tasks:
            raise InvalidArgumentError(f"{folder} holds no *.jsonl")
    return {name: prompts[:count] for name, prompts in tasks.items()}


def named(flag: str, values: list[str]) -> dict[str, str]:
    """Values such as mtp=heads/mtp."""
    parts = [value.partition("=") for value in values]  # flags may have an = of their own
    if not all(name and sign and value for name, sign, value in parts):
        raise typer.BadParameter(f"{flag} is {' '.join(values)!r}; must be NAME=VALUE")
    return {name: value for name, _, value in parts}


def require_same(path: Path, facts: dict[str, Any]) -> None:
    """Refuses to add to what was measured otherwise."""
    held = json.loads(path.read_text(encoding="utf-8"))
    for name in ("target", "up", "prompts", "max_tokens"):
        if held[name] != facts[name]:
            raise InvalidArgumentError(f"{name} is {facts[name]}, but {path} holds results with {held[name]}")
    for name, flags in held["shapes"].items():
        if facts["shapes"].setdefault(name, flags) != flags:
            raise InvalidArgumentError(f"shape {name} is {facts['shapes'][name]!r}, but {flags!r} in {path}")


async def measure(
    address: str, tasks: dict[str, list[Prompt]], temperature: float, max_tokens: int, at_once: int, bar: Progress
) -> list[TaskResult]:
    """Asks all tasks of one server."""
    params, found = SamplingParams(max_tokens=max_tokens, temperature=temperature), []
    async with AsyncClient(address) as client:
        for task, prompts in tasks.items():
            counter = bar.add_task(f"  {task}, temperature {temperature:g}", total=len(prompts))
            done = await _ask(client, prompts, params, at_once, bar, counter)
            if failures := [record.error for record in done.records if record.error is not None]:
                raise InvalidArgumentError(f"{len(failures)} requests of {task} failed, the first with: {failures[0]}")
            found.append(task_result(task, done.completions, done.duration_s))
            bar.remove_task(counter)
    return found


async def _ask(
    client: AsyncClient, prompts: list[Prompt], params: SamplingParams, at_once: int, bar: Progress, counter: TaskID
) -> Pass:
    generator = LoadGenerator(client, None, lambda: bar.advance(counter))
    return await generator.run(prompts, params, Load(concurrency=at_once), np.random.default_rng(0))


def main(
    out: Annotated[Path, typer.Option(metavar="NAME", help="Writes NAME.json and NAME.md.")],
    drafter: Annotated[list[str], typer.Option(metavar="NAME=FOLDER", help="Repeatable; `none` drafts nothing.")],
    shape: Annotated[list[str], typer.Option(metavar="NAME=FLAGS", help="Of `pilotfish up`; repeatable.")] = [  # noqa: B006
        "chain=--draft-length 4"
    ],
    target: Annotated[str, typer.Option(metavar="MODEL")] = "smollm2",
    up: Annotated[str, typer.Option(metavar="FLAGS", help="More of `pilotfish up`, for all.")] = "--dtype float32",
    prompts: Annotated[Path | None, typer.Option(metavar="FOLDER", help="One file of JSON lines a task.")] = None,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="Prompts of each task, at most.")] = None,
    temperature: Annotated[list[float], typer.Option(metavar="T", help="Repeatable.")] = [0.0, 1.0],  # noqa: B006
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1)] = 64,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Requests at once.")] = 4,
) -> None:
    """Measure acceptance of drafters."""
    tasks = read_tasks(prompts, count)
    path = out.with_name(f"{out.name}.json")
    shapes = named("--shape", shape)
    facts: dict[str, Any] = {
        "target": target,
        "up": up,
        "shapes": dict(shapes),
        "prompts": {task: len(asked) for task, asked in tasks.items()},
        "max_tokens": max_tokens,
        "at_once": at_once,
        "machine": this_machine(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
    }
    results: Results = {}
    if path.is_file():
        require_same(path, facts)
        results = from_json(path.read_text(encoding="utf-8"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        for name, folder in named("--drafter", drafter).items():
            for shape_name, flags in shapes.items():
                wanted = [Variant(name, shape_name, each) for each in temperature]
                wanted = [variant for variant in wanted if variant not in results]
                if not wanted:
                    continue
                stderr.print(f"{name}, {shape_name}")
                command = ["--target", target, "--draft", folder, *shlex.split(up), *shlex.split(flags)]
                with running_server(command) as address:
                    for variant in wanted:
                        asked = measure(address, tasks, variant.temperature, max_tokens, at_once, bar)
                        results[variant] = asyncio.run(asked)
                        path.write_text(as_json(results, facts), encoding="utf-8")
    out.with_name(f"{out.name}.md").write_text(markdown(results) + "\n", encoding="utf-8")
    print(markdown(results))


if __name__ == "__main__":
    try:
        typer.run(main)
    except PilotfishError as error:
        raise SystemExit(f"error: {error}") from error
