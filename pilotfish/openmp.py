"""How OpenMP's threads wait for work; it reads this once, when torch is loaded."""

from __future__ import annotations

import os

# Threads that wait by spinning take the cores of other processes on the host, and those that sleep at once take long to
# wake: a step has a hundred short loops. So they spin for some 0.2 ms, longer than a step pauses, and then sleep.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def configure() -> None:
    """Sets what the user has not set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
