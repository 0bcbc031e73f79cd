"""Asks a service whether it serves, over the standard ``grpc.health.v1``."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pilotfish.client.failures import failure
from pilotfish.client.surface import require_address, require_timeout
from pilotfish.errors import UnavailableError
from pilotfish.rpc.channel import connect_blocking


def check(address: str, timeout: float | None = None) -> None:
    """Returns if the service at ``host:port`` serves.

    Raises:
        InvalidArgumentError: ``address`` is not ``host:port``, or ``timeout`` is not above 0.
        UnavailableError: nobody answers, or the service says that it does not serve now.
        DeadlineExceededError: no answer within ``timeout`` seconds.
    """
    require_timeout(timeout)
    with connect_blocking(require_address(address)) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise failure(error, address, timeout) from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise UnavailableError(f"{address} answers, but does not serve now ({state}); wait for it or read its log")
