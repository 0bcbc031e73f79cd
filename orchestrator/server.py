"""Starts the orchestrator: settings, tokenizer, links to the workers, the loop, the service."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from orchestrator.admission import MAX_DRAFT_LENGTH, Defaults
from orchestrator.capabilities import Offer, offer
from orchestrator.core.acceptance import Rule
from orchestrator.core.requests import MAX_ADAPTIVE_LENGTH
from orchestrator.core.scheduler import Limits, Scheduler
from orchestrator.generation import Generation, ServerInfo
from orchestrator.generation_config import NAME as GENERATION_CONFIG
from orchestrator.generation_config import sampling_defaults
from orchestrator.http.settings import HttpSettings
from orchestrator.loop import DraftStream, Loop, TargetStream
from orchestrator.metrics import Load, Metrics
from orchestrator.service import GenerationService
from orchestrator.tokenizer import Tokenizer
from orchestrator.totals import Totals
from orchestrator.trace import NO_TRACE, ChromeTrace
from orchestrator.workers import DRAFT, TARGET, DraftKind, FeatureReader, GrammarCompiler, TargetKind, WorkerLink
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError, PilotfishError, UnavailableError
from pilotfish.rpc.server import Server, run, serve_until_signal
from pilotfish.settings import Address, ListenAddress, fail_with, load
from pilotfish.steps import Grant
from pilotfish.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from orchestrator.http.gateway import Gateway

PROGRAM = "pilotfish orchestrator"
LIMITS = Limits()
VERSION = version("pilotfish")  # reads files, and every request asks for it
MAX_TREE_NODES = 256
MAX_REQUEST_BYTES = 8 << 20  # of gRPC; those of HTTP have a setting
DRAFT_GRACE_S = 10.0  # how long the start waits for a draft once the target answers

log = logging.getLogger(__name__)


def _checked_length(value: object) -> object:
    """In one sentence, where the union would give one for each of its members."""
    if value != "auto" and not (str(value).isdecimal() and int(str(value)) <= MAX_DRAFT_LENGTH):
        raise ValueError(f"must be auto or a number from 0 to {MAX_DRAFT_LENGTH}")
    return value


def _checked_tree(value: object) -> object:
    if value not in ("auto", "off") and not (str(value).isdecimal() and 1 <= int(str(value)) <= MAX_TREE_NODES):
        raise ValueError(f"must be auto, off or a number from 1 to {MAX_TREE_NODES}")
    return value


class OrchestratorSettings(HttpSettings):
    """Steps one target and any number of draft replicas in lockstep, and serves text.

    It needs no GPU: it owns the KV pages of the workers, schedules, and decides which draft tokens stay.
    """

    model_config = SettingsConfigDict(env_prefix="PILOTFISH_ORCHESTRATOR_")

    model: Path
    """Folder with the target's tokenizer.json and tokenizer_config.json."""

    target: Address = "127.0.0.1:50051"
    """HOST:PORT or port of the target worker."""

    draft: list[Address] = Field(default_factory=list)
    """HOST:PORT or port of a draft replica; give it once for each. Without one the target decodes alone."""

    listen: ListenAddress = "127.0.0.1:50050"
    """HOST:PORT or port to serve clients on; port 0 takes a free one."""

    name: str = ""
    """Name of the model for clients; by default the target's own."""

    draft_length: Annotated[Literal["auto"] | int, BeforeValidator(_checked_length)] = "auto"
    """Draft tokens per round and request, for requests that name none. auto chooses from round to round what gives
    the most tokens per second, by measured times and acceptance; none while a draft does not pay."""

    draft_tree: Annotated[Literal["auto", "off"] | int, BeforeValidator(_checked_tree)] = "auto"
    """Draft tokens of a tree, from drafters that grow trees; their longest path is the draft length. auto chooses from
    round to round, and chains where these give more; off asks for chains."""

    acceptance: Literal["match", "ratio", "block"] = "ratio"
    """Rule for unseeded sampling. Every rule is exact; block keeps slightly more than ratio, match less."""

    generation_config: Literal["auto", "none"] = "auto"
    """Whether the model's generation_config.json gives temperature, top_k, top_p, min_p, repetition_penalty and, as
    max_new_tokens, max_tokens where a request does not. auto: what it has; none: the protocols' defaults alone. What
    ends a completion it tells in any case."""

    max_rows: int = Field(LIMITS.max_rows, ge=1)
    """Most requests in one batch. More share a pass over the weights, and each waits longer for it."""

    max_prefill_tokens: int = Field(LIMITS.max_prefill_tokens, ge=1)
    """Most prompt tokens in one step. More fill prompts sooner, and hold up running requests longer."""

    max_waiting: int = Field(LIMITS.max_waiting, ge=1)
    """Requests that may wait for a place; more are refused with RESOURCE_EXHAUSTED."""

    support_limit: int = Field(LIMITS.support_limit, ge=1, le=1024)
    """Most token ids on which a sampled draft is drawn. More keep slightly more drafts, at 8 bytes each."""

    early_drafts: bool = LIMITS.early_drafts
    """A row that drafts one token at a time drafts again as soon as the target has answered, from both outcomes, before
    either is known: hides the orchestrator's work behind the draft, which has twice the rows. Pays where these cost the
    draft no time; not on a CPU. Heads by the match rule only."""

    trace: Path | None = None
    """File to write a trace to of what each process does when; open it at ui.perfetto.dev or chrome://tracing."""

    connect_timeout_s: float = Field(120.0, gt=0)
    """How long to wait at start for the target to answer."""

    draft_timeout_s: float = Field(5.0, gt=0)
    """How long a round waits for proposals before it goes on without them, and a draft that catches up for features
    of the target."""

    step_timeout_s: float = Field(300.0, gt=0)
    """How long the target may take for one step before it is given up as hanging. One whose process does not answer at
    all is given up within ten seconds."""

    target_timeout_s: float = Field(60.0, gt=0)
    """How long requests wait for a target that went away before they fail."""


