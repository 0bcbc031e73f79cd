"""Both clients against a scripted service: they must behave alike."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from fake_generation import (
    FakeGeneration,
    Script,
    Status,
    Wait,
    answer,
    finished,
    piece,
    serving,
    started,
    unused_address,
)

from pilotfish import (
    AsyncClient,
    Client,
    Completion,
    DrafterCapability,
    FieldCapability,
    Piece,
    RoundTimes,
    SamplingParams,
    ServerInfo,
    Token,
    Usage,
    errors,
)
from pilotfish.client.health import check
from pilotfish.v1 import generation_pb2 as pb


class Blocking:
    """One call of the blocking client."""

    @staticmethod
    def call(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
        with Client(address) as client:
            return getattr(client, method)(*args, **kwargs)

    @staticmethod
    def stream(address: str, method: str, *args: Any, **kwargs: Any) -> tuple[list[Piece], Completion]:
        with Client(address) as client, getattr(client, method)(*args, **kwargs) as stream:
            return list(stream), stream.result

    @staticmethod
    def read_one_and_close(address: str) -> tuple[Piece, Any]:
        with Client(address) as client:
            stream = client.stream("x")
            first = next(stream)
            stream.close()
            assert list(stream) == []
            return first, stream


class Asyncio:
    """The same through the asyncio client."""

    @staticmethod
    def call(address: str, method: str, *args: Any, **kwargs: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient(address) as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(main())

    @staticmethod
    def stream(address: str, method: str, *args: Any, **kwargs: Any) -> tuple[list[Piece], Completion]:
        async def main() -> tuple[list[Piece], Completion]:
            async with AsyncClient(address) as client, getattr(client, method)(*args, **kwargs) as stream:
                return [piece async for piece in stream], stream.result

        return asyncio.run(main())

    @staticmethod
    def read_one_and_close(address: str) -> tuple[Piece, Any]:
        async def main() -> tuple[Piece, Any]:
            async with AsyncClient(address) as client:
                stream = client.stream("x")
                first = await anext(stream)
                await stream.close()
                assert [piece async for piece in stream] == []
                return first, stream

        return asyncio.run(main())


Kind = type[Blocking] | type[Asyncio]
both = pytest.mark.parametrize("kind", [Blocking, Asyncio])


def play(kind: Kind, script: Script, method: str = "generate", *args: Any, **kwargs: Any) -> Any:
    with serving(FakeGeneration(script)) as address:
        return kind.call(address, method, *(args or ("x",)), **kwargs)


@both
def test_generate_returns_the_whole_completion(kind: Kind) -> None:
    completion = play(kind, answer())
    assert completion.text == "Hé\tyo!"
    assert completion.token_ids == (1, 2, 3, 4)
    assert completion.finish_reason == "length"
    assert (completion.request_id, completion.model) == ("r1", "tiny")
    assert completion.usage == Usage(
        prompt_tokens=3,
        completion_tokens=4,
        cached_tokens=1,
        rounds=2,
        drafted=4,
        accepted=2,
        accepted_per_position=(2, 0),
        drafted_per_position=(2, 2),
        queue_us=5,
        first_token_us=6,
        total_us=2_000_000,
        round_total=RoundTimes(8, 6, 4, 2),
        round_median=RoundTimes(4000, 3000, 2000, 1000, 500, 9000),
        preemptions=1,
    )
    assert completion.usage.acceptance == 0.5
    assert completion.usage.tokens_per_round == 2.0


@both
def test_stop_is_the_other_finish_reason(kind: Kind) -> None:
    assert play(kind, [started(), finished(pb.FINISH_REASON_STOP)]).finish_reason == "stop"


@both
def test_pieces_say_how_each_token_came_about(kind: Kind) -> None:
    with serving(FakeGeneration()) as address:
        pieces, completion = kind.stream(address, "stream", "x")
    assert pieces[1] == Piece((Token(2, "", "accepted"), Token(3, "é\t", "recovered")), 2, RoundTimes(4, 3, 2, 1))
    assert [(piece.text, piece.token_ids, piece.kinds) for piece in pieces] == [
        ("H", (1,), ("bonus",)),
        ("é\t", (2, 3), ("accepted", "recovered")),
        ("yo!", (4,), ("bonus",)),
    ]
    assert completion.pieces == tuple(pieces)


@both
def test_a_prompt_is_text_or_token_ids_or_messages(kind: Kind) -> None:
    fake = FakeGeneration()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with serving(fake) as address:
        kind.call(address, "generate", "text")
        kind.call(address, "generate", [5, 6])
        kind.call(address, "chat", messages)
        kind.stream(address, "stream", (7,))
        kind.stream(address, "chat_stream", messages)
    text, ids, chat, ids_stream, chat_stream = fake.requests
    assert text.text == "text"
    assert list(ids.token_ids.ids) == [5, 6]
    assert [(message.role, message.content) for message in chat.messages.messages] == [("system", "s"), ("user", "u")]
    assert list(ids_stream.token_ids.ids) == [7]
    assert chat_stream.messages == chat.messages


@both
def test_what_the_server_judges_is_sent_as_it_is(kind: Kind) -> None:
    fake = FakeGeneration()
    with serving(fake) as address:
        kind.call(address, "generate", "", SamplingParams(temperature=-1, top_p=2), model="m", request_id="id")
        kind.call(address, "generate", [])
        kind.call(address, "chat", [])
    empty_text, no_ids, no_messages = fake.requests
    assert (empty_text.WhichOneof("prompt"), empty_text.model, empty_text.request_id) == ("text", "m", "id")
    assert (empty_text.sampling.temperature, empty_text.sampling.top_p) == (-1, 2)
    assert no_ids.WhichOneof("prompt") == "token_ids"
    assert no_messages.WhichOneof("prompt") == "messages"


@both
@pytest.mark.parametrize("prompt", [b"bytes", [1.5], ["a"], [2**31], 7, None])
def test_a_prompt_that_cannot_be_sent_is_refused(kind: Kind, prompt: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"prompt is .* must be a text or a sequence of token ids"):
        kind.call("127.0.0.1:1", "generate", prompt)


@both
@pytest.mark.parametrize("message", [{"role": "user", "content": 1}, {"role": "user", "tool": "x"}, "hello"])
def test_a_message_that_cannot_be_sent_is_refused_by_its_place(kind: Kind, message: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"messages\[1\] is"):
        kind.call("127.0.0.1:1", "chat", [{"role": "user", "content": "hello"}, message])


@both
def test_server_info(kind: Kind) -> None:
    with serving(FakeGeneration()) as address:
        assert kind.call(address, "server_info") == ServerInfo("tiny", "1", 64, 9, 4, True, 1, "d", True)


@both
def test_capabilities(kind: Kind) -> None:
    with serving(FakeGeneration()) as address:
        found = kind.call(address, "capabilities")
    assert found.fields == (
        FieldCapability("n", "[1, 128]", "1", honoured=True, reason=""),
        FieldCapability("logprobs", "[0, 20]", "none", honoured=False, reason="none here"),
    )
    assert found.drafters == (DrafterCapability("d", "mtp", ("match", "ratio"), grows_trees=True, replica_count=2),)


def test_pieces_arrive_while_the_server_still_works() -> None:
    wait = Wait()
    with (
        serving(FakeGeneration([started(), piece((1, "H", "b")), wait, finished()])) as address,
        Client(address) as client,
    ):
        stream = client.stream("x")
        assert next(stream).text == "H"
        with pytest.raises(errors.FailedPreconditionError, match="before its end"):
            _ = stream.result
        wait.go.set()
        assert list(stream) == []
        assert stream.result.text == "H"


@both
def test_closing_a_stream_cancels_the_request(kind: Kind) -> None:
    fake = FakeGeneration([started(), piece((1, "H", "b")), Wait()])
    with serving(fake) as address:
        first, stream = kind.read_one_and_close(address)
        assert first.text == "H"
        assert fake.left.wait(10)
        with pytest.raises(errors.FailedPreconditionError):
            _ = stream.result


def test_cancelling_the_task_cancels_the_request() -> None:
    fake = FakeGeneration([started(), piece((1, "H", "b")), Wait()])

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.generate("x")
            assert await asyncio.to_thread(fake.left.wait, 10)

    with serving(fake) as address:
        asyncio.run(main(address))


def test_one_asyncio_client_asks_many_at_once() -> None:
    async def main(address: str) -> list[Completion]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(client.generate(f"prompt {i}") for i in range(5)))

    fake = FakeGeneration()
    with serving(fake) as address:
        assert [completion.text for completion in asyncio.run(main(address))] == ["Hé\tyo!"] * 5
    assert sorted(request.text for request in fake.requests) == [f"prompt {i}" for i in range(5)]


STATUSES = [
    (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgumentError),
    (grpc.StatusCode.NOT_FOUND, errors.NotFoundError),
    (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExistsError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
    (grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPreconditionError),
    (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
    (grpc.StatusCode.INTERNAL, errors.InternalError),
    (grpc.StatusCode.DATA_LOSS, errors.InternalError),
]


@both
@pytest.mark.parametrize(("code", "error"), STATUSES)
def test_what_the_server_refuses_arrives_as_the_same_error(
    kind: Kind, code: grpc.StatusCode, error: type[errors.PilotfishError]
) -> None:
    with pytest.raises(error, match="top_p is 2") as caught:
        play(kind, [started(), Status(code, "top_p is 2")])
    assert type(caught.value) is error


@both
@pytest.mark.parametrize(("method", "args"), [("generate", ("x",)), ("server_info", ())])
def test_nobody_listening_says_who_was_called_and_what_to_do(kind: Kind, method: str, args: tuple[str, ...]) -> None:
    address = unused_address()
    with pytest.raises(
        errors.UnavailableError, match=f"nobody answers at {address}; start a server with `pilotfish up`"
    ):
        kind.call(address, method, *args)


@both
def test_a_timeout_names_its_seconds(kind: Kind) -> None:
    with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.2 s"):
        play(kind, [started(), Wait()], timeout=0.2)


@both
def test_a_call_that_the_server_cancels_is_unavailable(kind: Kind) -> None:
    with pytest.raises(errors.UnavailableError, match="the server cancelled the call"):
        play(kind, [started(), Status(grpc.StatusCode.CANCELLED, "going")])


BROKEN: dict[str, Script] = {
    "ended the stream without": [started(), piece((1, "H", "b"))],
    "event 'piece' out of order": [piece((1, "H", "b"))],
    "event 'started' out of order": [started(), started()],
    "event 'finished' out of order": [started(), finished(), finished()],
    "event None out of order": [pb.GenerateResponse()],
    "finish reason 0": [started(), finished(pb.FINISH_REASON_UNSPECIFIED)],
    "token kind 0": [started(), pb.GenerateResponse(piece=pb.Piece(token_ids=[1], token_texts=["a"], kinds=[0]))],
    "1 token_ids with 0 token_texts": [started(), pb.GenerateResponse(piece=pb.Piece(token_ids=[1], kinds=[1]))],
}


@both
@pytest.mark.parametrize("message", BROKEN)
def test_a_server_that_breaks_the_contract_is_an_internal_error(kind: Kind, message: str) -> None:
    with pytest.raises(errors.InternalError, match=message):
        play(kind, BROKEN[message])


def test_health_check() -> None:
    with serving(FakeGeneration()) as address:
        check(address)
    with (
        serving(FakeGeneration(), healthy=False) as address,
        pytest.raises(errors.UnavailableError, match="NOT_SERVING"),
    ):
        check(address)
    with pytest.raises(errors.UnavailableError, match="nobody answers"):
        check(unused_address())
