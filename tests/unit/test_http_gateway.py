"""What stands before the endpoints: settings, keys, limits, the shape of errors, and the list of fields."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.http.bodies.base import Body, is_ignored, refusal_of
from orchestrator.http.bodies.chat import ChatBody
from orchestrator.http.bodies.completions import CompletionBody
from orchestrator.http.bodies.responses import ResponseBody
from orchestrator.http.errors import api_error
from orchestrator.http.gateway import Gateway
from orchestrator.http.keys import CLIENT, Keys, read_keys
from orchestrator.http.limits import FREE_BYTES, Budget, Limits
from orchestrator.http.settings import HttpSettings
from orchestrator.server import OrchestratorSettings
from pilotfish.errors import InternalError, InvalidArgumentError, OverloadedError, PilotfishError
from pilotfish.settings import load

DOCS = Path(__file__).parents[2] / "docs" / "openai.md"
JSON = [(b"content-type", b"application/json")]


def ask(
    app: ASGIApp, *messages: Message, path: str = "/v1/x", headers: list[tuple[bytes, bytes]] | None = None
) -> list[Message]:
    """What an application answers to the messages of one POST."""
    given, sent = list(messages), []

    async def receive() -> Message:
        return given.pop(0) if given else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": JSON if headers is None else headers}
    asyncio.run(run(app, scope, receive, send))
    return sent


async def run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def limits(app: ASGIApp, max_body_bytes: int = 10, max_requests: int = 1, budget: Budget | None = None) -> Limits:
    return Limits(app, max_body_bytes, max_requests, budget or Budget(1 << 20, 1 << 20))


def body(*chunks: bytes) -> list[Message]:
    return [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
        for index, chunk in enumerate(chunks)
    ]


def echo(then: Callable[[], Awaitable[None]] | None = None) -> ASGIApp:
    """Answers with the body and the type of what comes after it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        content = (await receive())["body"]
        if then is not None:
            await then()
        after = (await receive())["type"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content + after.encode()})

    return app


# Limits


def test_a_body_is_read_whole_and_leaving_is_seen_after_it() -> None:
    sent = ask(limits(echo()), *body(b"01", b"", b"23"))
    assert sent[-1]["body"] == b"0123http.disconnect"


@pytest.mark.parametrize("headers", [JSON, [*JSON, (b"content-length", b"11")]])
def test_a_body_beyond_the_limit_is_413_however_it_comes(headers: list[tuple[bytes, bytes]]) -> None:
    sent = ask(limits(echo()), *body(b"01234", b"567890"), headers=headers)
    assert sent[0]["status"] == 413
    assert (b"connection", b"close") in sent[0]["headers"]
    assert ask(limits(echo()), *body(b"01234", b"56789"))[0]["status"] == 200


def test_a_client_that_leaves_within_its_body_gets_nothing() -> None:
    first = body(b"0", b"1")[0]
    assert ask(limits(echo()), first, {"type": "http.disconnect"}) == []


def test_a_body_that_does_not_come_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.http.limits.BODY_TIMEOUT_S", 0.01)

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": JSON}
    asyncio.run(run(limits(echo()), scope, never, send))
    assert sent[0]["status"] == 408


def test_more_requests_at_once_are_429_and_a_place_becomes_free_again() -> None:
    nested: list[Message] = []

    async def ask_again() -> None:
        async def receive() -> Message:
            return body(b"1")[0]

        async def send(message: Message) -> None:
            nested.append(message)

        await one_at_once({"type": "http", "method": "POST", "path": "/", "headers": JSON}, receive, send)

    one_at_once = limits(echo(ask_again))
    assert ask(one_at_once, *body(b"0"))[0]["status"] == 200
    assert nested[0]["status"] == 429
    assert (b"retry-after", b"1") in nested[0]["headers"]
    nested.clear()
    assert ask(one_at_once, *body(b"0"))[0]["status"] == 200


LARGE = bytes(FREE_BYTES + 100)


