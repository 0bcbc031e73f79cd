"""Prompts for capture: what is always at hand, and what wheels add."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from draft_svc.training.documents import read_conversations
from draft_svc.training.prompts import gather
from pilotfish.errors import InvalidArgumentError, NotFoundError


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


def texts(prompts: list[dict[str, object]], category: str) -> list[str]:
    return [each["messages"][0]["content"] for each in prompts if each["category"] == category]  # type: ignore[index]


def test_the_standard_library_alone_gives_four_kinds(tmp_path: Path) -> None:
    prompts = gather([])
    kinds = Counter(each["category"] for each in prompts)
    assert kinds.keys() == {"math", "write", "code", "sum"}
    assert min(kinds.values()) > 100
    assert sum(len(text) > 1500 for kind in kinds for text in texts(prompts, kind)) > 500  # long ones too
    assert all("def " in text and "\n\n" in text for text in texts(prompts, "code"))
    assert gather([]) == prompts
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, prompts)))
    assert len(read_conversations(path)) == len(prompts) == len({json.dumps(each["messages"]) for each in prompts})


def test_wheels_add_their_own(tmp_path: Path) -> None:
    task = {"task_description": "Given a list of numbers, return the sum of all that are even."}
    essay = "# Title\n\n" + "A sentence that is neither short nor long. " * 80 + "\n```\ncode\n```\n"
    talk = b"categories:\n- food\nconversations:\n- - Do you like to eat fish?\n  - I do not eat.\n- - Hi\n  - Hello\n"
    wheels = [
        wheel(
            tmp_path, "reasoning_gym", {"reasoning_gym/data/codeio.jsonl.gz": gzip.compress(json.dumps(task).encode())}
        ),
        wheel(tmp_path, "chatterbot_corpus", {"x/english/food.yml": talk, "x/german/essen.yml": talk}),
        wheel(tmp_path, "ifcraftcorpus", {"share/corpus/essay.md": essay.encode()}),
    ]
    prompts = gather(wheels)
    assert any(task["task_description"] in text for text in texts(prompts, "code"))
    assert texts(prompts, "qa") == ["Do you like to eat fish?"]
    passages = [text for text in texts(prompts, "sum") if "neither short nor long" in text]
    assert passages
    assert not any("Title" in text or "code" in text for text in passages)
    assert all(500 < len(text) < 2800 for text in passages)


def test_what_is_no_known_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="pip download"):
        gather([tmp_path / "reasoning_gym-1.whl"])
    with pytest.raises(InvalidArgumentError, match="these are: chatterbot_corpus, ifcraftcorpus, reasoning_gym"):
        gather([wheel(tmp_path, "numpy", {})])
    broken = tmp_path / "reasoning_gym-1.whl"
    broken.write_bytes(b"no zip")
    with pytest.raises(InvalidArgumentError, match="download it again"):
        gather([broken])
    with pytest.raises(InvalidArgumentError, match="download it again"):
        gather([wheel(tmp_path, "reasoning_gym", {"empty": b""})])
