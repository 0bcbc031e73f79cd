"""SamplingParams: defaults, the message they make, and what cannot be sent."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

import pilotfish
from pilotfish import InvalidArgumentError, SamplingParams
from pilotfish.v1 import generation_pb2 as pb


def test_defaults_are_those_of_the_contract() -> None:
    unshaped = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0}
    defaults = pb.SamplingParams(
        max_tokens=64, temperature=0, top_k=0, top_p=1, min_p=0, n=1, skip_special_tokens=True, **unshaped
    )
    assert SamplingParams().to_pb() == defaults


def test_every_field_of_the_contract_is_sent() -> None:
    alike: dict[str, Any] = {
        "max_tokens": 1,
        "temperature": 0.5,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": (3, 4),
        "ignore_eos": True,
        "draft_length": 0,
        "n": 3,
        "echo": True,
        "logprobs": 0,
        "prompt_logprobs": 5,
        "adaptive_draft_length": True,
        "draft_model": "mtp",
        "show_proposals": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": -1,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 0.25,
        "logit_bias": {7: -100, 8: 0.5},
        "banned_token_ids": (9,),
        "allowed_token_ids": [1, 2],
        "min_tokens": 1,
        "regex": "a|b",
    }
    message = pb.SamplingParams(acceptance=pb.ACCEPTANCE_RULE_BLOCK, **alike)
    assert SamplingParams(acceptance="block", **alike).to_pb() == message
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {
        field.name for field in pb.SamplingParams.DESCRIPTOR.fields
    }


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"json_schema": {"type": "ö"}}, {"json_schema": '{"type": "ö"}'}),
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"json_object": False, "ebnf": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}),
        ({"structural_tag": {"a": 1}}, {"structural_tag": '{"a": 1}'}),
        ({}, {}),
    ],
)
def test_one_grammar_is_sent(given: dict[str, Any], sent: dict[str, Any]) -> None:
    message, name = SamplingParams(**given).to_pb(), next(iter(sent), None)
    assert message.WhichOneof("grammar") == name
    assert name is None or getattr(message, name) == sent[name]


def test_one_stop_text_needs_no_list() -> None:
    assert list(SamplingParams(stop="end").to_pb().stop) == ["end"]


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_acceptance_rules_go_by_name(rule: Any) -> None:
    sent = SamplingParams(acceptance=rule).to_pb().acceptance
    assert pb.AcceptanceRule.Name(sent) == f"ACCEPTANCE_RULE_{rule.upper()}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "64"),
        ("max_tokens", 2**31),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", 0.5),
        ("top_p", "1"),
        ("min_p", []),
        ("seed", -(2**63) - 1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop", 7),
        ("stop", [7]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("ignore_eos", "yes"),
        ("acceptance", "typical"),
        ("acceptance", "unspecified"),
        ("acceptance", 1),
        ("draft_length", "4"),
        ("draft_model", b"mtp"),
        ("draft_model", None),
        ("show_proposals", 1),
        ("include_stop_str_in_output", "no"),
        ("skip_special_tokens", None),
        ("truncate_prompt_tokens", 1.5),
        ("truncate_prompt_tokens", 2**31),
        ("repetition_penalty", None),
        ("presence_penalty", "1"),
        ("frequency_penalty", True),
        ("logit_bias", 7),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: True}),
        ("logit_bias", {2**31: 1.0}),
        ("banned_token_ids", ["a"]),
        ("allowed_token_ids", 5),
        ("min_tokens", 0.5),
        ("json_schema", 7),
        ("json_schema", {"a": {1}}),
        ("json_object", 1),
        ("regex", True),
        ("ebnf", b"root"),
        ("structural_tag", 0.5),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is .*; it must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("temperature", -1), ("top_p", 2), ("min_p", 5)])
def test_ranges_are_the_server_s_to_judge(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}).to_pb(), field) == value


def test_params_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1  # type: ignore[misc]


def test_the_package_offers_what_it_lists() -> None:
    for name in pilotfish.__all__:
        assert getattr(pilotfish, name).__name__ == name
    assert set(pilotfish.__all__) <= set(dir(pilotfish))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pilotfish.nonsense


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import pilotfish", ["grpc", "numpy", "torch", "typer"]),
        ("from pilotfish import AsyncClient, Client, SamplingParams", ["numpy", "torch", "transformers", "typer"]),
        ("import pilotfish.cli.main", ["grpc", "numpy", "torch", "transformers"]),
    ],
)
def test_imports_stay_light(statement: str, absent: list[str]) -> None:
    code = f"import sys; {statement}; print(sorted(set({absent}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("seed", "sent"), [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1)]
)
def test_a_seed_below_0_is_its_twos_complement(seed: int, sent: int) -> None:
    assert SamplingParams(seed=seed).to_pb().seed == sent


def test_what_is_too_long_to_be_shown_is_refused_too() -> None:
    with pytest.raises(InvalidArgumentError, match="seed is of int, and too long to be shown; it must be None or an"):
        SamplingParams(seed=10**5000)


def test_a_refusal_has_its_parts() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        SamplingParams(max_tokens=2**31)
    error = refused.value
    assert (error.field, error.value, error.limit) == ("max_tokens", "2147483648", "it must be an integer of 32 bits")
