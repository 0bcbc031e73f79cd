"""Features on their way from the target to draft replicas: which a step answers, which are kept, what is cut out.

The features of a request are those of its newest slots in the target's cache, as they came with the
target's answers. They are kept until newer ones follow without a gap to what the draft replica has;
all older ones can be read from the target at any time (``ReadFeatures``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pilotfish.errors import FailedPreconditionError, UnavailableError
from pilotfish.steps import FeatureRule, Grant, require

Array = npt.NDArray[Any]


class Features(NamedTuple):
    """Features of consecutive slots of a row.

    Attributes:
        first: the first slot.
        values: ``[slots, feature_width]`` of the target.
    """

    first: int
    values: Array

    @property
    def end(self) -> int:
        """The slot after the last."""
        return self.first + len(self.values)

    def between(self, start: int, end: int) -> Array:
        """Those of the slots in ``[start, end)`` that are here."""
        return self.values[max(start - self.first, 0) : max(end - self.first, 0)]


def joined(kept: Features | None, new: Features, needed: int, most: int) -> Features:
    """The new features, and before them those kept that are still needed: at most so many in all.

    Args:
        kept: of earlier slots.
        new: at least one.
        needed: first slot that is still needed.
        most: slots to keep.
    """
    if kept is None or kept.end != new.first or needed >= new.first:
        return new
    first = max(needed, kept.first, new.end - most)
    if first >= new.first:
        return new
    return Features(first, np.concatenate((kept.between(first, kept.end), new.values)))


def split(answer: Array | None, counts: Sequence[int], width: int) -> list[Array | None]:
    """The features of a target's answer by row; None for a row that asked for none.

    Args:
        answer: features of all rows, or None; not trusted.
        counts: how many each row asked for.
        width: of the target.

    Raises:
        InvalidArgumentError: if they are not as many, or of another width.
    """
    total = sum(counts)
    found = None if answer is None else answer.shape
    require(found == ((total, width) if total else None), "features", found, f"shape must be {(total, width)}")
    ends = np.cumsum(counts).tolist()
    return [
        None if answer is None or not count else answer[end - count : end]
        for count, end in zip(counts, ends, strict=True)
    ]


def count_of(rule: int, tokens: int, accepted: int) -> int:
    """Features that a row gets by its rule.

    Args:
        rule: a ``FeatureRule``.
        tokens: of the row in the step.
        accepted: nodes that the draws of the row followed.
    """
    if rule == FeatureRule.MATCHED:
        return 1 + accepted
    return tokens if rule == FeatureRule.ALL else 0


def columns(target: Grant | None, draft: Grant) -> npt.NDArray[np.int64] | None:
    """Where a drafter's features stand among those of the target, i64[feature_width]; None: they are the same.

    Args:
        target: that was opened last.
        draft: a drafter that wants features.

    Raises:
        UnavailableError: no target has told yet what it stores.
        FailedPreconditionError: it does not store what the drafter wants.
    """
    wanted, name = ",".join(draft.features), draft.model_id
    if target is None:
        raise UnavailableError(f"drafter {name} wants features {wanted}; no target has told yet what it stores")
    if not set(draft.features) <= set(target.features):
        stored = ",".join(target.features) or "none"
        raise FailedPreconditionError(
            f"drafter {name} wants features {wanted}, the target stores {stored}; start the target with "
            f"--features {_union(target.features, draft.features)}"
        )
    width, own = target.feature_width // len(target.features), draft.feature_width // len(draft.features)
    if width != own:
        raise FailedPreconditionError(
            f"drafter {name} wants hidden states of {own} values, those of the target have {width}; it was made for "
            "another model"
        )
    if draft.features == target.features:
        return None
    firsts = [width * target.features.index(feature) for feature in draft.features]
    return np.concatenate([np.arange(first, first + width) for first in firsts])


def _union(stored: Iterable[str], wanted: Iterable[str]) -> str:
    return ",".join(dict.fromkeys((*stored, *wanted)))
