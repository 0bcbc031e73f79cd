"""Addresses, ``HOST:PORT``: the one parser of all flags, settings and arguments, and how to take one."""

from __future__ import annotations

import errno
import re
import socket

from pilotfish.errors import InvalidArgumentError, refusal

LOOPBACK, ANYWHERE = "127.0.0.1", "0.0.0.0"
EXAMPLE = f"{LOOPBACK}:50050"
BACKLOG = 2048

_PORTS = 65535
_ADDRESS = re.compile(r"((?:dns:///)?(?:\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.-]+)):([0-9]+)", re.ASCII)
_SCHEME = re.compile(r"\w+://(?:[^/@]*@)?([^/]*)")


def read_address(text: str, name: str, *, to_listen: bool = False) -> str:
    """The address that a text names, as ``HOST:PORT``.

    A port alone is one of this machine's loopback; ``:PORT`` listens on every network. ``dns:///HOST:PORT`` is passed
    through to gRPC, which knows what it means.

    Args:
        text: as a person wrote it.
        name: of the flag, setting or argument, for the error.
        to_listen: it is to be listened on, where port 0 stands for any free one.

    Raises:
        InvalidArgumentError: it names none.
    """
    whole = (
        f"{LOOPBACK}:{text}"
        if text.isascii() and text.isdecimal()
        else f"{ANYWHERE}{text}"
        if to_listen and text[:1] == ":"
        else text
    )
    if (match := _ADDRESS.fullmatch(whole)) is None:
        raise refusal(name, repr(text), f"it must be HOST:PORT or a port, such as {EXAMPLE}{_hint(text)}")
    host, port = match[1], match[2]
    least = 0 if to_listen else 1
    if len(port) > 5 or not least <= int(port) <= _PORTS:
        raise refusal(name, repr(text), f"it must be HOST:PORT or a port, and ports are in [{least}, {_PORTS}]")
    return f"{host}:{int(port)}"


def _hint(text: str) -> str:
    """What may have been meant."""
    if (url := _SCHEME.match(text)) is not None:
        return f", and no URL: try {url[1]}"
    if text.count(":") > 1 and not text.startswith("["):
        return "; an IPv6 host stands in brackets, as in [::1]:50050"
    return ""


def bind(address: str, name: str, *, ports: int = 1) -> socket.socket:
    """A socket that listens on an address. It does not block.

    Args:
        address: as ``read_address`` gives it.
        name: of the flag or setting, for the error.
        ports: how many are tried, from that of the address on, while one after the other is taken.

    Raises:
        InvalidArgumentError: it is taken, or no address of this machine.
    """
    host, _, port = address.rpartition(":")
    first = int(port)
    last = min(first + ports - 1, _PORTS) if first else first
    for tried in range(first, last + 1):
        try:
            return _listen(host, tried)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or tried == last:
                raise _not_bound(address, name, error) from error
    raise AssertionError("the last port was tried")


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, place = found[0]
    taken = socket.socket(family, kind, protocol)
    try:
        # Connections that linger after an earlier server do not keep the port.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(place)
        taken.listen(BACKLOG)
        taken.setblocking(False)
    except BaseException:
        taken.close()
        raise
    return taken


def _not_bound(address: str, name: str, error: OSError) -> InvalidArgumentError:
    advice = f"take an address of this machine, such as {EXAMPLE}"
    if error.errno == errno.EADDRINUSE:
        advice = "stop what listens there, choose another port, or take port 0 for any free one"
    message = f"{name} is {address!r}, which cannot be bound ({error.strerror}); {advice}"
    return InvalidArgumentError(message, name, repr(address), advice)
