"""One request at which a worker fails must not hurt another: real services, while other streams go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployment import Deployment, wait_until_idle
from safetensors.torch import load_file, save_file
from tiny_models import greedy_texts

from draft_svc.drafters import Proposals
from draft_svc.drafters.model import ModelDrafter
from pilotfish import Client, SamplingParams
from pilotfish.errors import InternalError, InvalidArgumentError, PilotfishError
from pilotfish.runtime.loading import LoadedModel, load_model
from pilotfish.steps import DraftStep, Grant, TargetResult, TargetStep
from target_svc.engine import TargetEngine

PROMPTS = ["The quick brown fox jumps over the lazy dog.", "a", "Once upon a time there was a small fish"]
TOKENS = 60
NAN_TOKEN = 3
POISON = 666
"""A seed; a request that names it is the poisonous one."""


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> dict[str, tuple[int, ...]]:
    return greedy_texts(tiny_folder, PROMPTS, TOKENS)


@contextmanager
def others_go_on(client: Client, reference: dict[str, tuple[int, ...]]) -> Iterator[None]:
    """Well-behaved requests run meanwhile, and end with the text that they have when they are alone."""
    params = SamplingParams(max_tokens=TOKENS)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(client.generate, prompt, params) for prompt in PROMPTS * 4]
        yield
        for prompt, answer in zip(PROMPTS * 4, asked, strict=True):
            assert answer.result().token_ids == reference[prompt]


class StrictTarget(TargetEngine):
    """Refuses, or dies of, rows with the seed ``POISON``."""

    error: PilotfishError = InvalidArgumentError("seeds[0] is 666; it is a planted one")

    def run(self, grant: Grant, step: TargetStep) -> TargetResult:
        if POISON in step.sampling.seeds:
            raise self.error
        return super().run(grant, step)


class DyingTarget(StrictTarget):
    error = InternalError("planted")


@pytest.mark.parametrize(
    ("engine", "error", "message", "losses"),
    [
        (StrictTarget, InvalidArgumentError, r"the target refuses this request: .*seeds\[0\] is 666", 0),
        (DyingTarget, InternalError, r"the target failed twice at this request.*planted", 2),
    ],
)
def test_a_request_that_the_target_fails_at_fails_alone(
    engine: type[TargetEngine],
    error: type[PilotfishError],
    message: str,
    losses: int,
    tiny_folder: Path,
    tiny_target: LoadedModel,
    tiny_draft: LoadedModel,
    reference: dict[str, tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    deployment = Deployment(tiny_folder, lambda: engine(tiny_target, pages=256), (tiny_draft,))
    with deployment, deployment.client() as client:
        with others_go_on(client, reference), pytest.raises(error, match=message):
            client.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=POISON, temperature=1))
        wait_until_idle(deployment)
    assert sum(record.getMessage().startswith("target ") for record in caplog.records) == losses


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_prompt_that_makes_the_model_answer_nan_fails_alone(
    kernels: str, tiny_folder: Path, tmp_path: Path, reference: dict[str, tuple[int, ...]]
) -> None:
    """What is not finite is left in no page: whoever has it next would read it."""
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    assert not any(NAN_TOKEN in token_ids for token_ids in reference.values())
    model = load_model(tmp_path, dtype="float32", kernels=kernels)
    with Deployment(tmp_path, model, (model,), pages=64) as deployment, deployment.client() as client:
        for prompt in ([5, 6, NAN_TOKEN], [NAN_TOKEN] * 40):
            with others_go_on(client, reference), pytest.raises(InternalError, match=r"failed twice.*not finite"):
                client.generate(prompt, SamplingParams(max_tokens=8))
        wait_until_idle(deployment)
        for prompt in PROMPTS:
            assert client.generate(prompt, SamplingParams(max_tokens=TOKENS)).token_ids == reference[prompt]


class PickyDrafter(ModelDrafter):
    """Dies of rows with the seed ``POISON``."""

    def propose(self, step: DraftStep) -> Proposals:
        if POISON in step.sampling.seeds:
            raise ZeroDivisionError("planted")
        return super().propose(step)


def test_a_request_that_drafts_fail_at_goes_on_without(
    tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]]
) -> None:
    picky = PickyDrafter(tiny_target, pages=256)
    with Deployment(tiny_folder, tiny_target, (picky,)) as deployment, deployment.client() as client:
        asked = SamplingParams(max_tokens=TOKENS, seed=POISON, ignore_eos=True, draft_length=2)
        with others_go_on(client, reference):
            completion = client.generate("something else altogether", asked)
        assert completion.usage.accepted == 0
        assert completion.usage.completion_tokens == TOKENS
        wait_until_idle(deployment)
        again = client.generate(PROMPTS[0], SamplingParams(max_tokens=TOKENS))
        assert again.usage.accepted > 0  # its replica is back for the others


SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
EDGES: dict[str, list[float]] = {
    "temperature": [SMALLEST, 1e-38, 3e38],
    "top_p": [SMALLEST, 1e-38, 1.0],
    "min_p": [0.0, SMALLEST, 1.0],
    "repetition_penalty": [SMALLEST, 1e-38, 3e38],
    "presence_penalty": [-2.0, SMALLEST, 2.0],
    "frequency_penalty": [-2.0, -SMALLEST, 2.0],
    "top_k": [0, 1, 2**31 - 1],
    "seed": [0, 2**63, 2**64 - 1],
    "min_tokens": [0, 8],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "draft_length": [0, 1, 64],
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_admission_takes_the_workers_take(
    temperature: float, tiny_folder: Path, tiny_target: LoadedModel, reference: dict[str, tuple[int, ...]], caplog: Any
) -> None:
    """Every field at its limits, while other streams go on: none is refused later than at admission."""
    with Deployment(tiny_folder, tiny_target, (tiny_target,)) as deployment, deployment.client() as client:
        for name, values in EDGES.items():
            with others_go_on(client, reference):
                for value in values:
                    fields: dict[str, Any] = {"max_tokens": 8, "temperature": temperature} | {name: value}
                    client.generate("something else", SamplingParams(**fields))
        wait_until_idle(deployment)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
