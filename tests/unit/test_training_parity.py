"""What is trained is what is served: the unrolled head against the drafter that reads its export, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from captured import write_captured
from tiny_models import make_tiny_llama
from torch import Tensor

from draft_svc.drafters import create_drafter
from draft_svc.server import DraftConfig
from draft_svc.training.config import FitConfig
from draft_svc.training.data import Batch, Corpus
from draft_svc.training.export import export
from draft_svc.training.fit import create_head
from draft_svc.training.replay import Anchor, Drafting, Replay
from draft_svc.training.shards import Manifest
from draft_svc.training.target import Target
from draft_svc.training.teacher import Teacher
from draft_svc.training.trainee import Objective, Trainee
from draft_svc.training.unroll import Step, unroll
from pilotfish.steps import ProposalKind

WORDS, LENGTH = 64, 4


@dataclass(frozen=True)
class Case:
    """A head to hold against its serving twin."""

    scheme: str
    norms: str = "all"
    layers: int = 1
    draft_vocab: int = WORDS


CASES = [
    Case("mtp"),
    Case("mtp", layers=2),
    Case("mtp", draft_vocab=40),
    Case("eagle"),
    Case("eagle3", draft_vocab=40),
    Case("eagle3", layers=2),
    Case("medusa"),
    Case("medusa", layers=2, draft_vocab=40),
    Case("distill"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Weights that bfloat16 holds exactly, since exports are written in it.
    folder = tmp_path_factory.mktemp("target")
    return make_tiny_llama(folder, layers=8, words=WORDS, sharpness=4.0, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return write_captured(tmp_path_factory.mktemp("captured"), model, documents=30)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, vars(case).values())))
@torch.no_grad()
def test_training_and_serving_say_the_same(case: Case, model: Path, data: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(data)
    target = Target.load(model, manifest, torch.float32)
    vocabulary = torch.arange(WORDS)[:: WORDS // case.draft_vocab or 1][: case.draft_vocab]
    trainee = make_trainee(case, target, vocabulary, model, data)
    export(tmp_path, trainee, vocabulary, target.config)
    documents = Corpus(data, trainee.head.features, Teacher(trainee.output.bfloat16(), manifest, data)).train[:5]
    settings = {"model": tmp_path, "target_model": model, "dtype": "float32", "pages": 32}
    drafter = create_drafter(DraftConfig.model_validate(settings))
    assert drafter.info.features == trainee.head.features
    columns = manifest.columns(trainee.head.features) if trainee.head.features else None
    replay = Replay(drafter, rows=3, pages_per_row=4, page_size=16, columns=columns)
    drafting = Drafting(LENGTH, 1, ProposalKind.SAMPLED, temperature=1.0, support_limit=WORDS)
    captured = {id(document.captured): i for i, document in enumerate(documents)}
    anchors = list(replay.anchors([document.captured for document in documents], drafting))
    assert len(anchors) > 20
    batch = Batch.of(documents, ahead=trainee.head.lead + LENGTH)
    served = {(captured[id(anchor.document)], anchor.position): anchor for anchor in anchors}
    trained = draft_in_training(trainee, target, batch, served)
    for key, anchor in served.items():
        for depth, (ids, q) in enumerate(anchor.supports):
            wanted = torch.zeros(WORDS)
            wanted[vocabulary] = trained[key][depth]
            got = torch.zeros(WORDS)
            got[torch.from_numpy(ids).long()] = torch.from_numpy(q)
            torch.testing.assert_close(got, wanted, rtol=0.0, atol=1e-4)


def make_trainee(case: Case, target: Target, vocabulary: Tensor, model: Path, data: Path) -> Trainee:
    """A head like one in the middle of its training, rounded to what its export holds."""
    config = FitConfig(
        scheme=case.scheme,
        data=data,
        target_model=model,
        out=data,
        layers=case.layers,
        norms=case.norms,
        draft_layers=(0, 3, 5),
        draft_vocab=case.draft_vocab,
        objective=Objective(steps=LENGTH),
    )
    torch.manual_seed(1)
    head = create_head(config, target.config)
    head.initialise(target.weights)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape) * (0.1 if parameter.dim() == 1 else 0.5 / parameter.shape[-1] ** 0.5)
        parameter.copy_((parameter + noise).bfloat16())
    return Trainee(head, target.embeddings, target.output(vocabulary), config.objective)


def draft_in_training(
    trainee: Trainee, target: Target, batch: Batch, served: dict[tuple[int, int], Anchor]
) -> dict[tuple[int, int], list[Tensor]]:
    """q of each draft step, by (row, tokens committed), when the unrolled head is fed the tokens that were served."""
    found: dict[tuple[int, int], list[Tensor]] = {key: [] for key in served}

    def fed(step: Step) -> Tensor:
        tokens = torch.zeros_like(step.slots)
        for (row, position), anchor in served.items():
            tokens[row, place(step, row, position)] = int(anchor.drafted[step.number])
        return tokens

    def place(step: Step, row: int, position: int) -> int:
        # The slot that predicts token `position` holds the state, or the token, that ends with the one before.
        (at,) = (step.slots[row] == position - 1 - trainee.head.lead).nonzero()
        return int(at)

    for step in unroll(trainee.head, target.embeddings, batch, LENGTH, fed):
        for (row, position), laws in found.items():
            laws.append(torch.softmax(step.outputs[row, place(step, row, position)] @ trainee.output.T, -1))
    return found
