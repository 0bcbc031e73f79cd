"""Tiny models for whole deployments, loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from browser import Page, browsing, find_chromium
from tiny_models import make_tiny_llama

from pilotfish.runtime.loading import LoadedModel, load_model

Load = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target: 4 layers, byte tokenizer, chat template."""
    return make_tiny_llama(tmp_path_factory.mktemp("target"), layers=4, seed=1)


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> LoadedModel:
    return load_model(tiny_folder, dtype="float32", name="tiny")


@pytest.fixture(scope="session")
def tiny_draft(tiny_folder: Path) -> LoadedModel:
    """The target's first three layers."""
    return load_model(tiny_folder, dtype="float32", layers=3, name="tiny-draft")


@pytest.fixture(scope="session")
def other_draft(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Another model of the same tokenizer: a useless draft."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("other"), layers=1, seed=9)
    return load_model(folder, dtype="float32", name="other")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target of ``drafts``: 3 layers."""
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("target"), seed=1, layers=3)


@pytest.fixture(scope="session")
def target(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page on a desk's screen; tests that have none are skipped."""
    if (executable := find_chromium()) is None:
        pytest.skip("no Chromium: none on the path, and PILOTFISH_CHROMIUM names none")
    with browsing(executable, tmp_path_factory.mktemp("chromium")) as page:
        page.size(1360, 850)
        yield page
