"""The methods of both clients, written once: they build the request, a subclass moves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from pilotfish.addresses import read_address
from pilotfish.client.params import SamplingParams
from pilotfish.errors import InvalidArgumentError, refusal, shown
from pilotfish.v1 import generation_pb2 as pb

_LONGEST_S = 10**9

Prompt = str | Sequence[int]
ChatMessages = Sequence[Mapping[str, str]]

StreamT = TypeVar("StreamT")
CompletionT = TypeVar("CompletionT")
InfoT = TypeVar("InfoT")
CapabilitiesT = TypeVar("CapabilitiesT")


class Surface(ABC, Generic[StreamT, CompletionT, InfoT, CapabilitiesT]):
    """What a client can ask.

    Errors are those of :mod:`pilotfish.errors`: what the server refuses arrives as the class that it raised.
    Arguments that all four calls share:

    - ``params``: how to sample and when to stop; None takes all defaults.
    - ``timeout``: seconds for the whole call; then the server releases all that it holds. None waits for ever.
    - ``model``: name of the model wanted; empty takes whichever is served.
    - ``request_id``: names the request in logs and errors; empty lets the server make one up.
    - ``priority``: lower goes first; when memory runs out, the highest number waits.

    Args:
        address: ``host:port`` of an orchestrator.
    """

    def __init__(self, address: str = "127.0.0.1:50050") -> None:
        self.address = require_address(address)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
    ) -> CompletionT:
        """Continues a text or a sequence of token ids and returns the whole completion."""
        return self._complete(prompt_request(prompt, params, model, request_id, priority), require_timeout(timeout))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
    ) -> StreamT:
        """Like :meth:`generate`, piece by piece as rounds end."""
        return self._open(prompt_request(prompt, params, model, request_id, priority), require_timeout(timeout))

    def chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
    ) -> CompletionT:
        """Answers a conversation, ``[{"role": "user", "content": "Hello"}]``, in the model's chat template."""
        return self._complete(chat_request(messages, params, model, request_id, priority), require_timeout(timeout))

    def chat_stream(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
    ) -> StreamT:
        """Like :meth:`chat`, piece by piece as rounds end."""
        return self._open(chat_request(messages, params, model, request_id, priority), require_timeout(timeout))

    def server_info(self, *, timeout: float | None = None) -> InfoT:
        """What is served."""
        return self._info(require_timeout(timeout))

    def capabilities(self, *, timeout: float | None = None) -> CapabilitiesT:
        """Every field of a request, what it may be, and whether this deployment honours it now."""
        return self._capabilities(require_timeout(timeout))

    @abstractmethod
    def _complete(self, request: pb.GenerateRequest, timeout_s: float | None) -> CompletionT: ...

    @abstractmethod
    def _open(self, request: pb.GenerateRequest, timeout_s: float | None) -> StreamT: ...

    @abstractmethod
    def _info(self, timeout_s: float | None) -> InfoT: ...

    @abstractmethod
    def _capabilities(self, timeout_s: float | None) -> CapabilitiesT: ...


def prompt_request(
    prompt: Prompt, params: SamplingParams | None, model: str, request_id: str, priority: int
) -> pb.GenerateRequest:
    """The request for a text or token ids."""
    request = _request(params, model, request_id, priority)
    try:
        if isinstance(prompt, str):
            request.text = prompt
            return request
        if prompt is None or isinstance(prompt, bytes):
            raise TypeError("protobuf would take it for no ids, or its bytes for ids")
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    except UnicodeEncodeError as error:
        raise _not_unicode("prompt", prompt) from error
    except (TypeError, ValueError) as error:
        limit = "it must be a text or a sequence of token ids, integers of 32 bits"
        raise refusal("prompt", shown(prompt), limit) from error
    return request


def chat_request(
    messages: ChatMessages, params: SamplingParams | None, model: str, request_id: str, priority: int
) -> pb.GenerateRequest:
    """The request for a conversation."""
    request = _request(params, model, request_id, priority)
    request.messages.SetInParent()
    if not isinstance(messages, Iterable):
        raise refusal("messages", shown(messages), "it must be a sequence of mappings")
    for index, message in enumerate(messages):
        try:
            role, content = message["role"], message["content"]
            if set(message) != {"role", "content"} or role is None or content is None:
                raise ValueError("protobuf would take None for empty, and what it does not know would be lost")
            request.messages.messages.add(role=role, content=content)
        except UnicodeEncodeError as error:
            raise _not_unicode(f"messages[{index}]", message) from error
        except (TypeError, ValueError, KeyError) as error:
            limit = "it must be a mapping of 'role' and 'content' to texts"
            raise refusal(f"messages[{index}]", shown(message), limit) from error
    return request


def _request(params: SamplingParams | None, model: str, request_id: str, priority: int) -> pb.GenerateRequest:
    if params is not None and not isinstance(params, SamplingParams):
        raise refusal("params", shown(params), "it must be None or SamplingParams(...)")
    for name, value in (("model", model), ("request_id", request_id)):
        if not isinstance(value, str):
            raise refusal(name, shown(value), "it must be a text")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _not_unicode(name, value)
    if not (isinstance(priority, int) and -(2**31) <= priority < 2**31):
        raise refusal("priority", shown(priority), "it must be an integer of 32 bits")
    sampling = (params if params is not None else SamplingParams()).to_pb()
    return pb.GenerateRequest(request_id=request_id, model=model, sampling=sampling, priority=priority)


def require_address(address: str) -> str:
    """``address`` as ``host:port``, if it can be one.

    Raises:
        InvalidArgumentError: neither ``host:port`` nor a port.
    """
    return read_address(address if isinstance(address, str) else repr(address), "the server's address")


def require_timeout(timeout: float | None) -> float | None:
    """``timeout``, if a call can have it.

    Raises:
        InvalidArgumentError: no number, not above 0, or more than gRPC can count.
    """
    if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout <= _LONGEST_S):
        limits = f"above 0 and at most {_LONGEST_S}"
        raise refusal("timeout", shown(timeout), f"it must be None or a number of seconds {limits}")
    return timeout


def _not_unicode(name: str, value: object) -> InvalidArgumentError:
    return refusal(name, shown(value), "it has bytes that are no text in UTF-8; decode it first")
