"""Tiny models of each family, made once per test run, and a server that answers as a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_generation import FakeGeneration, serving
from tiny_models import make_tiny_model

ModelFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Gives ``make_tiny_model``'s folder for the arguments, made when first asked for."""
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def folder(family: str = "llama", **settings: Any) -> Path:
        key = repr((family, sorted(settings.items())))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp("models") / family, family, **settings)
        return made[key]

    return folder


@pytest.fixture
def fake() -> FakeGeneration:
    """What ``address`` answers with."""
    return FakeGeneration()


@pytest.fixture
def address(fake: FakeGeneration, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the fake server, which is also the one that commands ask by default."""
    with serving(fake) as address:
        monkeypatch.setenv("PILOTFISH_SERVER", address)
        yield address
