"""The examples of docs/openai.md, word for word but for the address."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from deployment import Deployment

from pilotfish.runtime.loading import LoadedModel

ROOT = Path(__file__).parents[3]
ADDRESS = "127.0.0.1:8000"  # of the examples


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8")
    text += (ROOT / "README.md").read_text(encoding="utf-8").partition("## OpenAI's API")[2].partition("\n## ")[0]
    return [block for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if ADDRESS in block]


CURL = [block for block in blocks("sh") if block.startswith("curl")]


@pytest.fixture(scope="module")
def address(tiny_folder: Path, tiny_target: LoadedModel, tiny_draft: LoadedModel) -> Iterator[str]:
    with Deployment(tiny_folder, tiny_target, (tiny_draft,), http="127.0.0.1:0", name="smollm2") as deployment:
        assert deployment.orchestrator.gateway is not None
        yield deployment.orchestrator.gateway.address


def test_there_are_examples() -> None:
    assert len(CURL) >= 5
    assert len(blocks("python")) == 1


@pytest.mark.parametrize("example", CURL)
def test_curl(address: str, example: str) -> None:
    url, headers, data = "", {}, None
    words = iter(shlex.split(example.replace(ADDRESS, address).replace("\\\n", " "))[1:])
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            data = next(words)
            json.loads(data)
        elif word != "-N":
            url = word
    with httpx2.Client(timeout=60) as http:
        answer = http.request("POST" if data else "GET", url, content=data, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n") or answer.json()


def test_python(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = blocks("python")
    exec(compile(example.replace(ADDRESS, address), "docs/openai.md", "exec"), {})
    assert "'rounds'" in capsys.readouterr().out
