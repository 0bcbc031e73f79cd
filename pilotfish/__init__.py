"""Pilotfish: speculative decoding as gRPC microservices. This module is the SDK.

    from pilotfish import Client, SamplingParams

    with Client("127.0.0.1:50050") as client:
        completion = client.generate("The capital of France is", SamplingParams(max_tokens=16))
        print(completion.text, completion.usage.rounds)

A server comes from ``pilotfish up``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__: str

if TYPE_CHECKING:
    from pilotfish.client.aio import AsyncClient, AsyncStream
    from pilotfish.client.blocking import Client, Stream
    from pilotfish.client.params import SamplingParams
    from pilotfish.client.results import (
        Capabilities,
        Completion,
        DrafterCapability,
        FieldCapability,
        Piece,
        Prompt,
        Proposal,
        RoundTimes,
        ServerInfo,
        Token,
        TokenLogprobs,
        Usage,
    )
    from pilotfish.errors import (
        AlreadyExistsError,
        DeadlineExceededError,
        FailedPreconditionError,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        OverloadedError,
        PilotfishError,
        UnavailableError,
    )

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "AsyncStream",
    "Capabilities",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "DrafterCapability",
    "FailedPreconditionError",
    "FieldCapability",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OverloadedError",
    "Piece",
    "PilotfishError",
    "Prompt",
    "Proposal",
    "RoundTimes",
    "SamplingParams",
    "ServerInfo",
    "Stream",
    "Token",
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
]

# Looked up when first used: the services and the pure core also import this package, and want none of the client.
_HOMES = {
    "AsyncClient": "client.aio",
    "AsyncStream": "client.aio",
    "Client": "client.blocking",
    "Stream": "client.blocking",
    "SamplingParams": "client.params",
    **dict.fromkeys(
        (
            "Capabilities",
            "Completion",
            "DrafterCapability",
            "FieldCapability",
            "Piece",
            "Prompt",
            "Proposal",
            "RoundTimes",
            "ServerInfo",
            "Token",
            "TokenLogprobs",
            "Usage",
        ),
        "client.results",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("pilotfish")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
