"""Heads draft for a tiny target through the real services: random ones, whose text must be the target's all the
same, and one that knows what the target will say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment
from drafts import Wrapped, load_head
from safetensors.torch import load_file, save_file
from tiny_heads import FORMATS, HIDDEN, Written
from tiny_models import greedy_texts, load_reference, make_tiny_llama

from draft_svc.drafters import Drafter, Proposals
from draft_svc.drafters.heads import to_tensor
from pilotfish import Client, SamplingParams
from pilotfish.runtime.loading import load_model
from pilotfish.steps import DraftStep
from target_svc.engine import TargetEngine

PROMPTS = ["The quick brown fox", "a", "Once upon a time there was a small fish " * 3, "def f(x):\n    return x + 1\n"]
HEADS = ("own-reduced-pre-norm", "own-two-modules", "eagle", "speculators-hass", "eagle3", "speculators-eagle3")


@dataclass
class Pair:
    """What a drafter was told of one slot."""

    slot: int
    token: int
    state: torch.Tensor


@dataclass
class Recording(Wrapped):
    """A drafter that notes every pair it is sent, and how much it proposes."""

    pairs: list[Pair] = field(default_factory=list)
    largest: int = 0
    """Nodes of the largest proposal."""
    most_rows: int = 0
    """Of a step."""

    def propose(self, step: DraftStep) -> Proposals:
        assert step.features is not None
        states, rows = to_tensor(step.features), step.rows
        for begin, length, start in zip(rows.row_offsets, rows.lengths, rows.starts, strict=False):
            for i in range(length):
                self.pairs.append(Pair(int(start) + i, int(rows.token_ids[begin + i]), states[begin + i]))
        proposals = super().propose(step)
        self.largest = max(self.largest, *proposals.node_counts.tolist())
        self.most_rows = max(self.most_rows, len(rows.lengths))
        return proposals


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"), seed=1, layers=3)


@contextmanager
def serving(target: Path, *drafters: Drafter, features: tuple[str, ...], **settings: Any) -> Iterator[Deployment]:
    model = load_model(target, dtype="float32", name="tiny")
    engine: Callable[[], TargetEngine] = lambda: TargetEngine(model, pages=256, page_size=16, features=features)  # noqa: E731
    with Deployment(target, engine, drafters, **settings) as deployment:
        yield deployment


def seeded(client: Client, seed: int, **params: Any) -> list[tuple[int, ...]]:
    asked = SamplingParams(max_tokens=30, temperature=1.0, seed=seed, **params)
    return [client.generate(prompt, asked).token_ids for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("tree", ["off", "12"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_changes_no_text(name: str, tree: str, target_folder: Path, tmp_path: Path) -> None:
    """Greedy text is Hugging Face's, seeded text what the target draws without a draft; alone and together."""
    drafter = Recording(load_head(FORMATS[name].write(tmp_path), target_folder, tree_width=4))
    wanted, features = greedy_texts(target_folder, PROMPTS, 40), drafter.info.features
    with (
        serving(target_folder, drafter, features=features, draft_tree=tree) as deployment,
        deployment.client() as client,
    ):
        for prompt in PROMPTS:
            completion = client.generate(prompt, SamplingParams(max_tokens=40))
            assert completion.token_ids == wanted[prompt]
            assert completion.usage.drafted > 0
        assert drafter.largest == (4 if tree == "off" else 12)
        with ThreadPoolExecutor(8) as pool:
            together = pool.map(lambda prompt: client.generate(prompt, SamplingParams(max_tokens=40)), PROMPTS * 2)
        for prompt, completion in zip(PROMPTS * 2, together, strict=True):
            assert completion.token_ids == wanted[prompt]
        for seed in (1, 2**64 - 1):
            assert seeded(client, seed) == seeded(client, seed, draft_length=0)
        sampled = SamplingParams(max_tokens=30, temperature=1.0)
        assert len(client.generate(PROMPTS[0], sampled).token_ids) > 0
        deployment.check_pools()


