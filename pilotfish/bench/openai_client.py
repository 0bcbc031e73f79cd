"""Any server of OpenAI's API, as the load generator asks it: streams of chat or plain completions.

Only what all servers know is sent. A stream says how many tokens it had in its ``usage``, at its end; how many came
with each chunk is found by sharing them out by the lengths of the chunks' texts. Without ``usage`` a chunk counts as a
token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal

import httpx2

from pilotfish.client.params import SamplingParams
from pilotfish.client.results import Completion, RoundTimes, ServerInfo, Usage
from pilotfish.client.surface import ChatMessages, Prompt
from pilotfish.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    PilotfishError,
    UnavailableError,
)

Endpoint = Literal["chat", "completions"]

_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_NO_TIMES = RoundTimes(0, 0, 0, 0)


class OpenAIClient:
    """Asks one server; as an ``AsyncClient``, as far as the load generator needs it.

    Args:
        base_url: of the API, such as ``http://127.0.0.1:8000/v1``; without a path ``/v1`` is meant.
        endpoint: where texts are asked: as a user's turn, or as a plain prompt.
        api_key: sent with every request; empty: none.
        model: that is asked for; empty: the only one that the server has.

    Attributes:
        counts_chunks: the server gives no usage, so that chunks are counted for tokens.

    Raises:
        InvalidArgumentError: the URL is none.
    """

    def __init__(self, base_url: str, endpoint: Endpoint = "chat", api_key: str = "", model: str = "") -> None:
        self.base_url = _checked(base_url)
        self.model = model
        self.counts_chunks = False
        self._endpoint = endpoint
        self._wants_usage = True
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)

    async def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """What is known of the server, which is the name of its model.

        Raises:
            PilotfishError: nobody answers, or it does not say which model it has.
        """
        if not self.model:
            async with self.within(timeout_s):
                self.model = await self._only_model()
        return ServerInfo(self.model, "", 0, 0, 0, False, 0, "", target_ready=True)

    def chat_stream(
        self, messages: ChatMessages, params: SamplingParams, *, timeout: float | None = None
    ) -> OpenAIStream:
        """A user's turn; with the plain endpoint its text."""
        if self._endpoint == "chat":
            return self._stream({"messages": [dict(message) for message in messages]}, params, timeout)
        return self._stream({"prompt": messages[-1]["content"]}, params, timeout)

    def stream(self, prompt: Prompt, params: SamplingParams, *, timeout: float | None = None) -> OpenAIStream:
        """A plain prompt: token ids, which have no place in a chat."""
        assert self._endpoint == "completions"
        return self._stream({"prompt": prompt if isinstance(prompt, str) else list(prompt)}, params, timeout)

    @asynccontextmanager
    async def within(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Says in our words what goes wrong on the way.

        Raises:
            PilotfishError: nobody answers, the connection ended, or it took longer.
        """
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self.base_url} did not answer in time") from error
        except httpx2.ConnectError as error:
            raise UnavailableError(f"nobody answers at {self.base_url} ({error})") from error
        except httpx2.RemoteProtocolError as error:
            raise UnavailableError(
                f"{self.base_url} breaks off, or is no HTTP server: the port of gRPC, say? ({error})"
            ) from error
        except httpx2.HTTPError as error:
            raise UnavailableError(f"{self.base_url}: {type(error).__name__} {error}".rstrip()) from error

    async def send(self, body: dict[str, Any]) -> httpx2.Response:
        """Begins a stream, with usage if the server can give it.

        Raises:
            PilotfishError: it is refused.
        """
        asked = body | ({"stream_options": {"include_usage": True}} if self._wants_usage else {})
        url = self.base_url + _PATHS[self._endpoint]
        response = await self._http.send(self._http.build_request("POST", url, json=asked), stream=True)
        if response.is_success:
            return response
        await response.aread()
        await response.aclose()
        if "stream_options" in asked and response.status_code in (400, 422) and "stream_options" in response.text:
            self._wants_usage = False
            return await self.send(body)
        raise _refusal(response)

    def _stream(self, asked: dict[str, Any], params: SamplingParams, timeout: float | None) -> OpenAIStream:
        body = {"model": self.model, "stream": True, "max_tokens": params.max_tokens, "temperature": params.temperature}
        return OpenAIStream(self, {**body, **asked}, timeout)

    async def _only_model(self) -> str:
        response = await self._http.get(f"{self.base_url}/models")
        if not response.is_success:
            if response.status_code == 404:
                raise NotFoundError(f"{self.base_url}/models is not served; name the model with --model")
            raise _refusal(response)
        try:
            names = [str(each["id"]) for each in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InternalError(f"{self.base_url}/models gives no list of models; is it OpenAI's API?") from error
        if len(names) != 1:
            raise FailedPreconditionError(
                f"{self.base_url} has {len(names)} models; name one with --model: {', '.join(names)}"
            )
        return names[0]

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()


class Chunk:
    """A part of an answer that brought text."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens: Sequence[int] = range(1)
        """As many as it is taken for; known once the answer is over."""


class OpenAIStream(AsyncIterator[Chunk]):
    """The chunks of one answer that bring text; to be entered, read to the end, and asked for its ``result``."""

    def __init__(self, client: OpenAIClient, body: dict[str, Any], timeout_s: float | None) -> None:
        self._client, self._body = client, body
        self._within = client.within(timeout_s)
        self._response: httpx2.Response | None = None
        self._lines: AsyncIterator[str] | None = None
        self._chunks: list[Chunk] = []
        self._text: list[str] = []
        self._usage: dict[str, Any] | None = None
        self._reason: str | None = None
        self._id = ""
        self._is_over = False

    async def __aenter__(self) -> OpenAIStream:
        await self._within.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._response is not None:
                await self._response.aclose()
        finally:
            await self._within.__aexit__(kind, error, trace)

    async def __anext__(self) -> Chunk:
        """The next chunk; raises what goes wrong, of which leaving the stream makes a ``PilotfishError``."""
        if self._lines is None:
            self._response = await self._client.send(self._body)
            self._lines = self._response.aiter_lines()
        while not self._is_over:
            line = await anext(self._lines, None)
            if line is None or line.strip() == "data: [DONE]":
                self._end()
            elif line.startswith("data:") and (text := self._take(line.removeprefix("data:"))):
                self._text.append(text)
                self._chunks.append(Chunk(len(text)))
                return self._chunks[-1]
        raise StopAsyncIteration

    @property
    def result(self) -> Completion:
        """The answer, without what only Pilotfish's own protocol tells.

        Raises:
            FailedPreconditionError: it is not over.
        """
        if not self._is_over:
            raise FailedPreconditionError("the stream has no result before its end; read all of it first")
        usage = self._usage or {}
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            text="".join(self._text),
            token_ids=(),
            finish_reason="length" if self._reason == "length" else "stop",
            usage=Usage(
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=len(self._chunks) if self._total is None else self._total,
                cached_tokens=int(details.get("cached_tokens") or 0),
                rounds=0,
                drafted=0,
                accepted=0,
                accepted_per_position=(),
                drafted_per_position=(),
                queue_us=0,
                first_token_us=0,
                total_us=0,
                round_total=_NO_TIMES,
                round_median=_NO_TIMES,
                preemptions=0,
            ),
            request_id=self._id,
            model=self._client.model,
            pieces=(),
        )

    def _take(self, data: str) -> str:
        """The text that an event brings; notes what else it says."""
        try:
            event = json.loads(data)
        except ValueError as error:
            raise InternalError(f"the server sent an event that is no JSON: {data.strip()[:80]!r}") from error
        if (fault := event.get("error")) is not None:
            raise InternalError(f"the server failed on the way: {_message(fault)}")
        self._id = event.get("id") or self._id
        self._usage = event.get("usage") or self._usage
        text = ""
        for choice in event.get("choices") or ():
            self._reason = choice.get("finish_reason") or self._reason
            text += _text_of(choice)
        return text

    def _end(self) -> None:
        if self._reason is None:
            raise UnavailableError("the connection ended before the answer did")
        self._is_over = True
        if self._total is None:
            self._client.counts_chunks = True
            return
        counts = shared_out(self._total, [each.length for each in self._chunks])
        for chunk, count in zip(self._chunks, counts, strict=True):
            chunk.tokens = range(count)

    @property
    def _total(self) -> int | None:
        """Tokens of the answer, if the server says how many."""
        total = (self._usage or {}).get("completion_tokens")
        return total if isinstance(total, int) else None