async def ask_while(app: ASGIApp, unfinished: int, *messages: Message, **scope: Any) -> list[Message]:
    """What is answered to the messages of one POST while others have sent a large body in part."""
    sent: list[Message] = []

    async def put(message: Message) -> None:
        sent.append(message)

    def post(*given: Message, send: Send, **more: Any) -> Awaitable[None]:
        left = list(given)

        async def receive() -> Message:
            if not left:
                await asyncio.Event().wait()
            return left.pop(0)

        return app({"type": "http", "method": "POST", "path": "/", "headers": JSON, **more}, receive, send)

    async def drop(message: Message) -> None:
        pass

    begun = body(LARGE, b"more")[:1]
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(run_post(post(*begun, send=drop, **scope))) for _ in range(unfinished)]
        await asyncio.sleep(0)
        await post(*messages, {"type": "http.disconnect"}, send=put, **scope)
        for each in waiting:
            each.cancel()
    return sent


async def run_post(posted: Awaitable[None]) -> None:
    await posted


def test_large_bodies_share_a_budget_and_small_ones_need_none() -> None:
    app = limits(echo(), len(LARGE), 9, Budget(250, 250))
    refused = asyncio.run(ask_while(app, 2, *body(LARGE)))
    assert refused[0]["status"] == 503
    assert {(b"retry-after", b"1"), (b"connection", b"close")} <= set(refused[0]["headers"])
    assert asyncio.run(ask_while(app, 2, *body(LARGE[:FREE_BYTES])))[0]["status"] == 200
    assert asyncio.run(ask_while(app, 1, *body(LARGE)))[0]["status"] == 200, "what the others held was given back"


def test_no_key_may_have_all_of_the_budget() -> None:
    app = limits(echo(), len(LARGE), 9, Budget(1000, 250))
    refused = asyncio.run(ask_while(app, 2, *body(LARGE), **{CLIENT: b"one"}))
    assert refused[0]["status"] == 429
    assert (b"retry-after", b"1") in refused[0]["headers"]
    assert asyncio.run(ask_while(app, 2, *body(LARGE)))[0]["status"] == 200, "without keys there is the whole alone"


def test_a_body_counts_until_its_request_is_answered() -> None:
    budget, nested = Budget(150, 150), []

    async def ask_again() -> None:
        nested.extend(await ask_while(app, 0, *body(LARGE)))

    app = limits(echo(ask_again), len(LARGE), 9, budget)
    assert ask(app, *body(LARGE))[0]["status"] == 200
    assert nested[0]["status"] == 503


def test_a_budget_has_room_for_one_body() -> None:
    settings = HttpSettings(http="127.0.0.1:0", http_max_body_bytes=1000, http_body_budget_bytes=999)
    with pytest.raises(
        InvalidArgumentError, match="http_body_budget_bytes is 999; must be at least http_max_body_bytes"
    ):
        Gateway(settings)


# Keys


def test_keys_come_from_flags_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n a \n\nb\n")
    assert read_keys(["c"], file) == ["c", "a", "b"]
    assert read_keys([], None) == []


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(InvalidArgumentError, match="which has no key"):
        read_keys([], file)


@pytest.mark.parametrize("key", ["", "two words", "with,comma", "schlüssel", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_keys(["fine", key], None)
    assert str(refused.value) == "API key 1 must be ASCII without spaces and commas, and not empty"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (b"Bearer key", 200), (b"bearer  key ", 200), (b"Bearer kex", 401), (b"Bearer ke", 401), (b"Bearer", 401),
        (b"", 401), (b"key", 401), (b"Basic key", 401), (b"Bearer k\xe9y", 401),
    ],
)  # fmt: skip
def test_only_those_with_a_key_pass(header: bytes, status: int) -> None:
    app = Keys(echo(), ["other", "key"])
    headers = [*JSON, (b"authorization", header)]
    assert ask(app, *body(b"x"), headers=headers)[0]["status"] == status
    assert ask(app, *body(b"x"), path="/health")[0]["status"] == 200


# Settings


def test_keys_are_read_from_flags_and_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    argv = ["--model", str(tmp_path)]
    flags = load(OrchestratorSettings, [*argv, "--api-key", "one", "--api-key", "two"], "test")
    assert [key.get_secret_value() for key in flags.api_key] == ["one", "two"]
    monkeypatch.setenv("PILOTFISH_ORCHESTRATOR_API_KEY", "three, four")
    given = load(OrchestratorSettings, argv, "test")
    assert [key.get_secret_value() for key in given.api_key] == ["three", "four"]
    assert "three" not in repr(given)


