"""Trees of heads through the real services where sizes are the server's choice, or shapes are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deployment import Deployment
from safetensors.torch import load_file, save_file
from tiny_heads import FORMATS
from tiny_models import make_tiny_llama

from draft_svc.drafters import Drafter, create_drafter
from draft_svc.server import DraftConfig
from pilotfish import Client, SamplingParams
from pilotfish.runtime.loading import LoadedModel, load_model

PROMPTS = ["The quick brown fox", "Once upon a time", "def f(x):\n    return x + 1\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("target"), seed=1, layers=3)


@pytest.fixture(scope="module")
def target(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32")


def load(head: Path, target: Path, **settings: Any) -> Drafter:
    defaults = {"model": head, "target_model": target, "pages": 256, "dtype": "float32", "device": "cpu"}
    return create_drafter(DraftConfig(**(defaults | settings)))


def medusa(folder: Path, target: Path) -> Path:
    """Heads that are the target's own output layer behind a random block, in vLLM's names."""
    width = load_file(target / "model.safetensors")["model.norm.weight"].shape[0]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"original_lm_head": True}))
    generator = torch.Generator().manual_seed(1)
    blocks = {f"blocks.{j}.layers.0.weight": torch.randn(width, width, generator=generator) / 8 for j in range(3)}
    save_file(blocks, folder / "model.safetensors")
    return folder


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
    drafter, settings = load(head, folder), {"features": ("final",), "draft_tree": tree, "draft_length": "auto"}
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
    drafter = load(FORMATS["eagle"].write(tmp_path / "head"), folder, tree=tmp_path / "tree.json")
    assert drafter.tree_width == 2
    settings = {"features": ("final",), "draft_tree": 6, "draft_length": 3}
    with Deployment(folder, target, (drafter,), **settings) as deployment:
        assert every_text(deployment) == plain
        with deployment.client() as client:
            texts(client, temperature=1.0, acceptance=acceptance)
        deployment.check_pools()
