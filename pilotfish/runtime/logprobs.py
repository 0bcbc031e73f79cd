"""Log probabilities of the model's own law: those of single tokens, and the likeliest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pilotfish.runtime.sampling import Longs, to_floats, to_ints
from pilotfish.steps import Floats, Ints


class Laws:
    """The laws of some places, before anything is done to their logits.

    Args:
        logits: f32[places, vocab], finite; theirs from now on.
        token_limit: ids from here on only pad the output layer: they count in the law, and are never listed.
    """

    def __init__(self, logits: Tensor, token_limit: int) -> None:
        self._logits, self._norms = logits, logits.logsumexp(-1)
        logits[:, token_limit:] = -torch.inf

    def of(self, places: Longs, token_ids: Ints) -> Floats:
        """Of single tokens, f32[n]; -infinity of the id -1.

        Args:
            places: whose law, i64[n].
            token_ids: i32[n].
        """
        at, ids = self._index(places), self._index(np.maximum(token_ids, 0))
        found = to_floats(self._logits[at, ids] - self._norms[at])
        return np.where(token_ids < 0, np.float32(-np.inf), found)

    def likeliest(self, counts: Ints) -> tuple[Ints, Floats]:
        """The likeliest tokens of each place, likeliest first, and theirs; places concatenated.

        Args:
            counts: i32[places], >= 0.
        """
        most = int(counts.max(initial=0))
        top = self._logits.topk(most, dim=-1)
        wanted = np.arange(most) < counts[:, None]
        return to_ints(top.indices)[wanted], to_floats(top.values - self._norms.unsqueeze(-1))[wanted]

    def _index(self, values: Longs | Ints) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._logits.device)
