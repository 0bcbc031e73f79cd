"""A deployment that serves HTTP, OpenAI's own client, and bare HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from deployment import Deployment
from http_api import url

from pilotfish.runtime.loading import LoadedModel


@pytest.fixture(scope="module")
def deployment(tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel) -> Iterator[Deployment]:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), http="127.0.0.1:0") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url(deployment)}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(deployment: Deployment) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url(deployment), timeout=60) as http:
        yield http
