"""Steps survive the wire unchanged, and bytes that cannot be read are named."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from pilotfish.errors import InvalidArgumentError
from pilotfish.rpc import codec
from pilotfish.steps import (
    Capabilities,
    DraftResult,
    DraftStep,
    Grammar,
    GrammarKind,
    Grant,
    Logprobs,
    ProposalKind,
    SamplingRows,
    ShapingRows,
    Supports,
    TargetResult,
    TargetStep,
    TokenRows,
    WantedLogprobs,
)
from pilotfish.v1 import draft_pb2, target_pb2, types_pb2

RANDOM = np.random.default_rng(0)


def ints(count: int) -> np.ndarray:
    return RANDOM.integers(-5, 2**31 - 1, count).astype(np.int32)


def floats(count: int) -> np.ndarray:
    return RANDOM.random(count).astype(np.float32)


ROWS = TokenRows(ints(7), ints(2), ints(2), ints(2), ints(5), ints(7), ints(6).reshape(3, 2))
SAMPLING = SamplingRows(
    floats(2), ints(2), floats(2), floats(2), np.array([0, 2**64 - 1], np.uint64), np.array([0, 2**62], np.int64)
)
SHAPING = ShapingRows(
    ints(2), ints(2), floats(2), floats(2), floats(2), ints(2), ints(3), np.array([-np.inf, 1, 2], np.float32),
    ints(2), ints(5), ints(2), ints(2), ints(4), (Grammar(GrammarKind.REGEX, "a|ü", (2, 7)),), ints(2),
)  # fmt: skip
SHAPED = replace(SAMPLING, shaping=SHAPING)
SUPPORTS = Supports(ints(4), ints(9))
GRANT = Grant("m", "w", "t", 99, 16, 5, 1000, 2048, 4096, 2**64 - 1, ("hidden.3", "final"), 1152, True, True)
WANTED = WantedLogprobs(ints(4), ints(3), ints(3), ints(3))
LOGPROBS = Logprobs(floats(7), floats(9), ints(12), floats(12))
FEATURES = RANDOM.random((3, 8)).astype(np.float16)

PAIRS: list[tuple[Any, Any, Any, Any]] = [
    (
        TargetStep(2**40, ROWS, SAMPLING, ints(4), np.array([1, 2], np.uint8), SUPPORTS, np.array([2, 3], np.uint8)),
        codec.target_step_to_pb, target_pb2.TargetStep, codec.target_step_from_pb,
    ),
    (
        TargetResult(1, ints(4), floats(4), floats(9), 123, FEATURES),
        codec.target_result_to_pb, target_pb2.TargetResult, codec.target_result_from_pb,
    ),
    (
        TargetStep(4, ROWS, SAMPLING, ints(4), np.array([1, 2], np.uint8), SUPPORTS, logprobs=WANTED),
        codec.target_step_to_pb, target_pb2.TargetStep, codec.target_step_from_pb,
    ),
    (
        TargetResult(1, ints(4), floats(4), floats(9), 123, logprobs=LOGPROBS),
        codec.target_result_to_pb, target_pb2.TargetResult, codec.target_result_from_pb,
    ),
    (
        TargetResult(1, ints(4), floats(4), floats(0), 123),
        codec.target_result_to_pb, target_pb2.TargetResult, codec.target_result_from_pb,
    ),
    (
        DraftStep(3, ROWS, SHAPED, ints(2), np.array([1, 3], np.uint8), 64, ints(2), FEATURES),
        codec.draft_step_to_pb, draft_pb2.DraftStep, codec.draft_step_from_pb,
    ),
    (
        DraftResult(4, ints(2), ints(6), 55, ints(6), SUPPORTS, floats(9)),
        codec.draft_result_to_pb, draft_pb2.DraftResult, codec.draft_result_from_pb,
    ),
    (GRANT, codec.grant_to_pb, types_pb2.StreamOpened, codec.grant_from_pb),
]  # fmt: skip


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a == b).all()
    elif is_dataclass(a):
        for field in fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b


@pytest.mark.parametrize(("step", "to_pb", "message", "from_pb"), PAIRS, ids=lambda value: type(value).__name__)
def test_everything_survives_the_wire(step: Any, to_pb: Any, message: Any, from_pb: Any) -> None:
    assert_same(from_pb(message.FromString(to_pb(step).SerializeToString())), step)


def test_a_drafters_greeting_survives_the_wire() -> None:
    capabilities = Capabilities((ProposalKind.GREEDY, ProposalKind.SAMPLED), tree_width=10, scheme="mtp")
    opened = draft_pb2.DraftOpened.FromString(codec.draft_opened_to_pb(GRANT, capabilities).SerializeToString())
    assert codec.draft_opened_from_pb(opened) == (GRANT, capabilities)


def test_bytes_that_are_no_array_are_named() -> None:
    step = codec.target_step_to_pb(PAIRS[0][0])
    step.sampling.top_ps = b"\0" * 7
    with pytest.raises(InvalidArgumentError, match=r"sampling\.top_ps is 7 bytes; must be a multiple of 4"):
        codec.target_step_from_pb(step)


def test_slot_copies_come_in_pairs() -> None:
    step = codec.target_step_to_pb(PAIRS[0][0])
    step.rows.slot_copies = b"\0" * 12
    with pytest.raises(InvalidArgumentError, match="slot_copies is 3 values; must be pairs"):
        codec.target_step_from_pb(step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 0}, "dtype is 0"),
        ({"dtype": 77}, "dtype is 77"),
        ({"shape": [5, 5]}, "needs 50 bytes, not 48"),
        ({"shape": [-3, -8]}, "shape"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    tensor = codec.tensor_to_pb(FEATURES)
    given = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data": tensor.data} | change
    with pytest.raises(InvalidArgumentError, match=message):
        codec.tensor_from_pb(types_pb2.Tensor(**given), "features")
