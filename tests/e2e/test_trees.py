"""Trees of heads through the real services where sizes are the server's choice, or shapes are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment
from drafts import load_head, medusa
from tiny_heads import FORMATS
from tiny_models import load_reference

from pilotfish import Client, SamplingParams
from pilotfish.runtime.loading import LoadedModel

PROMPTS = ["The quick brown fox", "Once upon a time", "def f(x):\n    return x + 1\n"]


def texts(client: Client, **params: Any) -> list[tuple[int, ...]]:
    return [client.generate(p, SamplingParams(max_tokens=60, ignore_eos=True, **params)).token_ids for p in PROMPTS]


def every_text(deployment: Deployment) -> list[list[tuple[int, ...]]]:
    with deployment.client() as client:
        return [texts(client, temperature=temperature, seed=5) for temperature in (0.0, 1.0)]


@pytest.fixture(scope="module")
def plain(folder: Path, target: LoadedModel) -> list[list[tuple[int, ...]]]:
    with Deployment(folder, target) as deployment:
        return every_text(deployment)


@pytest.mark.parametrize("tree", ["auto", 16])
@pytest.mark.parametrize("kind", ["medusa", "mtp"])
def test_texts_are_the_targets_own_whatever_is_drafted(
    kind: str, tree: Any, folder: Path, target: LoadedModel, plain: list[list[tuple[int, ...]]], tmp_path: Path
) -> None:
    head = medusa(tmp_path / "head", folder) if kind == "medusa" else FORMATS["own"].write(tmp_path / "head")
    drafter, settings = load_head(head, folder), {"features": ("final",), "draft_tree": tree, "draft_length": "auto"}
    with Deployment(folder, target, (drafter,), **settings) as deployment:
        assert every_text(deployment) == plain
        with deployment.client() as client:
            usage = client.generate(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True, draft_length=3)).usage
        assert usage.drafted > 0
        deployment.check_pools()


@pytest.mark.parametrize("acceptance", ["ratio", "block"])
def test_given_shapes_serve_every_way_of_proposing(
    acceptance: str, folder: Path, target: LoadedModel, plain: list[list[tuple[int, ...]]], tmp_path: Path
) -> None:
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]")
    drafter = load_head(FORMATS["eagle"].write(tmp_path / "head"), folder, tree=tmp_path / "tree.json")
    assert drafter.tree_width == 2
    settings = {"features": ("final",), "draft_tree": 6, "draft_length": 3}
    with Deployment(folder, target, (drafter,), **settings) as deployment:
        assert every_text(deployment) == plain
        with deployment.client() as client:
            texts(client, temperature=1.0, acceptance=acceptance)
        deployment.check_pools()


@pytest.mark.parametrize("acceptance", ["match", "ratio", "block"])
def test_logprobs_and_proposals_of_trees(acceptance: Any, folder: Path, target: LoadedModel, tmp_path: Path) -> None:
    """Each token has the log probability that Hugging Face gives it, and each kept one is a node of what was shown."""
    (tmp_path / "tree.json").write_text("[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]")
    drafter = load_head(FORMATS["eagle"].write(tmp_path / "head"), folder, tree=tmp_path / "tree.json")
    settings = {"features": ("final",), "draft_tree": 7, "draft_length": 3}
    params = SamplingParams(
        max_tokens=60, temperature=1.5, seed=2, ignore_eos=True, acceptance=acceptance, logprobs=2, prompt_logprobs=1,
        show_proposals=True,
    )  # fmt: skip
    with Deployment(folder, target, (drafter,), **settings) as deployment, deployment.client() as client:
        answer = client.generate(PROMPTS[0], params)
        deployment.check_pools()
    assert answer.prompt is not None
    ids = [*answer.prompt.token_ids, *answer.token_ids]
    with torch.inference_mode():
        laws = load_reference(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    tokens = [token for piece in answer.pieces for token in piece.tokens]
    found = [*answer.prompt.logprobs[1:], *(token.logprobs for token in tokens)]
    assert len(found) == len(ids) - 1
    for law, token_id, logprobs in zip(laws, ids[1:], found, strict=False):
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(float(law[token_id]), abs=1e-3)
        assert logprobs.top[0][0] == int(law.argmax())
    shown = [piece for piece in answer.pieces if piece.proposal is not None]
    assert any(piece.proposal is not None and len(piece.proposal.token_ids) > 3 for piece in shown)
    for piece in shown:
        assert piece.proposal is not None
        path, parents = piece.proposal.accepted, piece.proposal.parents
        assert [parents[node] for node in path] == [-1, *path][: len(path)]
        assert tuple(piece.proposal.token_ids[node] for node in path) == piece.token_ids[: len(path)]
    assert any(piece.accepted for piece in shown)
