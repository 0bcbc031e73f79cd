"""Turns a failed call into the error that a caller of the SDK sees."""

from __future__ import annotations

import grpc

from pilotfish.errors import DeadlineExceededError, PilotfishError, UnavailableError
from pilotfish.rpc.status import from_grpc

# gRPC gives the same status when nobody listens and when a server says that it shuts down; only the text differs.
_NOBODY = "failed to connect"


def failure(error: grpc.RpcError, address: str, timeout: float | None) -> PilotfishError:
    """The error for a call that failed.

    Args:
        error: raised by grpc or grpc.aio.
        address: called.
        timeout: of the call, in seconds.
    """
    code = error.code()
    if code is grpc.StatusCode.CANCELLED:
        return cancelled(address)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        limit = f"{timeout:g} s" if timeout is not None else "the deadline"
        return DeadlineExceededError(f"{address} did not finish within {limit}; give more time or fewer max_tokens")
    found = from_grpc(error, address)
    if isinstance(found, UnavailableError) and _NOBODY in str(found):
        return UnavailableError(
            f"nobody answers at {address}; start a server with `pilotfish up`, or give the address of a running one"
        )
    return found


def cancelled(address: str) -> UnavailableError:
    """The error for a call that the other side cancelled."""
    return UnavailableError(f"{address}: the server cancelled the call, as when it shuts down; ask again")
