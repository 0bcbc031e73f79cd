"""The model card of a trained drafter: how it came about, and what it accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_svc.training.evaluate import Evaluation
from draft_svc.training.shards import Manifest
from pilotfish.errors import InvalidArgumentError

KINDS = {
    "model": "small draft model",
    "mtp": "multi-token-prediction head (DeepSeek-V3, arXiv 2412.19437)",
    "eagle": "EAGLE head (arXiv 2401.15077, 2406.16858)",
    "eagle3": "EAGLE-3 head (arXiv 2503.01840)",
    "medusa": "Medusa heads (arXiv 2401.10774)",
}


@dataclass(frozen=True, slots=True)
class Training:
    """What the log of a run says of its end."""

    steps: int
    visits: int
    """Answer tokens that were trained on; one counts each time it was seen."""
    seconds: float

    @classmethod
    def read(cls, log: Path) -> Training:
        """The last line of a ``log.jsonl``.

        Raises:
            InvalidArgumentError: if there is none.
        """
        try:
            last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
            return cls(last["step"], last["visits"], last["seconds"])
        except (OSError, ValueError, LookupError) as error:
            raise InvalidArgumentError(f"{log} is no log of `pilotfish train fit` ({error})") from error


def card(
    name: str,
    kind: str,
    config: Mapping[str, Any],
    size_bytes: int,
    manifest: Manifest,
    training: Training,
    found: Evaluation,
    license: str | None = None,
) -> str:
    """README.md of a drafter.

    Args:
        name: of its folder.
        kind: one of ``KINDS``.
        config: its config.json.
        size_bytes: of its tensors.
        manifest: of the text that it was trained and judged on.
        training: how long.
        found: on documents that it was not trained on.
        license: of the head; None if its maker does not say.
    """
    sections = [
        f"# {name}: {KINDS[kind]} for {manifest.model_id}",
        "Made with Pilotfish. It proposes tokens that the target checks, so that it changes no text, only how soon it "
        f"is there. {_about(config, size_bytes)}",
        f"    pilotfish up --target {manifest.model_id} --draft {name}",
        "## Data",
        _data(manifest),
        "## Training",
        _training(training),
        "## What it accepts",
        _acceptance(found),
        "## Limits",
        f"It fits {manifest.model_id} alone, with the weights `{manifest.weights_hash[:16]}…`, and drafts best for "
        "what that model answers in its chat template.",
    ]
    if license is not None:
        sections += ["## Licence", license]
    return "\n\n".join(sections) + "\n"


def _about(config: Mapping[str, Any], size_bytes: int) -> str:
    parts = [f"{size_bytes / 1e6:.1f} MB in bfloat16"]
    if layers := config.get("num_hidden_layers"):
        parts.append(f"{layers} layer{'s' if layers > 1 else ''} of {config['hidden_size']}")
    if vocabulary := config.get("draft_vocab_size"):
        parts.append(f"drafts {vocabulary} of {config['vocab_size']} tokens")
    return ", ".join(parts) + "."


def _data(manifest: Manifest) -> str:
    recipe = manifest.recipe
    lines = [
        f"{manifest.documents} answers of {manifest.model_id} itself, {manifest.answer_tokens} tokens, with its hidden "
        f"states as the serving runtime computes them in {manifest.dtype}."
    ]
    if "ask_itself" in recipe:
        lines.append(
            f"{recipe['ask_itself']:.0%} of the questions are the model's own (Magpie, arXiv 2406.08464), the others "
            f"come from {recipe['prompts']} prompts; temperatures {_shares(recipe['temperatures'])}; answers of at "
            f"most {recipe['max_tokens']} tokens. One document in twenty was held out."
        )
    return " ".join(lines)


def _training(training: Training) -> str:
    minutes = training.seconds / 60
    return f"{training.steps} steps, {training.visits} visits of answer tokens, {minutes:.0f} minutes."


def _acceptance(found: Evaluation) -> str:
    """Of the documents held out, through the serving drafter."""
    rows = [
        "| draft step | accepted, greedy | expected, temperature 1 | loss | top-5 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for step in range(max(len(found.greedy), len(found.sampled))):
        greedy = f"{found.greedy[step].accepted:.2f}" if step < len(found.greedy) else "–"
        sampled = ["–", "–", "–"]
        if step < len(found.sampled):
            one = found.sampled[step]
            sampled = [f"{one.expected_acceptance:.2f}", f"{one.loss:.2f}", f"{one.top5:.2f}"]
        rows.append(f"| {step + 1} | {greedy} | {' | '.join(sampled)} |")
    rounds = [
        f"{value:.2f} {what}"
        for value, what in (
            (found.greedy_tokens_per_round, "greedily"),
            (found.expected_tokens_per_round, "expected at temperature 1"),
        )
        if value is not None
    ]
    about = (
        f"On {found.documents} documents held out, of draft tokens whose earlier ones in the chain were accepted: "
        f"tokens per round {', '.join(rounds)}."
    )
    return f"{about}\n\n" + "\n".join(rows)


def _shares(temperatures: list[float]) -> str:
    """Such as 0 (50 %), 1 (50 %)."""
    count = len(temperatures)
    return ", ".join(f"{each:g} ({temperatures.count(each) / count:.0%})" for each in dict.fromkeys(temperatures))
