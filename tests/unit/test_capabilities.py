"""The list of fields against the contract, against what is really refused, and for lesser deployments."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from fakes import grant

from orchestrator.admission import Asked, Defaults, admit, check_timeout, truncate
from orchestrator.capabilities import Field, Offer, offer
from orchestrator.core.acceptance import Rule
from pilotfish.errors import InvalidArgumentError
from pilotfish.steps import Capabilities, Grant, ProposalKind
from pilotfish.v1 import generation_pb2 as pb

DEFAULTS = Defaults(4, Rule.RATIO, frozenset({2}))
TARGET = replace(grant(32), shapes_logits=True, gives_logprobs=True)
MTP = (replace(grant(8), model_id="head"), Capabilities(tuple(ProposalKind), tree_width=4, scheme="mtp"))
SEARCH = (replace(grant(8), model_id="search"), Capabilities((ProposalKind.GREEDY,), scheme="ngram"))


def offered(target: Grant | None = TARGET, *replicas: tuple[Grant, Capabilities], template: bool = True) -> Offer:
    return offer("big", target, replicas, DEFAULTS, template)


def found(offered: Offer, name: str) -> Field:
    return next(field for field in offered.fields if field.name == name)


def test_every_field_of_the_contract_is_listed_once() -> None:
    messages = (pb.GenerateRequest, pb.SamplingParams)
    names = [field.name for message in messages for field in message.DESCRIPTOR.fields if field.name != "sampling"]
    assert sorted(field.name for field in offered().fields) == sorted(names)


def test_a_deployment_with_everything_honours_everything() -> None:
    assert [field.name for field in offered(TARGET, MTP).fields if field.why_not] == []


def test_what_a_deployment_lacks_is_said_of_the_fields_that_need_it() -> None:
    def lacking(offered: Offer) -> dict[str, str]:
        return {field.name: field.why_not for field in offered.fields if field.why_not}

    assert set(lacking(offered(TARGET))) == {"draft_length", "adaptive_draft_length", "draft_model", "show_proposals"}
    assert "no draft replica answers" in lacking(offered(TARGET))["draft_model"]
    bare = lacking(offered(replace(TARGET, gives_logprobs=False), MTP))
    assert bare == dict.fromkeys(("logprobs", "prompt_logprobs"), "target fake gives none")
    assert "frequency_penalty" in lacking(offered(replace(TARGET, shapes_logits=False), MTP))
    assert set(lacking(offered(TARGET, MTP, template=False))) == {"messages"}
    assert set(lacking(offered(None)).values()) == {"no target has answered yet"}


def test_drafters_of_a_kind_are_counted_together() -> None:
    drafters = offered(TARGET, MTP, SEARCH, MTP).drafters
    assert [(each.model, each.scheme, each.replica_count, each.grows_trees) for each in drafters] == [
        ("head", "mtp", 2, True),
        ("search", "ngram", 1, False),
    ]
    assert [each.rules for each in drafters] == [(Rule.MATCH, Rule.RATIO, Rule.BLOCK), (Rule.MATCH,)]
    assert found(offered(TARGET, MTP, SEARCH), "draft_model").range == "head, mtp, search, ngram"


NUMBERS: dict[str, tuple[Any, ...]] = {
    # a value inside each end, and one outside where there is an end
    "max_tokens": (1, None, 0, None),
    "temperature": (0.0, None, -0.1, math.inf),
    "top_k": (0, 2**31 - 1, -1, 2**31),
    "top_p": (1e-6, 1.0, 0.0, 1.1),
    "min_p": (0.0, 1.0, -0.1, 1.1),
    "draft_length": (0, 64, -1, 65),
    "n": (1, 128, 0, 129),
    "logprobs": (0, 20, -1, 21),
    "prompt_logprobs": (0, 20, -1, 21),
    "repetition_penalty": (1e-6, None, 0.0, math.inf),
    "presence_penalty": (-2.0, 2.0, -2.1, 2.1),
    "frequency_penalty": (-2.0, 2.0, -2.1, 2.1),
    "min_tokens": (0, 64, -1, 65),
    "timeout_s": (1e-6, 604800.0, 0.0, 604800.1),
}


@pytest.mark.parametrize(
    ("count", "max_tokens", "kept"),
    [(None, 9, 6), (1, 9, 1), (4, 9, 4), (6, 9, 6), (10, 9, 6), (-1, 3, 6), (-1, 6, 4), (-1, 10, 1), (-1, 99, 1)],
)
def test_of_a_prompt_the_last_tokens_are_kept(count: int | None, max_tokens: int, kept: int) -> None:
    prompt = list(range(6))
    assert truncate(prompt, count, max_tokens, max_len=10) == prompt[-kept:]
    if count != -1:
        assert truncate(prompt, count, max_tokens, max_len=0) == prompt[-kept:]  # no target has answered yet


@pytest.mark.parametrize("count", [0, -2, 11, 2**31 - 1, -(2**31), 10**30])
def test_a_count_of_tokens_kept_has_limits(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^truncate_prompt_tokens is {count}; must be in \[1, 10\], or -1"):
        truncate([1, 2], count, 4, max_len=10)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_range_said_is_the_range_that_is_judged(name: str) -> None:
    *inside, low, high = NUMBERS[name]

    def judge(value: Any) -> None:
        if name == "timeout_s":
            check_timeout(value)
        else:
            admit("r", [1, 2], Asked(**{name: value}), DEFAULTS, vocab_size=50)

    for value in inside:
        if value is not None:
            judge(value)
    for value in (low, high):
        if value is not None:
            with pytest.raises(InvalidArgumentError, match=f"^{name} is "):
                judge(value)
    if said := re.match(r"([\[(])(-?[\d.]+), (inf|[\d.]+)[\])]", found(offered(), name).range):
        assert (said[1] == "[") == (inside[0] == float(said[2]))
        assert said[3] == "inf" or float(said[3]) == inside[1]
