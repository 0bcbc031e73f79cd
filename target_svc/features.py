"""Which tokens of a step want their features, by the rule of each row (``FeatureRule`` in target.proto)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pilotfish.runtime.slots import Longs
from pilotfish.steps import FeatureRule, Ints, TargetStep


def wanted_tokens(step: TargetStep, draws: Ints) -> Longs:
    """Ascending by row, along each row's rule.

    Args:
        step: validated.
        draws: the token drawn at each output, i32[outputs].

    Returns:
        Indices into ``rows.token_ids``, i64[features].
    """
    offsets = step.rows.row_offsets.tolist()
    wanted: list[int] = []
    outputs = np.searchsorted(step.output_nodes, offsets).tolist()  # first output of each row
    for row, rule in enumerate(step.feature_rules.tolist()):
        begin, end = offsets[row], offsets[row + 1]
        if rule == FeatureRule.ALL:
            wanted += range(begin, end)
        elif rule == FeatureRule.MATCHED:
            parents = step.rows.parents[begin:end].tolist() if len(step.rows.parents) else range(-1, end - begin - 1)
            drawn = draws[outputs[row] : outputs[row + 1]].tolist()
            wanted += [begin + node for node in _followed(step.rows.token_ids[begin:end].tolist(), parents, drawn)]
    return np.array(wanted, np.int64)


def _followed(token_ids: list[int], parents: Sequence[int], draws: list[int]) -> list[int]:
    """The path that the draws of a row follow from its first token: one pass, as parents come before children."""
    path = [0]
    for node in range(1, len(token_ids)):
        if parents[node] == path[-1] and token_ids[node] == draws[path[-1]]:
            path.append(node)
    return path
