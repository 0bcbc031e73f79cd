"""What the clients refuse before anything is sent: no address, no time, no text, no conversation."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from fake_generation import FakeGeneration, Status, serving

from pilotfish import AsyncClient, Client, FailedPreconditionError, InvalidArgumentError, SamplingParams
from pilotfish.client import health

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:65536", "a b:1", None])
def test_what_is_no_address_is_refused(kind: Any, address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"the server's address is .*; it must be HOST:PORT"):
        kind(address)


@pytest.mark.parametrize("address", ["127.0.0.1:50050", "[::1]:50050", "dns:///host:1"])
def test_addresses(address: str) -> None:
    with Client(address) as client:
        assert client.address == address


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e12, "5"])
def test_what_is_no_timeout_is_refused(timeout: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with Client(NOBODY) as client:
        for call in (
            lambda: client.generate("x", timeout=timeout),
            lambda: client.stream("x", timeout=timeout),
            lambda: client.chat(messages, timeout=timeout),
            lambda: client.chat_stream(messages, timeout=timeout),
            lambda: client.server_info(timeout=timeout),
            lambda: health.check(NOBODY, timeout),
        ):
            with pytest.raises(InvalidArgumentError, match=r"timeout is .*; it must be None or a number of seconds"):
                call()


def test_health_of_what_is_no_address_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"it must be HOST:PORT"):
        health.check("nonsense")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "messages is None"),
        ("hi", r"messages\[0\] is 'h'"),
        ([("user", "hi")], r"messages\[0\] is \('user', 'hi'\)"),
        ([{"role": "user", "content": "x"}, {"content": "hi"}], r"messages\[1\] is {'content': 'hi'}"),
        ([{"role": "user"}], r"messages\[0\] is {'role': 'user'}"),
        ([{"role": "user", "content": None}], r"messages\[0\] is .*None"),
        ([{"role": "user", "content": "x", "name": "y"}], r"messages\[0\] is .*'name'"),
        ([{"role": "user", "content": "\udcff"}], r"messages\[0\] is .*no text in UTF-8"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, words: str) -> None:
    with Client(NOBODY) as client, pytest.raises(InvalidArgumentError, match=words):
        client.chat_stream(messages)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": "\udcff"}, r"prompt is '\\udcff'; it has bytes that are no text in UTF-8"),
        ({"prompt": "x", "params": {"max_tokens": 4}}, "params is .*; it must be None or SamplingParams"),
        ({"prompt": "x", "model": 5}, "model is 5; it must be a text"),
        ({"prompt": "x", "request_id": b"a"}, "request_id is b'a'; it must be a text"),
    ],
)
def test_what_is_no_request_is_refused(arguments: Any, words: str) -> None:
    with Client(NOBODY) as client, pytest.raises(InvalidArgumentError, match=words):
        client.stream(**arguments)


def test_a_server_that_is_no_orchestrator_is_told_apart() -> None:
    fake = FakeGeneration()
    fake.script = [Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")]
    words = "answers, but not this call; is it the address of another service"
    with (
        serving(fake) as address,
        Client(address) as client,
        pytest.raises(FailedPreconditionError, match=f"{address} {words}"),
    ):
        client.generate("x")


def test_a_closed_client_says_so() -> None:
    client = Client(NOBODY)
    client.close()
    for call in (lambda: client.generate("x", SamplingParams()), client.server_info):
        with pytest.raises(FailedPreconditionError, match=r"this client of 127\.0\.0\.1:1 is closed"):
            call()
    client.close()