def shared_out(total: int, lengths: Sequence[int]) -> list[int]:
    """So many tokens over chunks of these lengths: one for each, and what is left by the lengths.

    Where there are fewer tokens than chunks, none for some.
    """
    least = 1 if total >= len(lengths) else 0
    left, whole = total - least * len(lengths), sum(lengths)
    counts, before, passed = [], 0, 0
    for length in lengths:
        passed += length
        until = round(left * passed / whole)
        counts.append(least + until - before)
        before = until
    return counts


def _text_of(choice: dict[str, Any]) -> str:
    """Whatever of an answer a choice brings: text, reasoning by its two names, calls of tools."""
    delta = choice.get("delta") or {}
    calls = [(call.get("function") or {}).get("arguments") for call in delta.get("tool_calls") or ()]
    parts = [choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), *calls]
    return "".join(part for part in parts if isinstance(part, str))


def _checked(base_url: str) -> str:
    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL as error:
        raise InvalidArgumentError(f"--base-url is {base_url!r}, which is no URL ({error})") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidArgumentError(f"--base-url is {base_url!r}; it must be such as http://127.0.0.1:8000/v1")
    if url.userinfo:
        raise InvalidArgumentError("--base-url has a user and a password; give --api-key instead")
    return base_url.rstrip("/") + ("/v1" if url.path in ("", "/") else "")


def _refusal(response: httpx2.Response) -> PilotfishError:
    """What an answer that is no success stands for."""
    try:
        told = _message(response.json())
    except ValueError:
        told = response.text.strip()
    status = response.status_code
    message = f"{response.url.path} answers {status}: {told[:300] or response.reason_phrase}"
    if status in (401, 403):
        return FailedPreconditionError(f"{message}; give --api-key")
    if status == 429:
        return OverloadedError(message)
    if status == 404:
        return NotFoundError(message)
    return InvalidArgumentError(message) if status < 500 else UnavailableError(message)


def _message(told: Any) -> str:
    """The text of an error, in one of the shapes that servers give it."""
    if isinstance(told, dict):
        found = told.get("error") or told.get("message") or told.get("detail") or told
        return _message(found) if isinstance(found, dict) and found is not told else str(found)
    return str(told)
