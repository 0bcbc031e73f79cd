"""What every way in has in common: an ask comes in, events go out.

A protocol (``service`` for gRPC) turns its messages into an ``Ask`` and the events of the ``Answer`` into its own;
it decides nothing. All that is refused is refused here, in ``admission`` and by the scheduler, in the same words for
every protocol.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from orchestrator.admission import Asked, Defaults, admit
from orchestrator.core.requests import Request
from orchestrator.loop import Loop
from orchestrator.outputs import Finished, Output, Piece
from orchestrator.tokenizer import Tokenizer
from pilotfish.errors import NotFoundError


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
    model: str = ""
    request_id: str = ""


class Answer(AsyncIterator[Piece | Finished]):
    """The events of an ask, in order: pieces, then ``Finished``. Leaving it early releases all that it holds.

        async with generation.begin(ask) as answer:
            async for event in answer: ...

    Attributes:
        request_id: the client's, or made up.
        model: that answers.
        prompt_token_count: tokens of the prompt.
    """

    def __init__(self, loop: Loop, model: str, request: Request, output: Output) -> None:
        self.request_id, self.model = request.id, model
        self.prompt_token_count = len(request.prompt)
        self._loop, self._request, self._output = loop, request, output
        self._has_ended = False

    async def __anext__(self) -> Piece | Finished:
        """The next event.

        Raises:
            PilotfishError: the request failed; nothing follows.
        """
        if self._has_ended:
            raise StopAsyncIteration
        event = await self._output.next_event()
        self._has_ended = isinstance(event, Finished)
        return event

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.cancel(self._request)


class Generation:
    """Serves one model.

    Args:
        loop: runs the requests.
        tokenizer: of the model.
        defaults: where a client says nothing.
        info: describes the deployment as it is now.
    """

    def __init__(self, loop: Loop, tokenizer: Tokenizer, defaults: Defaults, info: Callable[[], ServerInfo]) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._defaults = defaults
        self.info = info

    async def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt; see ``Tokenizer.encode``."""
        return await asyncio.to_thread(self._tokenizer.encode, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation; see ``Tokenizer.encode_chat``."""
        return await asyncio.to_thread(self._tokenizer.encode_chat, messages)

    def begin(self, ask: Ask) -> Answer:
        """Queues what is asked for; enter the answer at once, which ends it when left.

        Raises:
            NotFoundError: the model is not the one served.
            PilotfishError: see ``admission.admit`` and ``Scheduler.submit``.
        """
        model = self.info().model
        if ask.model not in ("", model):
            raise NotFoundError(f"model is {ask.model!r}; this server has {model!r}")
        request_id = ask.request_id or f"gen-{secrets.token_hex(8)}"
        request = admit(request_id, list(ask.prompt), ask.asked, self._defaults)
        output = Output(self._tokenizer.detokenizer(), ask.asked.stop)
        self._loop.submit(request, output)
        return Answer(self._loop, model, request, output)
