"""What is asked for is judged before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from orchestrator.admission import Asked, Defaults, admit
from orchestrator.core.acceptance import Rule
from orchestrator.core.requests import Params, Request
from pilotfish.errors import InvalidArgumentError

DEFAULTS = Defaults(draft_length=4, acceptance=Rule.RATIO, end_token_ids=frozenset({2}))
LARGEST = 2**31 - 1


def judge(
    request_id: str = "r", prompt: Sequence[int] = (5, 6), priority: int = 0, **asked: Any
) -> tuple[Request, ...]:
    return admit(request_id, prompt, Asked(**asked), DEFAULTS, vocab_size=50, priority=priority)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"max_tokens": 10**12}, "max_tokens", "max_tokens is 1000000000000; must be at most 2147483647"),
        ({"max_tokens": 2**200}, "max_tokens", "must be at most 2147483647"),
        ({"top_k": 2**31}, "top_k", "top_k is 2147483648; must be at most 2147483647"),
        ({"n": 2**40}, "n", "n is 1099511627776; must be at most 128"),
        ({"seed": 2**64}, "seed", "must be in [-2**63, 2**64)"),
        ({"seed": -(2**63) - 1}, "seed", "must be in [-2**63, 2**64)"),
        ({"priority": 2**31}, "priority", "must be at most 2147483647"),
        ({"priority": -(2**31) - 1}, "priority", "must be at least -2147483648"),
        ({"request_id": "x" * 257}, "request_id", "request_id is 257 characters; at most 256"),
        ({"prompt": [5, 2**200]}, "prompt token_ids[1]", "must be in [0, 50)"),
        ({"stop": ["x"] * 17}, "stop", "stop is 17 texts; at most 16 are allowed"),
        ({"stop": ["x", "y" * 4097]}, "stop[1]", "stop[1] is 4097 characters; at most 4096 are allowed"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "stop_token_ids is 1025 ids; at most 1024 may be"),
        ({"stop_token_ids": [5, 50]}, "stop_token_ids[1]", "must be in [0, 50)"),
        ({"banned_token_ids": [2**63]}, "banned_token_ids[0]", "must be in [0, 50)"),
        ({"banned_token_ids": [5] * 1025}, "banned_token_ids", "at most 1024 may be"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "must be in [0, 50)"),
        ({"logit_bias": {50: 1.0}}, "logit_bias", "logit_bias is of token 50; ids must be in [0, 50)"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", "logit_bias is 1025 ids; at most 1024 may be"),
    ],
)
def test_what_is_out_of_range_is_refused_by_its_own_name(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        judge(**given)
    assert refused.value.field == field
    assert message in str(refused.value)


def test_a_seed_below_0_is_its_twos_complement() -> None:
    for seed, taken in ((-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (0, 0)):
        assert judge(seed=seed)[0].params.seed == taken


def test_samples_share_their_prompt_and_take_no_room_until_they_have_tokens() -> None:
    samples = judge(prompt=range(50), n=128, max_tokens=LARGEST)
    assert len(samples) == 128
    assert all(np.shares_memory(sample.tokens, samples[0].prompt) for sample in samples)


def test_the_room_of_a_request_grows_with_its_tokens() -> None:
    request = Request("r", np.array([5, 6], np.int32), Params(max_tokens=2000))
    before, added = request.tokens, []
    for count in (1, 3, 700, 1296):
        new = [(len(added) + i) % 40 for i in range(count)]
        request.append(new)
        added += new
        assert request.tokens.tolist() == [5, 6, *added]
    assert request.generated == 2000
    assert before.tolist() == [5, 6], "what somebody looks at stays"
    assert request.prompt.tolist() == [5, 6]
