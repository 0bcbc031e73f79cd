"""The methods of both clients, written once: they build the request, a subclass moves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from pilotfish.client.params import SamplingParams
from pilotfish.errors import InvalidArgumentError
from pilotfish.v1 import generation_pb2 as pb

Prompt = str | Sequence[int]
ChatMessages = Sequence[Mapping[str, str]]

StreamT = TypeVar("StreamT")
CompletionT = TypeVar("CompletionT")
InfoT = TypeVar("InfoT")


class Surface(ABC, Generic[StreamT, CompletionT, InfoT]):
    """What a client can ask.

    Errors are those of :mod:`pilotfish.errors`: what the server refuses arrives as the class that it raised.
    Arguments that all four calls share:

    - ``params``: how to sample and when to stop; None takes all defaults.
    - ``timeout``: seconds for the whole call; None waits for ever.
    - ``model``: name of the model wanted; empty takes whichever is served.
    - ``request_id``: names the request in logs and errors; empty lets the server make one up.

    Args:
        address: ``host:port`` of an orchestrator.
    """

    def __init__(self, address: str = "127.0.0.1:50050") -> None:
        self.address = address

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
    ) -> CompletionT:
        """Continues a text or a sequence of token ids and returns the whole completion."""
        return self._complete(prompt_request(prompt, params, model, request_id), timeout)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
    ) -> StreamT:
        """Like :meth:`generate`, piece by piece as rounds end."""
        return self._open(prompt_request(prompt, params, model, request_id), timeout)

    def chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
    ) -> CompletionT:
        """Answers a conversation, ``[{"role": "user", "content": "Hello"}]``, in the model's chat template."""
        return self._complete(chat_request(messages, params, model, request_id), timeout)

    def chat_stream(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
    ) -> StreamT:
        """Like :meth:`chat`, piece by piece as rounds end."""
        return self._open(chat_request(messages, params, model, request_id), timeout)

    def server_info(self, *, timeout: float | None = None) -> InfoT:
        """What is served."""
        return self._info(timeout)

    @abstractmethod
    def _complete(self, request: pb.GenerateRequest, timeout_s: float | None) -> CompletionT: ...

    @abstractmethod
    def _open(self, request: pb.GenerateRequest, timeout_s: float | None) -> StreamT: ...

    @abstractmethod
    def _info(self, timeout_s: float | None) -> InfoT: ...


def prompt_request(prompt: Prompt, params: SamplingParams | None, model: str, request_id: str) -> pb.GenerateRequest:
    """The request for a text or token ids."""
    request = _request(params, model, request_id)
    if isinstance(prompt, str):
        request.text = prompt
        return request
    try:
        if prompt is None or isinstance(prompt, bytes):
            raise TypeError("protobuf would take it for no ids, or its bytes for ids")
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"prompt is {_brief(prompt)}; it must be a text or a sequence of token ids, integers of 32 bits"
        ) from error
    return request


def chat_request(
    messages: ChatMessages, params: SamplingParams | None, model: str, request_id: str
) -> pb.GenerateRequest:
    """The request for a conversation."""
    request = _request(params, model, request_id)
    request.messages.SetInParent()
    for index, message in enumerate(messages):
        try:
            request.messages.messages.add(**message)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"messages[{index}] is {_brief(message)}; it must be a mapping of 'role' and 'content' to texts"
            ) from error
    return request


def _request(params: SamplingParams | None, model: str, request_id: str) -> pb.GenerateRequest:
    sampling = (params if params is not None else SamplingParams()).to_pb()
    return pb.GenerateRequest(request_id=request_id, model=model, sampling=sampling)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
