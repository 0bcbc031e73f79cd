"""Two tiny models that disagree, behind the same code: much is judged, and each token takes next to nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from pilotfish.check.acceptance import acceptance
from pilotfish.check.asking import Asker
from pilotfish.check.fields import fields
from pilotfish.check.grammars import grammars
from pilotfish.check.greedy import greedy
from pilotfish.check.law import law
from pilotfish.check.results import Result, skipped

PLENTY, GROWTH = 12.0, 0.25
"""Of its models 12 times as much is drawn as of a deployment with little time, 3 times with much."""


async def laboratory(asker: Asker) -> AsyncIterator[Result]:
    """The checks that take many draws, and those on which a draft that is often wrong tells more.

    A check of a running server has none: it could but try the code that is installed here.
    """
    if (tiny := asker.laboratory) is None:
        yield skipped("all", "it starts beside a server that the check starts, not beside one that runs (--server)")
        return
    for check in (greedy, acceptance, law, fields, grammars):
        async for result in check(tiny):
            yield replace(result, name=f"{check.__name__}: {result.name}")
