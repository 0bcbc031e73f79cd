"""What names an address, and what is said of what names none."""

from __future__ import annotations

import pytest

from pilotfish.addresses import read_address
from pilotfish.errors import InvalidArgumentError

WANTED = "it must be HOST:PORT or a port, such as 127.0.0.1:50050"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50050", "127.0.0.1:50050"),
        ("8000", "127.0.0.1:8000"),
        ("host_1.example-2:080", "host_1.example-2:80"),
        ("[::1]:50050", "[::1]:50050"),
        ("[fe80::1%eth0]:1", "[fe80::1%eth0]:1"),
        ("dns:///host:1", "dns:///host:1"),
    ],
)
def test_addresses_are_hosts_with_ports_or_ports(text: str, address: str) -> None:
    assert read_address(text, "--server") == address


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("127.0.0.1:80a", WANTED),
        ("127.0.0.1", WANTED),
        ("", WANTED),
        (" 127.0.0.1:1", WANTED),
        ("a/b:1", WANTED),
        (":50050", WANTED),
        ("١٢٣", WANTED),
        ("http://127.0.0.1:8000/v1", f"{WANTED}, and no URL: try 127.0.0.1:8000"),
        ("::1:50050", f"{WANTED}; an IPv6 host stands in brackets, as in [::1]:50050"),
        ("host:0", "it must be HOST:PORT or a port, and ports are in [1, 65535]"),
        ("65536", "it must be HOST:PORT or a port, and ports are in [1, 65535]"),
        ("1" * 5000, "it must be HOST:PORT or a port, and ports are in [1, 65535]"),
    ],
)
def test_what_names_no_address_is_refused_with_what_may_be_meant(text: str, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_address(text, "--server")
    assert (refused.value.field, refused.value.limit) == ("--server", limit)
    assert str(refused.value).startswith(f"--server is {text[:50]!r}"[:40])
    assert str(refused.value).endswith(f"; {limit}")


def test_only_who_listens_may_take_any_port_or_every_network() -> None:
    assert read_address("0", "--listen", to_listen=True) == "127.0.0.1:0"
    assert read_address(":80", "--listen", to_listen=True) == "0.0.0.0:80"
