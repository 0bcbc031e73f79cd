"""Goes through the checks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from pilotfish.check.asking import Asker
from pilotfish.check.checks import Check
from pilotfish.check.results import Result, failed, from_faults

EVERY_ANSWER = "every answer"
"""Name of what is judged beside the checks: all answers, by themselves."""


async def run(asker: Asker, checks: Sequence[Check], on_check: Callable[[Check], None]) -> AsyncIterator[Result]:
    """The results of all checks as they come, and at the end what was wrong with any answer by itself.

    A check that cannot go on fails, be it that answers lack what it reads; the others still run. Statistical results
    are not decided yet.
    """
    for check in checks:
        on_check(check)
        try:
            async for result in check.find(asker):
                yield replace(result, check=check.name)
        except Exception as error:
            why = f"the check could not go on: {type(error).__name__}: {error}"
            yield replace(failed("answers", why), check=check.name)
    faults = [f"{fault}, in {count} answers" for fault, count in asker.faults.most_common()]
    result = from_faults("is sound by itself", faults, answers=asker.requests, tokens=asker.tokens)
    yield replace(result, check=EVERY_ANSWER)