@pytest.mark.parametrize(
    "given",
    [
        ["--allowed-origins", '["https://a.b", "http://c:1"]'],
        ["--allowed-origins", "https://a.b,http://c:1"],
        ["--allowed-origins", "https://a.b", "--allowed-origins", "http://c:1"],
    ],
)
def test_origins_are_read_as_vllm_takes_them_and_as_all_lists_are(given: list[str], tmp_path: Path) -> None:
    settings = load(OrchestratorSettings, ["--model", str(tmp_path), *given], "test")
    assert settings.allowed_origins == ["https://a.b", "http://c:1"]


@pytest.mark.parametrize("origin", ["a.b", "https://a.b/page", "[1]", "[", "https://a b"])
def test_an_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="allowed_origins"):
        HttpSettings.model_validate({"allowed_origins": origin})


def test_a_port_that_is_taken_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidArgumentError, match=f"http is '{address}', which cannot be bound"):
            Gateway(HttpSettings(http=address))


def test_the_next_free_port_is_taken_if_that_is_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = Gateway(HttpSettings(http=f"127.0.0.1:{port}", http_next_port=True))
        host, _, found = gateway.address.rpartition(":")
        assert host == "127.0.0.1"
        assert port < int(found) < port + 100
        asyncio.run(gateway.stop())
    with pytest.raises(
        InvalidArgumentError, match=r"http is '192\.0\.2\.1:8000', which cannot be bound \(Cannot assign"
    ):
        Gateway(HttpSettings(http="192.0.2.1:8000", http_next_port=True))  # an address of nobody


def test_an_address_that_is_none_is_named_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(OrchestratorSettings, ["--model", str(tmp_path), "--http", "localhost:80a"], "test")
    assert capsys.readouterr().err.startswith("test: --http: it must be HOST:PORT or a port, such as 127.0.0.1:50050")


def test_a_port_alone_is_of_this_machine() -> None:
    assert HttpSettings(http="8000").http == "127.0.0.1:8000"
    assert HttpSettings(http="").http == ""


# Errors


@pytest.mark.parametrize("kind", PilotfishError.__subclasses__())
def test_every_error_has_a_status(kind: type[PilotfishError]) -> None:
    if kind.__module__ != "pilotfish.errors":  # of the command line
        return
    found = api_error(kind("what is wrong", "field[3].part"), {"field": "name"})
    assert 400 <= found.status < 600
    assert found.body["error"]["param"] == "name[3].part"


def test_fields_are_called_as_the_client_calls_them() -> None:
    found = api_error(InvalidArgumentError("timeout_s is 0; must be more", "timeout_s"), {"timeout_s": "timeout"})
    assert found.body["error"]["message"] == "timeout is 0; must be more"
    assert found.body["error"]["param"] == "timeout"


def test_a_bug_is_500_and_says_which(caplog: pytest.LogCaptureFixture) -> None:
    found = api_error(ZeroDivisionError("planted"))
    assert found.status == 500
    assert "ZeroDivisionError: planted" in found.body["error"]["message"]
    assert "planted" in caplog.text
    assert api_error(InternalError("x")).status == 500


def test_overload_says_when_to_come_back() -> None:
    assert api_error(OverloadedError("full")).headers == {"Retry-After": "1"}


def test_an_error_may_quote_what_is_no_text() -> None:
    assert b"\\\\ud800" in bytes(api_error(InvalidArgumentError(f"{chr(0xD800)!r}")).response().body)


# The list of fields in the documentation


def status_of(kind: type[Body], name: str) -> str:
    field = next(field for key, field in kind.model_fields.items() if (field.alias or key) == name)
    if refusal_of(field) is not None:
        return "refused"
    return "ignored" if is_ignored(field) else "honoured"


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody), ("/v1/responses", ResponseBody)],
)
def test_the_documentation_lists_every_field_as_it_is(heading: str, kind: type[Body]) -> None:
    assert issubclass(kind, BaseModel)
    _, _, section = DOCS.read_text(encoding="utf-8").partition(f"### Fields of {heading}\n")
    section = section.partition("\n## ")[0].partition("\n### ")[0]
    rows: list[Any] = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (honoured|ignored|refused)", section, re.MULTILINE)
    found = {name: status for names, status in rows for name in re.findall(r"`(\w+)`", names)}
    expected = {name: status_of(kind, name) for name in (f.alias or n for n, f in kind.model_fields.items())}
    assert found == expected
