"""What the checks of ``pilotfish check`` find in a deployment of the test process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from deployment import Deployment

from pilotfish import AsyncClient
from pilotfish.check.asking import Asker
from pilotfish.check.checks import chosen
from pilotfish.check.rehearsal import Silent
from pilotfish.check.results import Result
from pilotfish.check.run import Run
from pilotfish.check.setting import Setting
from pilotfish.check.significance import decide


def findings(
    deployment: Deployment, *names: str, scale: float = 0.0, plenty: float = 8.0, false_alarms: float = 0.001
) -> list[Result]:
    """The decided results of these checks; without a laboratory, which would be another deployment.

    Args:
        deployment: to ask.
        names: of the checks; all without any.
        scale, plenty: how much they ask, see ``Asker``: the least, but of draws many.
        false_alarms: as a run's.
    """
    setting = Setting(false_alarms=false_alarms)

    async def ask() -> list[Result]:
        async with AsyncClient(deployment.address) as client:
            asker = Asker(client, await client.server_info(), await client.capabilities(), setting, Silent())
            asker.plenty = plenty
            run = Run(chosen(names))
            for check in run.checks:
                await run.find(check, asker, scale)
            run.judge_every_answer([asker])
            return run.results

    return decide(asyncio.run(ask()), false_alarms)


def failures(results: Sequence[Result]) -> set[str]:
    """Checks that failed."""
    return {result.check for result in results if result.status == "failed"}


def failed_names(results: Sequence[Result]) -> set[str]:
    return {result.name for result in results if result.status == "failed"}
