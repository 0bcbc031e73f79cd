"""Numbers at and beyond what fields can hold, for tests that put them everywhere."""

from __future__ import annotations

INTEGERS = (0, -1, 2**31 - 1, 2**31, 2**32, 10**12, 2**62, 2**63 - 1, 2**63)
FLOATS = (1e-45, float("nan"), float("inf"), -float("inf"), 3.4e38)
MILLION = 1_000_000