@pytest.mark.parametrize("early", [True, False])
def test_single_tokens_are_drafted_from_both_outcomes_where_told_to(
    early: bool, target_folder: Path, tmp_path: Path
) -> None:
    drafter, wanted = (
        Recording(load_head(FORMATS["own"].write(tmp_path), target_folder)),
        greedy_texts(target_folder, PROMPTS, 40),
    )
    serve = serving(target_folder, drafter, features=drafter.info.features, early_drafts=early)
    with serve as deployment, deployment.client() as client:
        for prompt in PROMPTS:
            completion = client.generate(prompt, SamplingParams(max_tokens=40, draft_length=1))
            assert completion.token_ids == wanted[prompt]
            assert completion.usage.drafted > 0
        assert drafter.most_rows == (2 if early else 1)
        deployment.check_pools()


@pytest.mark.parametrize("tree", ["off", "12"])
def test_a_head_is_sent_true_states_beside_the_tokens_that_follow(
    tree: str, target_folder: Path, tmp_path: Path
) -> None:
    written = FORMATS["eagle3"]
    recording = Recording(load_head(written.write(tmp_path), target_folder))
    layers = [int(name.removeprefix("hidden.")) for name in written.features]
    from transformers import AutoTokenizer

    model, tokenizer = load_reference(target_folder), AutoTokenizer.from_pretrained(target_folder)
    serve = serving(target_folder, recording, features=written.features, draft_tree=tree)
    with serve as deployment, deployment.client() as client:
        for prompt in PROMPTS:
            recording.pairs.clear()
            completion = client.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
            tokens = [*tokenizer(prompt)["input_ids"], *completion.token_ids]
            with torch.inference_mode():
                hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            states = torch.cat([hidden[k][0] for k in layers], dim=-1)
            assert {pair.slot for pair in recording.pairs} >= set(range(len(tokens) - 6))
            for pair in recording.pairs:
                assert pair.token == tokens[pair.slot + 1]
                torch.testing.assert_close(pair.state, states[pair.slot], atol=1e-4, rtol=1e-4)


def bigram_target(folder: Path) -> Path:
    """A target whose layers add nothing: its next token is a function of its last, a long cycle."""
    make_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def knowing_head(target: Path, folder: Path) -> Path:
    """An MTP head that does with the token beside the state what such a target would."""
    written = FORMATS["own"]
    weights = written.weights()
    prefix = "model.layers.0"
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"{prefix}.{name}.weight"].zero_()
    weights[f"{prefix}.eh_proj.weight"] = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), dim=1)
    weights[f"{prefix}.enorm.weight"].fill_(1.0)
    weights[f"{prefix}.shared_head.norm.weight"] = load_file(target / "model.safetensors")["model.norm.weight"]
    return _write(written, weights, folder)


def _write(written: Written, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    written.write(folder)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("tree", "kept"), [("off", 1.0), ("12", 0.8)])
def test_a_head_that_knows_the_target_has_its_tokens_kept(tree: str, kept: float, tmp_path: Path) -> None:
    """All of a chain; of a tree those that it did not leave out for the sake of its breadth.

    Norms are scale-free, so that RMS norm of an embedding behind an identity is the target's own last state.
    """
    target = bigram_target(tmp_path / "target")
    drafter = load_head(knowing_head(target, tmp_path / "head"), target)
    with serving(target, drafter, features=("final",), draft_tree=tree) as deployment, deployment.client() as client:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=41, ignore_eos=True, temperature=temperature, seed=7, draft_length=4)
            for prompt in PROMPTS[:2]:
                usage = client.generate(prompt, params).usage
                assert usage.accepted >= kept * usage.drafted
                assert usage.drafted > 20


def test_single_tokens_drafted_early_are_shaped_as_the_targets(tmp_path: Path) -> None:
    """A row of an early step reads the token before its own from the slot that the row beside it fills."""
    target = bigram_target(tmp_path / "target")
    drafter = Recording(load_head(knowing_head(target, tmp_path / "head"), target))
    shapes: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"repetition_penalty": 1.5, "logit_bias": {60: 3.0, 70: -100}},
    ]
    serve = serving(target, drafter, features=("final",), early_drafts=True)
    with serve as deployment, deployment.client() as client:
        for shape in shapes:
            for temperature in (0.0, 1.0):
                params = SamplingParams(
                    max_tokens=41, ignore_eos=True, temperature=temperature, seed=7, draft_length=1, **shape
                )
                usage = client.generate(PROMPTS[1], params).usage
                assert usage.drafted > 15
                assert usage.accepted == usage.drafted
    assert drafter.most_rows == 2
