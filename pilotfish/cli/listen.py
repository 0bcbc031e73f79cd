"""Is an address free to listen on? Asked before models are loaded for it."""

from __future__ import annotations

from pilotfish.addresses import bind, read_address


def require_free(listen: str, flag: str = "--listen") -> str:
    """The address that the flag's value names, if it can be listened on now.

    Raises:
        InvalidArgumentError: no such form, not an address of this machine, or taken.
    """
    address = read_address(listen, flag, to_listen=True)
    bind(address, flag).close()
    return address
