"""``pilotfish check`` finds faults that are planted in real services, on the models of its own laboratory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from check_findings import failures, findings
from deployment import Deployment
from drafts import drafting
from planted_faults import FAULTS, Fault, nothing, only

from draft_svc.drafters.model import ModelDrafter
from pilotfish.check.results import EVERY_ANSWER
from pilotfish.check.tiny_models import write_models
from pilotfish.runtime.loading import LoadedModel, load_model

FALSE_ALARMS = 2e-5
"""Of the few tests here: as strict on each as a whole run, of some fifty times as many, is at its own rate."""


Laboratory = tuple[Path, LoadedModel, LoadedModel]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """Folder of the target, the target, the draft."""
    target, draft = write_models(tmp_path_factory.mktemp("laboratory"))
    return target, *(load_model(folder, dtype="float32") for folder in (target, draft))


@contextmanager
def serving(
    fault: Fault, laboratory: Laboratory, trees: tuple[Path, LoadedModel], scratch: Path
) -> Iterator[Deployment]:
    """The laboratory, or a head that grows trees."""
    if fault.has_trees:
        with drafting("own", *trees, scratch, draft_tree="12", max_rows=32) as deployment:
            yield deployment
        return
    folder, target, draft = laboratory
    drafter = ModelDrafter(draft, pages=256)
    wrapped = drafter if fault.drafter is None else fault.drafter(drafter)
    with Deployment(folder, target, (wrapped,), max_rows=32) as deployment:
        yield deployment


SOUND = [Fault(f"none, {check}", nothing, check, "") for check in sorted({fault.check for fault in FAULTS})]


@pytest.mark.slow
@pytest.mark.parametrize("fault", SOUND, ids=str)
def test_nothing_is_found_where_nothing_is_planted(
    fault: Fault, laboratory: Laboratory, folder: Path, target: LoadedModel, tmp_path: Path
) -> None:
    with serving(fault, laboratory, (folder, target), tmp_path) as deployment:
        results = findings(deployment, fault.check, plenty=fault.plenty, false_alarms=FALSE_ALARMS)
    assert [result for result in results if result.status == "failed"] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(
    fault: Fault,
    laboratory: Laboratory,
    folder: Path,
    target: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(fault, laboratory, (folder, target), tmp_path) as deployment:
        only(fault, monkeypatch)
        fault.plant(monkeypatch)
        asked = {"plenty": fault.plenty, "scale": fault.scale}
        results = findings(deployment, fault.check, **asked, false_alarms=FALSE_ALARMS)
        monkeypatch.undo()
    failed = [result.name for result in results if result.status == "failed" and result.check == fault.check]
    assert any(fault.result in name for name in failed), failed
    assert failures(results) <= {fault.check, EVERY_ANSWER}


def test_the_table_of_the_documentation_names_every_fault_and_what_finds_it() -> None:
    text = Path("docs/check.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \|$", text.partition("## Planted faults")[2], re.MULTILINE)
    assert rows == [(fault.name, fault.check) for fault in FAULTS]
