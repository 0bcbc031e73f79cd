"""Structured output through the real services: every text keeps to its grammar, whatever drafts and however it is
judged, and is the one that the target would write alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from drafts import DRAFTS, Wrapped, drafting
from tiny_models import EOS_ID, byte_tokenizer
from waiting import eventually

from draft_svc.drafters import Proposals
from draft_svc.drafters.model import ModelDrafter
from pilotfish import Client, Completion, FailedPreconditionError, InvalidArgumentError, SamplingParams
from pilotfish.runtime.loading import LoadedModel, load_model
from pilotfish.steps import DraftStep

PROMPTS = [[40, 41, 40, 41, 40, 41, 40], [100, 7, 200, 100, 33]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "kind", "tags"],
}
DATE = "(19|20)[0-9][0-9]-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])"
LISP = 'root ::= "(" [a-f] (" " (root | [a-f] | [a-f])){1,2} ")"'
LESS_SPACE = {token: -12.0 for text in " \n\r" for token in byte_tokenizer().encode(text).ids}
"""A model with random weights would fill its budget with white space."""
LENGTH = 120
Reads = Callable[[str], object]


def read_schema(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "kind", "tags"]
    assert len(found["name"]) <= 3
    assert found["kind"] in ("cat", "dog")
    assert 1 <= len(found["tags"]) <= 2
    assert all(isinstance(tag, bool) for tag in found["tags"])


def read_lisp(text: str) -> None:
    assert re.fullmatch(r"[()a-f ]+", text)
    assert text.count("(") == text.count(")") > 0


GRAMMARS: dict[str, tuple[dict[str, Any], Reads]] = {
    "schema": ({"json_schema": SCHEMA, "logit_bias": LESS_SPACE}, read_schema),
    "regex": ({"regex": DATE}, lambda text: re.fullmatch(DATE, text) or pytest.fail(text)),
    "ebnf": ({"ebnf": LISP}, read_lisp),
    "penalised": ({"json_schema": SCHEMA, "repetition_penalty": 1.3, "logit_bias": LESS_SPACE}, read_schema),
}
Texts = dict[tuple[str, float], list[tuple[int, ...]]]


def write(client: Client, name: str, **params: Any) -> list[Completion]:
    """What is complete keeps to its grammar; what max_tokens cut off could go on so."""
    fields, read = GRAMMARS[name]
    found = [client.generate(prompt, SamplingParams(max_tokens=LENGTH, **fields, **params)) for prompt in PROMPTS]
    for completion in found:
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == EOS_ID
            read(completion.text)
        else:
            assert len(completion.token_ids) == LENGTH
            assert name != "regex"
    return found


def has_compiled(drafter: ModelDrafter) -> bool:
    """Whether a draft has compiled what it was asked for, which it does meanwhile."""
    return eventually(lambda: all(job.found.done() for _, job in drafter._grammars._jobs))


def every_text(client: Client) -> Texts:
    """Greedy and seeded, of every grammar."""
    return {
        (name, temperature): [found.token_ids for found in write(client, name, temperature=temperature, seed=5)]
        for name in GRAMMARS
        for temperature in (0.0, 1.0)
    }


@pytest.fixture(scope="module")
def plain(folder: Path, target: LoadedModel) -> Texts:
    with Deployment(folder, target) as deployment, deployment.client() as client:
        texts = every_text(client)
    assert sum(tokens[-1] == EOS_ID for found in texts.values() for tokens in found) >= 12
    return texts


@pytest.mark.parametrize(("kind", "tree"), DRAFTS)
def test_texts_keep_to_their_grammar_and_are_the_targets_own(
    kind: str, tree: str, folder: Path, target: LoadedModel, plain: Texts, tmp_path: Path
) -> None:
    serve = drafting(kind, folder, target, tmp_path, draft_tree=tree, draft_length=4)
    with serve as deployment, deployment.client() as client:
        assert every_text(client) == plain
        for rule in ("ratio", "block"):
            for name in GRAMMARS:
                write(client, name, temperature=1.0, acceptance=rule, seed=6)
        deployment.check_pools()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("near", {"draft_length": 4}),
        ("eagle3", {"draft_length": 4, "draft_tree": "12"}),
        ("eagle3", {"draft_length": 1, "early_drafts": True}),
    ],
    ids=["chains", "trees", "early"],
)
def test_texts_are_the_same_where_rows_take_each_others_pages(
    kind: str, settings: dict[str, Any], folder: Path, target: LoadedModel, plain: Texts, tmp_path: Path
) -> None:
    """Preempted rows find their pages and those of others with the same text, and matchers too, or make them anew."""

    def ask(wanted: tuple[str, float, int]) -> Completion:
        name, temperature, index = wanted
        params = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=5, **GRAMMARS[name][0])
        return client.generate(PROMPTS[index], params)

    every = [(name, temperature, index) for name, temperature in plain for index in range(len(PROMPTS))] * 2
    serve = drafting(kind, folder, target, tmp_path, pages=34, page_size=8, max_rows=16, **settings)
    with serve as deployment, deployment.client() as client:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(ask, every))
        for (name, temperature, index), completion in zip(every, found, strict=True):
            assert completion.token_ids == plain[name, temperature][index]
        assert sum(completion.usage.preemptions for completion in found) > 0
        assert sum(completion.usage.accepted for completion in found) > 0
        deployment.check_pools()


@dataclass
class Heedless(Wrapped):
    """A drafter that shapes nothing: its drafts break the grammar all the time."""

    def propose(self, step: DraftStep) -> Proposals:
        return super().propose(replace(step, sampling=replace(step.sampling, shaping=None)))


@pytest.mark.parametrize(("kind", "tree"), [("self", "off"), ("eagle3", "12")])
def test_drafts_that_break_the_grammar_harm_nothing(
    kind: str, tree: str, folder: Path, target: LoadedModel, plain: Texts, tmp_path: Path
) -> None:
    """Reported elsewhere: a stream that ended after its first token, and rows beside it that ended too."""
    serve = drafting(kind, folder, target, tmp_path, wrap=Heedless, draft_tree=tree, draft_length=4)
    with serve as deployment, deployment.client() as client:
        assert every_text(client) == plain
        for rule in ("ratio", "block"):
            write(client, "schema", temperature=1.0, acceptance=rule)
        deployment.check_pools()


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_draft_that_is_the_target_keeps_all_its_tokens(name: str, folder: Path, target: LoadedModel) -> None:
    drafter = ModelDrafter(target, pages=256)
    with Deployment(folder, target, (drafter,), draft_length=5) as deployment, deployment.client() as client:
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            write(client, name, **sampling)
            assert has_compiled(drafter)
            for completion in write(client, name, **sampling):
                usage = completion.usage
                # Behind the end of its grammar a draft does not know what to say.
                assert usage.accepted >= usage.drafted - 5


def test_sixteen_at_once_have_no_brace_too_many(folder: Path, target: LoadedModel) -> None:
    """Reported elsewhere: doubled braces, as matchers of rows were mixed up. Some of these share a seed."""
    near = load_model(folder, dtype="float32", layers=2)
    fields = {**GRAMMARS["schema"][0], "max_tokens": LENGTH, "temperature": 1.0}

    def ask(index: int) -> Completion:
        seed = {"seed": index // 4} if index % 2 else {}
        return client.generate(PROMPTS[index % 2], SamplingParams(**fields, **seed))  # type: ignore[arg-type]

    with Deployment(folder, target, (near,), max_rows=16) as deployment, deployment.client() as client:
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(ask, range(24)))
        seeded = {}
        for index, completion in enumerate(found):
            if completion.finish_reason == "stop":
                read_schema(completion.text)
            if index % 2:
                assert seeded.setdefault(index // 4, completion.token_ids) == completion.token_ids
        assert sum(completion.finish_reason == "stop" for completion in found) > 12
        deployment.check_pools()


def test_a_target_that_comes_back_takes_a_grammar_up_where_it_was(
    folder: Path, target: LoadedModel, plain: Texts
) -> None:
    near = load_model(folder, dtype="float32", layers=2)
    with Deployment(folder, target, (near,)) as deployment, deployment.client() as client:
        for prompt, tokens in zip(PROMPTS, plain["schema", 0.0], strict=True):
            stream = client.stream(prompt, SamplingParams(max_tokens=LENGTH, **GRAMMARS["schema"][0]))
            next(iter(stream))
            deployment.call(deployment.target.stop())
            deployment.call(deployment.start_target(deployment.target.address))
            for _ in stream:
                pass
            assert stream.result.token_ids == tokens
        deployment.check_pools()


NOT_KEPT = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}
NOT_UNIQUE = {"items": {"type": "array", "uniqueItems": True}}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("regex is no grammar that can be followed: ", {"regex": "(("}),
    ("json_schema is no JSON: ", {"json_schema": "{"}),
    ("json_schema at #/type is 'nonsense'; must be of object, ", {"json_schema": {"type": "nonsense"}}),
    (
        "json_schema at #/items/uniqueItems is True; ",
        {"json_schema": {"items": {"type": "array", "uniqueItems": True}}},
    ),
    ("structural_tag at #/format/json_schema, #/not is ", {"structural_tag": NOT_KEPT}),
    ("ebnf is no grammar", {"ebnf": "root ::="}),
    ("structural_tag is no grammar", {"structural_tag": {}}),
    ("regex is empty; give a grammar, or leave it out", {"regex": ""}),
    ("regex is of 65537 bytes; at most 65536", {"regex": "a" * 65537}),
    ("ignore_eos is set; with json_object", {"json_object": True, "ignore_eos": True}),
    ("min_tokens is 3; must be 0 with regex", {"regex": "a", "min_tokens": 3}),
]


def test_one_bad_grammar_fails_one_request_and_nobody_else(folder: Path, target: LoadedModel, plain: Texts) -> None:
    near = load_model(folder, dtype="float32", layers=2)
    asked = SamplingParams(max_tokens=LENGTH, **GRAMMARS["schema"][0])
    with (
        Deployment(folder, target, (near,)) as deployment,
        deployment.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):
        good = [pool.submit(client.generate, prompt, asked) for prompt in PROMPTS * 2]
        for message, fields in BAD:
            with pytest.raises(InvalidArgumentError) as refusal:
                client.generate(PROMPTS[0], SamplingParams(**fields))
            assert message in str(refusal.value)
        assert [each.result().token_ids for each in good] == plain["schema", 0.0] * 2
        deployment.check_pools()


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_a_request_that_leaves_itself_no_token_fails_alone(
    rule: Any, folder: Path, target: LoadedModel, plain: Texts
) -> None:
    """Of the text "abc" the grammar lets nothing else follow, and c is banned."""
    (banned,) = byte_tokenizer().encode("c").ids
    asked = SamplingParams(regex="abc", banned_token_ids=[banned], temperature=1.0, acceptance=rule)
    other = SamplingParams(max_tokens=LENGTH, **GRAMMARS["schema"][0])
    with (
        Deployment(folder, target, (target,)) as deployment,
        deployment.client() as client,
        ThreadPoolExecutor(2) as pool,
    ):
        good = [pool.submit(client.generate, prompt, other) for prompt in PROMPTS]
        for _ in range(3):
            stream = client.stream(PROMPTS[0], asked)
            with pytest.raises(FailedPreconditionError, match="after 2 tokens no token may follow: the grammar, "):
                for _ in stream:
                    pass
        assert [each.result().token_ids for each in good] == plain["schema", 0.0]
        deployment.check_pools()


def test_a_stop_text_before_the_place_where_nothing_follows_ends_a_sample_well(
    folder: Path, target: LoadedModel
) -> None:
    """Both come with one answer of the target: b, which was drafted, and that nothing follows it."""
    (banned,) = byte_tokenizer().encode("c").ids
    asked = SamplingParams(regex="abc", banned_token_ids=[banned], stop=["b"], n=2)
    drafter = ModelDrafter(target, pages=256)
    with Deployment(folder, target, (drafter,), draft_length=3) as deployment, deployment.client() as client:
        client.generate(PROMPTS[0], SamplingParams(regex="abc"))
        assert has_compiled(drafter)
        samples = client.generate(PROMPTS[0], asked).samples
        assert samples[0].usage.drafted > 0
        assert [(sample.text, sample.finish_reason) for sample in samples] == [("a", "stop")] * 2
        deployment.check_pools()


def test_one_grammar_only_is_asked_for() -> None:
    with pytest.raises(InvalidArgumentError, match="json_object is given; so is json_schema"):
        SamplingParams(json_schema="{}", json_object=True)
