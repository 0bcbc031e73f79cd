"""What every way in has in common: an ask comes in, events go out.

A protocol (``service`` for gRPC, ``http`` for OpenAI's) turns its messages into an ``Ask`` and the events of the
``Answer`` into its own; it decides nothing. All that is refused is refused here, in ``admission`` and by the scheduler,
in the same words for every protocol.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any

from orchestrator.admission import Asked, Defaults, admit, check_timeout, truncate
from orchestrator.capabilities import Offer
from orchestrator.core.requests import Request
from orchestrator.loop import Loop
from orchestrator.metrics import Metrics
from orchestrator.outputs import Event, Events, Finished, Output, Prompt, Watcher
from orchestrator.tokenizer import Tokenizer
from pilotfish.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError, PilotfishError, shown
from pilotfish.steps import Grammar


def made_up_id() -> str:
    """For a request whose client gave none."""
    return f"gen-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served; fields as in ``GetServerInfoResponse``."""

    model: str
    version: str
    max_len: int
    vocab_size: int
    draft_length: int
    adaptive_draft_length: bool
    draft_replica_count: int
    draft_model: str
    target_ready: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """One call of a client; meanings as in ``GenerateRequest``."""

    prompt: Sequence[int]
    """Token ids; see ``Generation.encode`` and ``encode_chat``."""
    asked: Asked = field(default_factory=Asked)
    is_text: bool = False
    """The prompt was a plain text; an echo is without the special tokens that were put around it."""
    model: str = ""
    request_id: str = ""
    priority: int = 0
    timeout_s: float | None = None
    shown_token_ids: Sequence[int] = ()
    """Special tokens that have a text nevertheless: marks that a protocol reads in it."""