def _tree_nodes(setting: Literal["auto", "off"] | int) -> int | None:
    """As in ``Limits``."""
    if setting == "auto":
        return None
    return 0 if setting == "off" else int(setting)


class Orchestrator:
    """The parts, wired together; ``start`` and ``stop`` it inside a running event loop.

    Args:
        settings: validated.
        target_kind, draft_kind: how to speak to workers.

    Raises:
        PilotfishError: the tokenizer cannot be read, the trace cannot be written, or the port cannot be had.
    """

    def __init__(
        self, settings: OrchestratorSettings, target_kind: TargetKind = TARGET, draft_kind: DraftKind = DRAFT
    ) -> None:
        self._settings = settings
        self._target_kind, self._draft_kind = target_kind, draft_kind
        self._tokenizer = Tokenizer(settings.model)
        limits = Limits(
            max_rows=settings.max_rows,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_waiting=settings.max_waiting,
            support_limit=settings.support_limit,
            tree_nodes=_tree_nodes(settings.draft_tree),
            early_drafts=settings.early_drafts,
        )
        self._trace = ChromeTrace(settings.trace) if settings.trace is not None else NO_TRACE
        self._reader = FeatureReader(settings.target)
        self._compiler = GrammarCompiler(settings.target)
        self.loop = Loop(
            Scheduler(limits),
            self._reader.read,
            settings.draft_timeout_s,
            settings.target_timeout_s,
            settings.step_timeout_s,
            self._trace,
        )
        defaults = self._read_defaults()
        self._generation = Generation(
            self.loop, self._tokenizer, defaults, self._info, self._offer, self._compiler.compile
        )
        self._defaults = defaults
        self.gateway: Gateway | None = None
        self._target_grant: Grant | None = None  # of the last target
        self._links: list[WorkerLink[Any, Any]] = []
        self._task: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def _read_defaults(self) -> Defaults:
        settings = self._settings
        found = Defaults(self._draft_length, Rule[settings.acceptance.upper()], self._tokenizer.eos_token_ids)
        if settings.generation_config == "none":
            return found
        try:
            found = replace(found, sampling=sampling_defaults(settings.model))
            found.check()
        except InvalidArgumentError as error:
            advice = "mend it, or do without its defaults by --generation-config none"
            raise InvalidArgumentError(f"{settings.model / GENERATION_CONFIG}: {error}; {advice}") from error
        return found

    async def start(self) -> Server:
        """Takes the ports, connects to the workers and starts rounds; returns the gRPC server, not answering yet.

        Raises:
            PilotfishError: a port is taken, the target does not answer, or a worker does not fit.
        """
        self.gateway = self._gateway()  # before the workers are waited for: a port that is taken is told at once
        server = self._server()
        settings, loop = self._settings, self.loop
        target = WorkerLink(self._target_kind, settings.target, self._target_opened, loop.target_lost)
        self._links = [target]
        try:
            await target.wait_opened(self._settings.connect_timeout_s)
            # Only now: whether a drafter fits depends on the features that the target stores.
            drafts = [WorkerLink(self._draft_kind, a, self._draft_opened, loop.draft_lost) for a in settings.draft]
            self._links += drafts
            await asyncio.gather(*(self._wait_for_draft(draft) for draft in drafts))
        except BaseException:
            await self.stop()
            await server.stop(0)
            raise
        self._task = asyncio.create_task(self.loop.run(), name="rounds")
        totals = Totals(self._load)
        self._generation.observers.append(totals.watch)
        self._telling = asyncio.create_task(totals.tell(), name="totals")
        if self.gateway is not None:
            metrics = self._generation.metrics = Metrics(self._info().model, self._load)
            self._generation.observers.append(metrics.watch)
            self.gateway.start(self._generation)
        return server

    async def stop(self) -> None:
        """Ends the rounds and the streams."""
        tasks = [task for task in (self._task, self._telling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.loop.fail_all(UnavailableError("the server is shutting down"))
        if self.gateway is not None:
            await self.gateway.stop()
        await asyncio.gather(self._reader.close(), self._compiler.close(), *(link.close() for link in self._links))
        self._trace.close()

    async def _wait_for_draft(self, draft: WorkerLink[Any, Any]) -> None:
        """A replica that does not answer yet is no reason not to serve; one that does not fit is."""
        try:
            await draft.wait_opened(DRAFT_GRACE_S)
        except UnavailableError as error:
            log.warning("%s; rows decode without it until it does", error)

    def _server(self) -> Server:
        service = GenerationService(self._generation)
        server = Server(self._settings.listen, "pilotfish.v1.GenerationService", MAX_REQUEST_BYTES)
        server.add(lambda to: generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, to))
        return server

    def _gateway(self) -> Gateway | None:
        if not self._settings.http:
            return None
        from orchestrator.http.gateway import Gateway  # a second of imports that only this needs

        return Gateway(self._settings)

    @property
    def _draft_length(self) -> int | None:
        """None: chosen from round to round."""
        return None if self._settings.draft_length == "auto" else self._settings.draft_length

    @property
    def _most_drafted(self) -> int:
        return MAX_ADAPTIVE_LENGTH if self._draft_length is None else self._draft_length

    def _info(self) -> ServerInfo:
        model, drafts = self._target_grant, list(self.loop.drafts.values())
        return ServerInfo(
            model=self._settings.name or (model.model_id if model is not None else ""),
            version=VERSION,
            max_len=min(model.max_len, model.page_count * model.page_size) if model is not None else 0,
            vocab_size=model.vocab_size if model is not None else 0,
            draft_length=self._most_drafted if self._settings.draft else 0,
            adaptive_draft_length=bool(self._settings.draft) and self._draft_length is None,
            draft_replica_count=len(drafts),
            draft_model=drafts[0].grant.model_id if drafts else "",
            target_ready=self.loop.target is not None,
        )

    def _offer(self) -> Offer:
        drafts = [(draft.grant, draft.capabilities) for draft in self.loop.drafts.values()]
        has_template = bool(self._tokenizer.template_source(with_tools=False))
        return offer(self._info().model, self._target_grant, drafts, self._defaults, has_template)

    def _load(self) -> Load:
        scheduler = self.loop.scheduler
        pool = scheduler.target.pool if scheduler.target is not None else None
        return Load(
            running=len(scheduler.rows),
            waiting=len(scheduler.waiting),
            kv_usage=1 - pool.available / pool.page_count if pool is not None else 0.0,
            target_ready=self.loop.target is not None,
            draft_replicas=len(self.loop.drafts),
        )

    def _target_opened(self, stream: TargetStream) -> None:
        self._require_same_tokenizer(stream.grant.tokenizer_hash, "target", stream.address)
        known, found = self._target_grant, stream.grant
        if known is not None and known.weights_hash != found.weights_hash:
            raise FailedPreconditionError(
                f"target at {stream.address} came back with other weights ({found.weights_hash[:12]}, were "
                f"{known.weights_hash[:12]}); restart the orchestrator to serve them"
            )
        self._target_grant = found
        self.loop.target_opened(stream)

    def _draft_opened(self, stream: DraftStream) -> None:
        self._require_same_tokenizer(stream.grant.tokenizer_hash, "draft", stream.address)
        self.loop.draft_opened(stream)

    def _require_same_tokenizer(self, found: str, kind: str, address: str) -> None:
        if found != self._tokenizer.hash:
            raise FailedPreconditionError(
                f"{kind} at {address} has another tokenizer ({found[:12]}) than {self._settings.model} "
                f"({self._tokenizer.hash[:12]}); token ids would not mean the same. Use a draft of the same family, "
                "and --model of the target's own folder"
            )


async def _serve(settings: OrchestratorSettings) -> None:
    orchestrator = Orchestrator(settings)
    server = await orchestrator.start()
    _calm_collector()
    gateway = orchestrator.gateway
    also = f"http={gateway.address}" if gateway is not None else ""
    await serve_until_signal(server, "orchestrator", before_stop=orchestrator.stop, also=also)


def _calm_collector() -> None:
    """A round makes thousands of objects that count themselves away; looking for cycles among them held it up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def main(argv: Sequence[str]) -> None:
    """Runs the orchestrator until SIGINT or SIGTERM."""
    settings = load(OrchestratorSettings, argv, PROGRAM)
    try:
        run(_serve(settings))
    except PilotfishError as error:
        fail_with(error, PROGRAM)
