"""A server of OpenAI's API as others have it: none of our extensions, and what it does not know it refuses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options"}


@dataclass
class FakeOpenAI:
    """What it answers with, and what it was asked.

    Attributes:
        chunks: texts of a stream, after one that is empty.
        tokens: of the answer, as usage has them; None: it gives no usage, and refuses to be asked for it.
        models: that it lists; None: it lists none.
        key: that it wants.
        breaks: how a stream ends: as it should, or without its end, or by an error.
        gap_s: before each chunk.
    """

    chunks: Sequence[str] = ("Hello", " to", " you")
    tokens: int | None = 6
    models: Sequence[str] | None = ("their-model",)
    key: str = ""
    breaks: str = ""
    gap_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _handler(fake: FakeOpenAI) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(self._models)

        def do_POST(self) -> None:
            with fake.lock:
                fake.running += 1
                fake.most = max(fake.most, fake.running)
            try:
                self._answer(self._complete)
            finally:
                with fake.lock:
                    fake.running -= 1

        def _answer(self, work: Any) -> None:
            try:
                if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
                    raise _Refused(401, "Incorrect API key provided")
                work()
            except _Refused as refused:
                self._send(refused.status, {"error": {"message": str(refused), "type": "invalid_request_error"}})
            except (BrokenPipeError, ConnectionResetError):
                pass

        def _send(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _models(self) -> None:
            if fake.models is None or self.path != "/v1/models":
                raise _Refused(404, "Not Found")
            self._send(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in fake.models]})

        def _complete(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            fake.paths.append(self.path)
            if unknown := set(body) - KNOWN:
                raise _Refused(400, f"Unrecognized request argument supplied: {', '.join(sorted(unknown))}")
            if fake.tokens is None and "stream_options" in body:
                raise _Refused(422, "stream_options: extra fields not permitted")
            if fake.models and body["model"] not in fake.models:
                raise _Refused(404, f"The model `{body['model']}` does not exist.")
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in self._events(is_chat="messages" in body, wants_usage="stream_options" in body):
                self.wfile.write(event.encode())
                self.wfile.flush()

        def _events(self, *, is_chat: bool, wants_usage: bool) -> Iterator[str]:
            def event(choices: list[dict[str, Any]], **others: Any) -> str:
                return f"data: {json.dumps({'id': 'answer-1', 'choices': choices, **others})}\r\n\r\n"

            def choice(text: str, reason: str | None = None) -> list[dict[str, Any]]:
                said = {"delta": {"content": text}} if is_chat else {"text": text}
                return [{"index": 0, **said, "finish_reason": reason}]

            yield ": a comment, as a proxy keeps a line open\r\n\r\n"
            yield event(choice(""))
            for index, text in enumerate(fake.chunks):
                time.sleep(fake.gap_s)
                if fake.breaks and index == 1:
                    if fake.breaks == "error":
                        yield event([], error={"message": "out of memory"})
                    return
                yield event(choice(text))
            yield event(choice("", "length"))
            if wants_usage and fake.tokens is not None:
                usage = {"prompt_tokens": 9, "completion_tokens": fake.tokens}
                yield event([], usage=usage | {"prompt_tokens_details": {"cached_tokens": 3}})
            yield "data: [DONE]\r\n\r\n"

    return Handler


@contextmanager
def serving(fake: FakeOpenAI) -> Iterator[str]:
    """Serves on a free port of the loopback; yields the URL, without a path."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake)) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
