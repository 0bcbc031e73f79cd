"""Penalties, biases, bans, allowed ids and min_tokens through the real services: the text is Hugging Face's, whatever
drafts, and a draft that knows the target keeps all its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment
from drafts import DRAFTS, drafting
from safetensors.torch import load_file, save_file
from tiny_models import EOS_ID, load_reference, make_tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList

from pilotfish import Client, InvalidArgumentError, SamplingParams
from pilotfish.runtime.loading import LoadedModel, load_model

PROMPTS = [[40, 41, 40, 41, 40, 41, 40], [100, 7, 200, 100, 33]]
LENGTH = 32
FIELDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {90: 6.0, 91: 6.0, 33: -100, 34: -4.5}},
    "banned": {"banned_token_ids": [40, 41, 100, 7]},
    "allowed": {"allowed_token_ids": [EOS_ID, *range(60, 90)], "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 9, "logit_bias": {EOS_ID: 9.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {90: 2.0, EOS_ID: 5.0},
        "banned_token_ids": [40, 41],
        "allowed_token_ids": range(2, 150),
        "min_tokens": 12,
    },
}


class CountPenalties(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalties, which Hugging Face lacks, by the formula of OpenAI's API reference."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self._prompt_length, self._frequency, self._presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.zeros_like(scores)
        for token in input_ids[0, self._prompt_length :].tolist():
            counts[0, token] += 1
        return scores - self._frequency * counts - self._presence * (counts > 0)


class OnlyAllowed(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, token_ids: Any) -> None:
        self._token_ids = list(token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(scores, -math.inf)
        kept[:, self._token_ids] = scores[:, self._token_ids]
        return kept


def reference(model: Any, prompt: list[int], fields: Mapping[str, Any]) -> tuple[int, ...]:
    """What Hugging Face writes, with its own processors where it has them."""
    biases = {token: (-math.inf if bias == -100 else bias) for token, bias in fields.get("logit_bias", {}).items()}
    biases |= dict.fromkeys(fields.get("banned_token_ids", ()), -math.inf)
    own = [CountPenalties(len(prompt), fields.get("frequency_penalty", 0.0), fields.get("presence_penalty", 0.0))]
    if "allowed_token_ids" in fields:
        own.insert(0, OnlyAllowed(fields["allowed_token_ids"]))
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=LENGTH,
            min_new_tokens=fields.get("min_tokens"),
            do_sample=False,
            repetition_penalty=fields.get("repetition_penalty", 1.0),
            sequence_bias=[[[token], bias] for token, bias in biases.items()] or None,
            logits_processor=LogitsProcessorList(own),
        )
    return tuple(out[0, len(prompt) :].tolist())


def texts(client: Client, fields: Mapping[str, Any], **params: Any) -> list[tuple[int, ...]]:
    asked = SamplingParams(max_tokens=LENGTH, **fields, **params)
    return [client.generate(prompt, asked).token_ids for prompt in PROMPTS]


def every_text(client: Client) -> dict[tuple[str, float], list[tuple[int, ...]]]:
    """Greedy and seeded, of every field."""
    return {
        (name, temperature): texts(client, fields, temperature=temperature, seed=5)
        for name, fields in FIELDS.items()
        for temperature in (0.0, 1.0)
    }


@pytest.fixture(scope="module")
def plain(folder: Path, target: LoadedModel) -> dict[tuple[str, float], list[tuple[int, ...]]]:
    with Deployment(folder, target) as deployment, deployment.client() as client:
        return every_text(client)


@pytest.mark.parametrize("name", FIELDS)
def test_greedy_text_is_hugging_faces(
    name: str, folder: Path, plain: dict[tuple[str, float], list[tuple[int, ...]]]
) -> None:
    model = load_reference(folder)
    assert plain[name, 0.0] == [reference(model, prompt, FIELDS[name]) for prompt in PROMPTS]
    assert plain[name, 0.0] != [reference(model, prompt, {}) for prompt in PROMPTS]


@pytest.mark.parametrize(("kind", "tree"), DRAFTS)
def test_a_draft_changes_no_text(
    kind: str,
    tree: str,
    folder: Path,
    target: LoadedModel,
    plain: dict[tuple[str, float], list[tuple[int, ...]]],
    tmp_path: Path,
) -> None:
    serve = drafting(kind, folder, target, tmp_path, draft_tree=tree, draft_length=4)
    with serve as deployment, deployment.client() as client:
        assert every_text(client) == plain
        for rule in ("ratio", "block"):
            for fields in FIELDS.values():
                texts(client, fields, temperature=1.0, acceptance=rule)
        deployment.check_pools()


@pytest.mark.parametrize("name", FIELDS)
def test_a_draft_that_is_the_target_keeps_all_its_tokens(name: str, folder: Path, target: LoadedModel) -> None:
    """So q is shaped as p is: at every node, and for every way of drawing."""
    with Deployment(folder, target, (target,), draft_length=5) as deployment, deployment.client() as client:
        for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "acceptance": "match"}):
            asked = SamplingParams(max_tokens=LENGTH, **FIELDS[name], **sampling)  # type: ignore[arg-type]
            for prompt in PROMPTS:
                usage = client.generate(prompt, asked).usage
                # Behind its end, which the draft does not stop at, the target has drawn what it likes.
                assert usage.accepted >= usage.drafted - 5
                assert usage.drafted > 0


@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_a_frequency_penalty_is_as_strong_whatever_is_accepted(
    length: int, folder: Path, target: LoadedModel, plain: dict[tuple[str, float], list[tuple[int, ...]]]
) -> None:
    """Reported elsewhere: counts that are taken once a round are too low in a run that is accepted whole."""
    with Deployment(folder, target, (target,), draft_length=length) as deployment, deployment.client() as client:
        assert texts(client, FIELDS["frequency"]) == plain["frequency", 0.0]


def test_a_banned_token_never_comes_even_from_a_draft_that_insists(folder: Path, target: LoadedModel) -> None:
    with Deployment(folder, target) as deployment, deployment.client() as client:
        favourites = set(sum(texts(client, {}, ignore_eos=True), ()))
    bans = {"logit_bias": dict.fromkeys(favourites, -100)}
    with Deployment(folder, target, (target,)) as deployment, deployment.client() as client:
        for rule in ("match", "ratio", "block"):
            for temperature in (0.0, 1.5):
                found = texts(client, bans, ignore_eos=True, temperature=temperature, acceptance=rule)
                assert not favourites & set(sum(found, ()))


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_pad_ids_never_come(rule: Any, tmp_path: Path) -> None:
    """The tokenizer has 280 ids, the output layer 400 rows, of which the last would win."""
    folder = make_tiny_llama(tmp_path, padded_vocab=400, seed=2)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][280:] *= 4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder, dtype="float32")
    with Deployment(folder, model, (load_model(folder, dtype="float32", layers=1),)) as deployment:
        with deployment.client() as client:
            for temperature in (0.0, 1.0, 3.0):
                for fields in ({}, FIELDS["repetition"]):
                    found = texts(client, fields, temperature=temperature, ignore_eos=True, acceptance=rule)
                    assert max(sum(found, ())) < 280
        deployment.check_pools()


def test_stop_texts_are_let_through_before_min_tokens(folder: Path, target: LoadedModel) -> None:
    with Deployment(folder, target, (target,)) as deployment, deployment.client() as client:
        pieces = client.stream(PROMPTS[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        written = [token.text for piece in pieces for token in piece.tokens]
        early = next(text for text in written[:10] if text)
        late = next(text for text in written[20:] if text)
        first = next(i for i, text in enumerate(written) if early in text) + 1
        stopped = client.generate(PROMPTS[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=[early]))
        assert len(stopped.token_ids) < first
        assert early not in stopped.text
        asked = SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=[early, late], min_tokens=10)
        completion = client.generate(PROMPTS[0], asked)
        assert len(completion.token_ids) > 10
        assert early in completion.text


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("repetition_penalty is 0; must be in (0, inf)", {"repetition_penalty": 0.0}),
    ("repetition_penalty is inf", {"repetition_penalty": math.inf}),
    ("presence_penalty is 2.5; must be in [-2, 2]", {"presence_penalty": 2.5}),
    ("frequency_penalty is nan; must be in [-2, 2]", {"frequency_penalty": math.nan}),
    ("logit_bias of token 3 is 101; must be in [-100, 100]", {"logit_bias": {3: 101}}),
    ("logit_bias is of token 280; ids must be in [0, 280)", {"logit_bias": {280: 1}}),
    ("banned_token_ids[0] is -1; must be in [0, 280)", {"banned_token_ids": [-1]}),
    ("logit_bias is 1025 ids; at most 1024 may be", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
    ("banned_token_ids is [4], in part; logit_bias names these too", {"logit_bias": {4: 1}, "banned_token_ids": [4]}),
    ("allowed_token_ids is 4097 ids; at most 4096 may be", {"allowed_token_ids": range(4097)}),
    ("allowed_token_ids[0] is 300; must be in [0, 280)", {"allowed_token_ids": [300]}),
    ("allowed_token_ids is used up", {"allowed_token_ids": [7], "banned_token_ids": [7]}),
    ("allowed_token_ids is used up", {"allowed_token_ids": [EOS_ID], "min_tokens": 1}),
    ("allowed_token_ids is used up", {"banned_token_ids": range(280)}),
    ("min_tokens is -1; must be at least 0", {"min_tokens": -1}),
    ("min_tokens is 5; must be at most max_tokens, which is 4", {"min_tokens": 5, "max_tokens": 4}),
]


def test_what_is_out_of_range_is_refused_by_name(folder: Path, target: LoadedModel) -> None:
    with Deployment(folder, target) as deployment, deployment.client() as client:
        for message, fields in REFUSED:
            with pytest.raises(InvalidArgumentError) as refusal:
                client.generate(PROMPTS[0], SamplingParams(**fields))
            assert message in str(refusal.value)
        assert client.generate(PROMPTS[0], SamplingParams(max_tokens=2)).token_ids
