"""An evaluation harness asks the server what it asks of any: EleutherAI's lm-eval, by its model `local-completions`.

    pip install 'pilotfish[eval]'

Its tasks are local ones, of data that are written here, so that it needs no network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deployment import Deployment
from http_api import MODEL, url
from tiny_models import greedy_texts, load_reference
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pilotfish[eval]"),
]

DOCS = [
    {"question": "the cat and the", "choices": [" hat", " rat was on it", " sea"], "answer": 0},
    {"question": "an otter is on the", "choices": [" ice", " other side", " sea"], "answer": 2},
]
MOST_TOKENS = 12
TASKS: dict[str, dict[str, Any]] = {
    "choose": {"output_type": "multiple_choice", "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}]},
    "write": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": MOST_TOKENS, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def evaluate(folder: Path, model: Path, base_url: str) -> dict[str, list[Any]]:
    """What lm-eval logs of each document, by task, in the documents' order."""
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "target_delimiter": "",
            "doc_to_target": "answer" if name == "choose" else "{{choices[answer]}}",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | task))
    args = {
        "model": MODEL,
        "base_url": f"{base_url}/v1/completions",
        "tokenizer": model,
        "max_length": 512,
        "num_concurrent": 2,
    }
    command = [sys.executable, "-W", "ignore", "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in args.items())]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder)]
    command += ["--output_path", str(folder / "results"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for name in TASKS:
        [log] = (folder / "results").rglob(f"samples_{name}_*.jsonl")
        samples = [json.loads(line) for line in log.read_text().splitlines()]
        found[name] = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    return found


def test_a_harness_scores_and_generates(deployment: Deployment, tiny_folder: Path, tmp_path: Path) -> None:
    """Its scores are sums of Hugging Face's log probabilities, and its texts Hugging Face's greedy ones."""
    found = evaluate(tmp_path, tiny_folder, url(deployment))
    tokenizer, reference = AutoTokenizer.from_pretrained(tiny_folder), load_reference(tiny_folder)
    for doc, sample in zip(DOCS, found["choose"], strict=True):
        question, choices = str(doc["question"]), list(doc["choices"])  # type: ignore[call-overload]
        begin = len(tokenizer(question)["input_ids"])
        scores = [float(score) for ((score, _),) in sample["resps"]]
        for choice, score in zip(choices, scores, strict=True):
            ids = tokenizer(question + choice)["input_ids"]
            with torch.inference_mode():
                law = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(law[place - 1, ids[place]]) for place in range(begin, len(ids)))
            assert score == pytest.approx(expected, abs=1e-3)
        assert sample["acc"] == float(scores.index(max(scores)) == doc["answer"])
    texts = greedy_texts(tiny_folder, [str(doc["question"]) for doc in DOCS], MOST_TOKENS)
    for doc, sample in zip(DOCS, found["write"], strict=True):
        whole = tokenizer.decode(texts[str(doc["question"])], skip_special_tokens=True)
        assert sample["resps"] == [[whole.partition("\n\n")[0]]]
