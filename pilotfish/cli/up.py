"""``pilotfish up``: all services on this machine, as real processes, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from pilotfish import extras
from pilotfish.cli import children, options
from pilotfish.cli.console import Report, complain, note, speak_json, stderr, waiting
from pilotfish.cli.file import config_option
from pilotfish.cli.listen import require_free
from pilotfish.cli.memory import has_gpu, with_pages
from pilotfish.cli.plan import Model, Plan, threads_per_worker
from pilotfish.cli.pull import fetch
from pilotfish.cli.relay import pass_on
from pilotfish.cores import usable_cores
from pilotfish.logs import Format

Dtype = Literal["float32", "bfloat16", "float16"]
ReasoningParser = Literal["deepseek_r1", "deepseek_v3", "glm45", "granite", "mistral", "qwen3", "seed_oss"]
LogLevel = Literal["debug", "info", "warning", "error"]

MAX_DRAFT_LENGTH = 64  # the orchestrator's; known here so that nothing is loaded for one that it refuses
MAX_TREE_NODES = 256  # alike
HTTP = "127.0.0.1:8000"  # or the next free port, unless told otherwise
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_GRACE_S = 10.0


def _checked_length(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) <= MAX_DRAFT_LENGTH):
        raise typer.BadParameter(f"{text!r} is neither auto nor a number from 0 to {MAX_DRAFT_LENGTH}")
    return text


def _checked_tree(text: str) -> str:
    if text not in ("auto", "off") and not (text.isdecimal() and 1 <= int(text) <= MAX_TREE_NODES):
        raise typer.BadParameter(f"{text!r} is neither auto nor off nor a number from 1 to {MAX_TREE_NODES}")
    return text


def _checked_device(text: str | None) -> str | None:
    if text is not None and not _DEVICE.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is none of auto, cpu, cuda, cuda:N")
    return text


def _checked_devices(text: str | None) -> str | None:
    for part in (text or "auto").split(","):
        _checked_device(part)
    return text


def _checked_pages(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of at least 1")
    return text


def up(
    target: Annotated[str, typer.Option(metavar="MODEL", help="Name, Hugging Face id or folder.")] = "smollm2",
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|HEAD|none",
            help="Small model of the same tokenizer, or a head made for the target: MTP, EAGLE, EAGLE-3, Medusa; "
            "`smollm2-mtp` is one of ours. Left out: on a CPU the target itself, in int8.",
        ),
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Draft with the first N layers. Left out: all.")
    ] = None,
    quantize: Annotated[
        Literal["int8"] | None,
        typer.Option(help="Round the target's weights: another model, nearly the same, and faster on a CPU."),
    ] = None,
    draft_length: Annotated[
        str,
        typer.Option(
            metavar="auto|K",
            callback=_checked_length,
            help="Draft tokens a round, where a request names none. auto chooses by what pays; 0 never drafts.",
        ),
    ] = "auto",
    draft_tree: Annotated[
        str,
        typer.Option(
            metavar="auto|N|off",
            callback=_checked_tree,
            help="Draft tokens of a tree, where a head drafts. auto chooses by what pays; off drafts chains.",
        ),
    ] = "auto",
    replicas: Annotated[int, typer.Option(metavar="N", min=1, help="Draft processes.")] = 1,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of weights and activations. Left out: the services choose.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            callback=_checked_device,
            help="Of target and draft: cpu, cuda or cuda:N. Left out: the first GPU if there is one.",
        ),
    ] = None,
    target_device: Annotated[
        str | None, typer.Option(metavar="DEVICE", callback=_checked_device, help="Of the target alone.")
    ] = None,
    draft_device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE,...", callback=_checked_devices, help="Of the draft alone; replicas take several in turn."
        ),
    ] = None,
    pages: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            callback=_checked_pages,
            help="KV pages of each worker, of 16 tokens. auto takes what memory is free, on a CPU at most 4 GiB of it.",
        ),
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.01,
            max=1.0,
            help="Share of a GPU's memory to take, weights and all.  [dim]\\[default: 0.9][/]",
        ),
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="Simulate target and draft: llama-70b-8xh100, llama-8b-h100 or a .toml file. Needs no GPU, and of "
            "--target only the tokenizer.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Where clients ask; port 0 takes a free one.")
    ] = options.ADDRESS,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT|off",
            help="Where the OpenAI-compatible API and the playground are; port 0 takes a free one.  "
            f"[dim]\\[default: {HTTP}, or the next free port][/]",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar="PILOTFISH_API_KEY", help="Key that HTTP clients must send; may be repeated."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with such keys, one a line.", exists=True, dir_okay=False)
    ] = None,
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            help="auto: where a request does not say how to sample, the model's generation_config.json does. "
            "none: it does not count."
        ),
    ] = "auto",
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="Web pages that may ask from elsewhere (CORS); * for all. May be repeated."
        ),
    ] = None,
    reasoning_parser: Annotated[
        ReasoningParser | None,
        typer.Option(help="Tell reasoning apart from answers over HTTP, by the marks of the model's family."),
    ] = None,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Pass over unknown fields of HTTP requests, with a Warning header.")
    ] = False,
    metrics_without_key: Annotated[
        bool, typer.Option("--metrics-without-key", help="Serve /metrics to those who have no key, too.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what each process does when; open it at ui.perfetto.dev."),
    ] = None,
    log_level: Annotated[
        LogLevel,
        typer.Option(help="Least severity of what the services say; info has a line for each request."),
    ] = "info",
    log_format: Annotated[
        Format, typer.Option(help="Lines for people, or json: all of stderr an object a line.")
    ] = "text",
    config: config_option = None,
) -> None:
    """Start target, draft and orchestrator on this machine.

    Prints one line that starts with [bold]ready[/] when it serves;
    what the services say goes to stderr. Ctrl-C stops everything,
    and so does the death of the target; without a draft it serves on.

    [dim]$ pilotfish up[/]
    [dim]$ pilotfish up --target ./my-model --draft ./my-small-model[/]
    [dim]$ pilotfish up --draft smollm2-mtp --draft-tree off[/]
    [dim]$ pilotfish up --target ./my-model --draft ./my-eagle3-head[/]
    [dim]$ pilotfish up --target smollm2 --draft none[/]
    [dim]$ pilotfish up --target ./big --target-device cuda:0 --draft ./small --draft-device cuda:1[/]
    [dim]$ pilotfish up --config up.toml[/]
    [dim]$ pilotfish up --simulate llama-70b-8xh100 --replicas 4[/]
    """
    extras.require("serve", "pilotfish up")
    if log_format == "json":
        speak_json("up")
    if draft == "none" and draft_layers is not None:
        raise typer.BadParameter("--draft-layers goes with a draft; leave it or --draft none out")
    if draft_device is not None:
        _require_drafts(draft, draft_device.split(","), replicas)
    if simulate is not None:
        chosen: dict[str, object] = {
            "--draft": None if draft == "none" else draft,
            "--draft-layers": draft_layers,
            "--dtype": dtype,
            "--quantize": quantize,
            "--device": device,
            "--target-device": target_device,
            "--draft-device": draft_device,
            "--gpu-memory-utilization": gpu_memory_utilization,
        }
        _require_simulable(simulate, chosen)
    http_options = (
        *(part for origin in allowed_origins or () for part in ("--allowed-origins", origin)),
        *(("--reasoning-parser", reasoning_parser) if reasoning_parser is not None else ()),
        *(("--lenient",) if lenient else ()),
        *(("--metrics-without-key",) if metrics_without_key else ()),
    )
    listen = require_free(listen)
    if http == "off" and (api_key or api_key_file is not None):
        raise typer.BadParameter("--api-key and --api-key-file go with --http; gRPC knows no keys")
    if http == "off" and http_options:
        raise typer.BadParameter(f"{http_options[0]} goes with --http")
    if http not in (None, "off"):
        http = require_free(http, "--http")
    target_device, draft_device = target_device or device, draft_device or device
    folder = fetch(target)
    model = Model(target if simulate is None else f"simulated-{Path(simulate).stem}", folder, quantize=quantize)
    plan = Plan(
        target=model,
        draft=_draft(model, draft, draft_layers, draft_device) if simulate is None or draft == "none" else model,
        draft_length=draft_length,
        draft_tree=draft_tree,
        replicas=replicas,
        dtype=dtype,
        target_device=target_device,
        draft_devices=tuple(draft_device.split(",")) if draft_device is not None else (),
        gpu_memory_utilization=gpu_memory_utilization,
        listen=listen,
        log_level=log_level,
        log_format=log_format,
        simulate=simulate,
        trace=trace,
        http=HTTP if http is None else None if http == "off" else http,
        http_next_port=http is None,
        api_keys=tuple(api_key or ()),
        api_key_file=api_key_file,
        generation_config=generation_config,
        http_options=http_options,
    )
    plan, told = with_pages(plan, None if pages == "auto" else int(pages))
    for line in told:
        note(line)
    with tempfile.TemporaryDirectory(prefix="pilotfish-") as scratch:
        if simulate is None and "OMP_NUM_THREADS" not in os.environ:  # who sets it wants just so many
            plan = replace(plan, share_cores=Path(scratch) / "cores")
        code = asyncio.run(_serve(plan))
    raise typer.Exit(code)


def _require_drafts(draft: str | None, devices: list[str], replicas: int) -> None:
    """Refuses devices that no draft would run on."""
    if draft == "none":
        raise typer.BadParameter("--draft-device goes with a draft; leave it or --draft none out")
    if len(devices) > replicas:
        raise typer.BadParameter(f"--draft-device has {len(devices)} devices for {replicas} drafts; give --replicas N")


def _require_simulable(profile: str, chosen: Mapping[str, object]) -> None:
    """Refuses what is chosen of models where there are none."""
    from pilotfish.simulate.profile import load_profile  # pydantic takes its time, and only this needs it

    load_profile(profile)  # so that nothing is started for one that is not there
    for flag, value in chosen.items():
        if value is not None:
            raise typer.BadParameter(f"{flag} is for real models; leave it or --simulate out")


def _draft(target: Model, draft: str | None, layers: int | None, device: str | None) -> Model | None:
    if draft == "none":
        return None
    if draft is not None:
        return _named_draft(target, draft, layers, device)
    if layers is not None:
        return Model(target.name, target.folder, layers)
    if target.quantize is not None or not _is_cpu(device):
        # A GPU has no use for int8 weights that it multiplies as floats, and a draft like its target saves nothing.
        note("no draft was named, and the target decodes alone; --draft MODEL takes a small model of its tokenizer")
        return None
    note(
        "no draft was named, so that the target itself drafts, in int8: on a CPU several times cheaper, and often right"
    )
    return Model(target.name, target.folder, quantize="int8")


def _named_draft(target: Model, draft: str, layers: int | None, device: str | None) -> Model:
    from draft_svc.drafters.kinds import describe, wanted_features  # numpy and safetensors take their time

    folder = fetch(draft)
    features, head = wanted_features(folder, target.folder), describe(folder, target.folder)
    if features and layers is not None:
        raise typer.BadParameter("--draft-layers is for models; a head on the target's hidden states runs whole")
    # A head loses no acceptance by it, and on a CPU a third of its time.
    is_rounded = head is not None and head.can_round and _is_cpu(device)
    return Model(draft, folder, layers, "int8" if is_rounded else None, features)


def _is_cpu(device: str | None) -> bool:
    """Whether a draft on that device, or on those, runs on a CPU."""
    return not has_gpu() if device in (None, "auto") else device == "cpu"


async def _serve(plan: Plan) -> int:
    """Runs the plan until a signal or a death; the exit code."""
    stopped = asyncio.Event()
    fleet = _Fleet(plan, _threads(plan.worker_count))

    def on_signal() -> None:
        if stopped.is_set():  # the second one: somebody does not want to wait
            for child in fleet.in_stopping_order():
                child.kill()
        else:
            note("stopping; once more kills")
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    signalled = asyncio.create_task(stopped.wait())
    serving = asyncio.create_task(fleet.serve())
    try:
        await asyncio.wait({signalled, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # it only ends by an error
    finally:
        signalled.cancel()
        serving.cancel()
        await asyncio.gather(signalled, serving, return_exceptions=True)
        await children.stop(fleet.in_stopping_order(), _GRACE_S)
    return 0


class _Fleet:
    """The processes of one ``up``."""

    def __init__(self, plan: Plan, threads: list[int]) -> None:
        self._plan, self._threads = plan, threads
        self._target: children.Child | None = None
        self._drafts: list[children.Child] = []
        self._orchestrator: children.Child | None = None

    async def serve(self) -> None:
        """Starts all, says ready, and watches; ends only by an error.

        Raises:
            ChildDiedError: the target or the orchestrator died, or any child before all were ready.
        """
        with waiting() as report:
            report("starting target and draft" if self._plan.draft else "starting the target")
            target, drafts = await self._start_workers(partial(_show_loading, report))
            report("starting the orchestrator")
            address = await self._start_orchestrator(target, drafts)
        draft = self._plan.draft.label if self._plan.draft is not None else "none"
        served = f"target={self._plan.target.label} draft={draft} draft_length={self._plan.draft_length}"
        print(f"ready {address} {served}{f' http={self._http}' if self._http else ''}", flush=True)
        if stderr.is_terminal:
            note(
                f"ask in another terminal: pilotfish chat{'' if address == options.ADDRESS else f' --server {address}'}"
            )
            if self._http:
                note(f"or with OpenAI's client: base_url http://{self._http}/v1; in a browser: http://{self._http}/")
        await self._watch()

    @property
    def _http(self) -> str:
        """Where the OpenAI-compatible API is served; empty if it is not."""
        return self._orchestrator.also.get("http", "") if self._orchestrator is not None else ""

    def in_stopping_order(self) -> list[children.Child]:
        """Who serves clients first, so that nobody is asked who is gone."""
        return [child for child in (self._orchestrator, *self._drafts, self._target) if child is not None]

    async def _start_workers(self, progress: children.Progress) -> tuple[str, list[str]]:
        plan, threads = self._plan, self._threads
        self._target = await _start("target", plan.target_argv(threads[0]), threads[0], progress=progress)
        if plan.draft is not None:
            for index, count in enumerate(threads[1:]):
                name = "draft" if plan.replicas == 1 else f"draft-{index}"
                argv = plan.draft_argv(plan.draft, count, index)
                self._drafts.append(await _start(name, argv, count, progress=progress))
        target, *drafts = await asyncio.gather(*(child.ready for child in (self._target, *self._drafts)))
        return target, drafts

    async def _start_orchestrator(self, target: str, drafts: list[str]) -> str:
        argv, env = self._plan.orchestrator_argv(target, drafts), self._plan.orchestrator_env
        self._orchestrator = await _start("orchestrator", argv, 1, also=env)
        events: list[asyncio.Future[Any]] = [self._orchestrator.ready]
        events += [child.ended for child in self.in_stopping_order()]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        for child in self.in_stopping_order():
            if child.ended.done():
                raise child.death()
        return await self._orchestrator.ready

    async def _watch(self) -> None:
        alive = {child.ended: child for child in self.in_stopping_order()}
        while True:
            ended, _ = await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)
            for child in (alive.pop(task) for task in ended):
                if child not in self._drafts:
                    raise child.death()
                complain(f"{child.death()}\ngoing on without it")


def _threads(workers: int) -> list[int]:
    given = os.environ.get("OMP_NUM_THREADS")
    if given is not None and given.isdecimal():
        return [int(given)] * workers
    return threads_per_worker(usable_cores(), workers)


async def _start(
    name: str,
    argv: list[str],
    threads: int,
    *,
    also: Mapping[str, str] | None = None,
    progress: children.Progress | None = None,
) -> children.Child:
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    return await children.start(name, argv, env | dict(also or {}), pass_on, progress)


def _show_loading(report: Report, name: str, what: str, done: int, total: int) -> None:
    report(f"{name}: {what} weights", done, total, is_bytes=True)
