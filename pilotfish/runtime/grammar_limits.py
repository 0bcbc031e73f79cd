"""What grammars may take of a worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarLimits:
    """Limits; the first four are of each grammar.

    Attributes:
        timeout_s: processor seconds to compile it.
        memory_mib: memory to compile it, beyond what a process begins with.
        size_mib: memory of it once compiled.
        token_ms: processor time to say which tokens may follow one.
        at_once: grammars that are compiled side by side.
        cache_mib: memory of those that stay compiled.
    """

    timeout_s: float = 10
    memory_mib: int = 1024
    size_mib: int = 64
    token_ms: float = 50
    at_once: int = 4
    cache_mib: int = 1024
