"""Whether an address is free to listen on."""

from __future__ import annotations

import socket

import pytest

from pilotfish.cli.listen import require_free
from pilotfish.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:0", "127.0.0.1:0"), ("0.0.0.0:0", "0.0.0.0:0"), ("localhost:0", "localhost:0"),
        ("0", "127.0.0.1:0"), (":0", "0.0.0.0:0"),
    ],
)  # fmt: skip
def test_a_free_address_passes(listen: str, address: str) -> None:
    assert require_free(listen) == address


def test_a_port_is_free_again_after_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = server.accept()
            accepted.close()  # first, so that this side is left lingering in TIME_WAIT
            client.recv(1)
    require_free(f"127.0.0.1:{address[1]}")


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listen = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InvalidArgumentError, match=rf"--listen is '{listen}', .*; stop what listens there"):
            require_free(listen)


@pytest.mark.parametrize(
    "listen", ["", "127.0.0.1", "127.0.0.1:80a", "127.0.0.1:", "127.0.0.1:port", "127.0.0.1:65536"]
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--listen is '{listen}'; it must be HOST:PORT"):
        require_free(listen)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot be bound .*; take an address of this machine"):
        require_free(f"{host}:0")