class Answer(AsyncIterator[Event]):
    """The events of an ask: its prompt if wanted, then for each sample pieces and ``Finished``, as they come.

    Leaving it early releases all that it holds.

        async with generation.begin(ask) as answer:
            async for event in answer: ...

    Attributes:
        request_id: the client's, or made up.
        model: that answers.
        prompt_token_count: tokens of the prompt.
        sample_count: events with an index below it follow.
    """

    def __init__(
        self,
        loop: Loop,
        model: str,
        requests: Sequence[Request],
        events: Events,
        timeout_s: float | None,
        queue: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.request_id, self.model = requests[0].id, model
        self.prompt_token_count = len(requests[0].prompt)
        self._loop, self._requests, self._events = loop, requests, events
        self._timeout_s, self._queue = timeout_s, queue
        self.sample_count = self._running = len(requests)
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    async def __anext__(self) -> Event:
        """The next event.

        Raises:
            PilotfishError: a sample failed, or the deadline passed; nothing follows.
        """
        if not self._running:
            raise StopAsyncIteration
        event = await self._events.get()
        self._running -= isinstance(event, Finished)
        return event

    async def __aenter__(self) -> Answer:
        """Queues what waited for its grammar.

        Raises:
            PilotfishError: it is no grammar, or see ``Generation.begin``.
        """
        if self._queue is None:
            return self
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._queue()
        except BaseException as error:
            self._requests = ()  # none is queued
            await self.__aexit__(None, None, None)
            if isinstance(error, TimeoutError):
                raise self._late() from None
            raise
        self._queue = None
        return self

    def _late(self) -> DeadlineExceededError:
        limit = f"{self._timeout_s:g}"
        return DeadlineExceededError(f"request {self.request_id!r} did not end within its timeout_s of {limit}")

    def _expire(self) -> None:
        for request in self._requests if self._queue is None else ():
            self._loop.fail(request, self._late())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            self._loop.cancel(request)
        self._events.close()


class Generation:
    """Serves one model.

    Args:
        loop: runs the requests.
        tokenizer: of the model.
        defaults: where a client says nothing.
        info: describes the deployment as it is now.
        offer: what it honours now, and who drafts.
        compile_grammar: by the target; raises ``InvalidArgumentError`` if it is none.

    Attributes:
        metrics: counts what is served, once there is somebody who reads it.
        observers: each makes a watcher of an ask's events.
    """

    def __init__(
        self,
        loop: Loop,
        tokenizer: Tokenizer,
        defaults: Defaults,
        info: Callable[[], ServerInfo],
        offer: Callable[[], Offer],
        compile_grammar: Callable[[Grammar], Awaitable[None]],
    ) -> None:
        self._loop, self._compile_grammar = loop, compile_grammar
        self.tokenizer = tokenizer
        self._defaults = defaults
        self.info = info
        self.offer = offer
        self.metrics: Metrics | None = None
        self.observers: list[Callable[[], Watcher]] = []

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]:
        """What the model's generation config says of sampling, by the names of ``Asked``."""
        return self._defaults.sampling

    async def encode(self, text: str, add_special_tokens: bool = True, *, is_cut: bool = False) -> list[int]:
        """Token ids of a plain prompt, of any length if that is to be cut; see ``Tokenizer.encode``."""
        max_len = 0 if is_cut else self.info().max_len
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens, max_len)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        *,
        is_cut: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, of any length if that is to be cut; see ``Tokenizer.encode_chat``."""
        encode = self.tokenizer.encode_chat
        max_len = 0 if is_cut else self.info().max_len
        return await asyncio.to_thread(
            encode, messages, add_generation_prompt, tools, variables, max_len, continue_final_message
        )

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones written out."""
        return await asyncio.to_thread(self.tokenizer.decode, token_ids, False)

    def require_model(self, name: str) -> None:
        """Returns if the model is the one served, or none is named.

        Raises:
            NotFoundError: it is another.
        """
        if name not in ("", served := self.info().model):
            raise NotFoundError(f"model is {shown(name)}; this server has {served!r}", "model")

    def begin(self, ask: Ask, *watchers: Watcher) -> Answer:
        """Queues what is asked for; enter the answer at once, which ends it when left.

        Args:
            ask: of a client.
            watchers: of its events, beside those that the observers make.

        Raises:
            NotFoundError: the model is not the one served.
            PilotfishError: see ``admission.admit`` and ``Scheduler.submit``.
        """
        self.require_model(ask.model)
        request_id = ask.request_id or made_up_id()
        info = self.info()
        vocab_size = info.vocab_size or self.tokenizer.vocab_size  # before there is a target
        most = self._defaults.fill(ask.asked).max_tokens or 0
        ask = replace(ask, prompt=truncate(ask.prompt, ask.asked.truncate_prompt_tokens, most, info.max_len))
        asked = self._defaults.fill(ask.asked, info.max_len - len(ask.prompt) if info.max_len else None)
        timeout_s = check_timeout(ask.timeout_s)
        self._loop.require_room(len(ask.prompt), asked.max_tokens or 0)
        requests = admit(request_id, ask.prompt, asked, self._defaults, vocab_size, ask.priority)
        watchers += tuple(observe() for observe in self.observers)
        is_scored = ask.asked.prompt_logprobs is not None
        prompt = self._prompt(ask) if ask.asked.echo or is_scored else None
        events = Events(watchers, begin_with_prompt=prompt is not None)

        def submit() -> None:
            self._submit(requests, ask, events, prompt if is_scored else None)
            for watcher in watchers:
                watcher.began(requests)

        grammar = requests[0].params.shaping.grammar
        if grammar is None:
            submit()
        if prompt is not None and not is_scored:
            events.put(prompt)
        queue = None if grammar is None else partial(self._queue_with, grammar, submit)
        return Answer(self._loop, info.model, requests, events, timeout_s, queue)

    async def _queue_with(self, grammar: Grammar, submit: Callable[[], None]) -> None:
        try:
            await self._compile_grammar(grammar)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(str(error), grammar.kind.name.lower()) from error
        submit()

    def _submit(self, requests: Sequence[Request], ask: Ask, events: Events, prompt: Prompt | None) -> None:
        """Queues all samples, or none; the first brings the prompt once it is scored."""
        queued: list[Request] = []
        named = self.tokenizer.hidden_tokens_in(ask.asked.stop)
        try:
            for index, request in enumerate(requests):
                output = Output(
                    self.tokenizer.detokenizer(ask.asked.skip_special_tokens, ask.shown_token_ids),
                    tuple(ask.asked.stop),
                    events,
                    index,
                    min_tokens=request.params.shaping.min_tokens,
                    includes_stop=ask.asked.include_stop_str_in_output,
                    prompt=None if index else prompt,
                    named=named,
                )
                self._loop.submit(request, output)
                queued.append(request)
        except PilotfishError:
            for request in queued:
                self._loop.cancel(request)
            raise

    def _prompt(self, ask: Ask) -> Prompt:
        texts = self.tokenizer.prompt_texts(ask.prompt, is_text=ask.is_text)
        return Prompt(tuple(texts), tuple(ask.prompt))
