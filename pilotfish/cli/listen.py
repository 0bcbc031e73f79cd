"""Is an address free to listen on? Asked before models are loaded for it."""

from __future__ import annotations

import errno
import socket

from pilotfish.errors import InvalidArgumentError


def require_free(listen: str, flag: str = "--listen") -> None:
    """Returns if ``host:port``, the value of the flag, can be listened on now.

    Raises:
        InvalidArgumentError: no such form, not an address of this machine, or taken.
    """
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgumentError(f"{flag} is {listen!r}; it must be HOST:PORT, such as 127.0.0.1:50050")
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server will: connections that linger after an earlier server do not keep the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        taken = "stop what listens there, choose another port, or take port 0 for any free one"
        other = "take an address of this machine, such as 127.0.0.1:50050"
        raise InvalidArgumentError(
            f"{flag} is {listen!r}, which cannot be bound ({error.strerror}); "
            + (taken if error.errno == errno.EADDRINUSE else other)
        ) from error
