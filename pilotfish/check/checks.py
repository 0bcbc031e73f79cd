"""The checks by name, in the order in which a run goes through them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from pilotfish.check.acceptance import acceptance
from pilotfish.check.asking import Asker
from pilotfish.check.disconnects import disconnects
from pilotfish.check.ends import ends
from pilotfish.check.fields import fields
from pilotfish.check.grammars import grammars
from pilotfish.check.greedy import greedy
from pilotfish.check.laboratory import laboratory
from pilotfish.check.law import law
from pilotfish.check.logprobs import logprobs
from pilotfish.check.mixed import mixed
from pilotfish.check.results import Result
from pilotfish.check.seeded import seeded
from pilotfish.check.setting import LABORATORY
from pilotfish.check.unseeded import unseeded
from pilotfish.errors import InvalidArgumentError


@dataclass(frozen=True)
class Check:
    """A question about a deployment."""

    name: str
    about: str
    find: Callable[[Asker], AsyncIterator[Result]]


CHECKS = (
    Check("greedy", "greedy text is the same with speculation and without, token for token", greedy),
    Check("seeded", "the text of a seed depends on seed, prompt and model alone", seeded),
    Check("unseeded", "requests without a seed, and samples of one request, have nothing in common", unseeded),
    Check("law", "sampled tokens follow the target's own probabilities, under every acceptance rule", law),
    Check(
        "acceptance", "draft tokens are kept as often as both laws say, and what replaces the others fits", acceptance
    ),
    Check("logprobs", "log probabilities are the target's, with speculation and without", logprobs),
    Check("fields", "every sampling field does the same under every acceptance rule", fields),
    Check("ends", "max_tokens, stop texts, stop tokens and the end of the context cut exactly where they should", ends),
    Check("grammars", "structured output fits its grammar, also when many ask for different ones at once", grammars),
    Check("mixed", "each request in a mixed batch gets what it gets alone", mixed),
    Check("disconnects", "clients that leave free their places, and change nobody's answer", disconnects),
    Check(LABORATORY, "the same code on two tiny models that disagree: many draws, much to judge", laboratory),
)


def chosen(names: Sequence[str]) -> list[Check]:
    """The checks of these names, in our order; all without any.

    Raises:
        InvalidArgumentError: there is no check of a name.
    """
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgumentError(f"there is no check {unknown[0]!r}; it must be one of {', '.join(known)}")
    return [check for check in CHECKS if not names or check.name in names]
