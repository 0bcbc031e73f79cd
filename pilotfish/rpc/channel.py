"""Options of every channel and server, in one place so that both ends agree."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20  # bulk is cut to this, so that it never holds up a step for long

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that hangs is found out within ten seconds. A ping is answered by grpc's own threads, however busy the
    # peer's Python is, so that only a process that is stopped, swapped out or unreachable does not answer.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute by default, whatever the time-out of keepalive
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),  # that a server allows
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),  # workers are named by address; a proxy variable must not redirect them
]


def connect(address: str, *, shared: bool = True) -> grpc.aio.Channel:
    """An asyncio channel to ``host:port``; connects when first used.

    Args:
        address: of a server.
        shared: whether all such channels of the process to one address may use the same connection.
    """
    options = OPTIONS if shared else [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(address, options=options)


def connect_blocking(address: str) -> grpc.Channel:
    """A blocking channel to ``host:port``; connects when first used."""
    return grpc.insecure_channel(address, options=OPTIONS)
