"""Medusa heads in every published format, against their definition written down plainly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows import Row, ints, sampling_rows, token_rows
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_llama
from torch import Tensor
from torch.nn import functional

from draft_svc.drafters import Drafter, Proposals, create_drafter
from draft_svc.drafters.kinds import wanted_features
from draft_svc.server import DraftConfig
from pilotfish import noise
from pilotfish.errors import InvalidArgumentError
from pilotfish.noise import Purpose
from pilotfish.runtime.tensors import to_wire
from pilotfish.steps import DraftStep, ProposalKind

HIDDEN, VOCAB, HEADS, BLOCKS = 64, 280, 3, 2
GREEDY, SAMPLED, MATCHED = ProposalKind.GREEDY, ProposalKind.SAMPLED, ProposalKind.MATCHED
TEMPERATURE, SEED, ROUND, LIMIT = 0.8, 40, 3, 7
LENGTH = 9  # committed tokens of the row that is drafted for
KEPT = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:100]

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "target")


def blocks(stored: str, bias: bool = True) -> Tensors:
    """Residual blocks under names like ``{j}.{l}.linear``."""
    generator = torch.Generator().manual_seed(1)
    tensors: Tensors = {}
    for j in range(HEADS):
        for layer in range(BLOCKS):
            name = stored.format(j=j, l=layer)
            tensors[f"{name}.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
            if bias:
                tensors[f"{name}.bias"] = torch.randn(HIDDEN, generator=generator)
    return tensors


def outputs(stored: str, rows: int = VOCAB) -> Tensors:
    generator = torch.Generator().manual_seed(4)
    return {stored.format(j=j): torch.randn(rows, HIDDEN, generator=generator) / 4 for j in range(HEADS)}


OFFICIAL = blocks("{j}.{l}.linear") | outputs(f"{{j}}.{BLOCKS}.weight")
VLLM = blocks("blocks.{j}.layers.{l}", bias=False)
FORMATS: dict[str, tuple[dict[str, Any], Tensors]] = {
    # Published configurations name too few heads.
    "official": ({"medusa_num_heads": 2, "medusa_num_layers": 1}, OFFICIAL),
    "vllm": ({"num_heads": HEADS}, VLLM | outputs("lm_heads.{j}.weight")),
    "vllm-prefix-bias": (
        {"medusa_fc_bias": True},
        blocks("medusa_heads.blocks.{j}.layers.{l}") | outputs("medusa_heads.lm_heads.{j}.weight"),
    ),
    "vllm-reduced": (
        {"truncated_vocab_size": 100},
        VLLM | outputs("lm_heads.{j}.weight", 100) | {"token_map": KEPT},
    ),
    "vllm-reduced-whole-rows": (
        {"truncated_vocab_size": 100},
        VLLM | outputs("lm_heads.{j}.weight") | {"token_map": KEPT},
    ),
    "vllm-shared": (
        {"original_lm_head": True},
        VLLM | {"lm_heads.0.weight": outputs("{j}")["0"]},
    ),
    "vllm-of-target": ({"original_lm_head": True}, VLLM | {"token_map": KEPT}),
}


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "medusa_lm_head.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def load(folder: Path, target: Path, **settings: Any) -> Drafter:
    defaults = {"model": folder, "target_model": target, "pages": 8, "device": "cpu", "dtype": "float32"}
    return create_drafter(DraftConfig(**(defaults | settings)))


def reference(tensors: Tensors, target: Path, j: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Logits f64[columns] of head j, and the tokens of the columns."""
    named = {name.removeprefix("medusa_heads.").removeprefix("medusa_head."): t for name, t in tensors.items()}
    x = state.double()
    for layer in range(BLOCKS):
        name = next(n for n in (f"{j}.{layer}.linear", f"blocks.{j}.layers.{layer}") if f"{n}.weight" in named)
        bias = named.get(f"{name}.bias")
        linear = named[f"{name}.weight"].double() @ x + (0 if bias is None else bias.double())
        x = x + functional.silu(linear)
    candidates = (f"{j}.{BLOCKS}.weight", f"lm_heads.{j}.weight", "lm_heads.0.weight")
    matrix = next((named[n] for n in candidates if n in named), None)
    if matrix is None:
        matrix = load_file(target / "model.safetensors")["lm_head.weight"]
    ids = named.get("token_map", torch.arange(VOCAB))
    if len(matrix) != len(ids):
        matrix = matrix[ids]
    return matrix.double() @ x, ids


def step(kind: ProposalKind, states: Tensor, length: int, nodes: int | None = None) -> DraftStep:
    """One row of ``LENGTH`` tokens whose last slots are new."""
    new = len(states)
    return DraftStep(
        step_id=1,
        rows=token_rows(Row([5] * new, LENGTH - 1 - new, [3])),
        sampling=sampling_rows(1, temperature=TEMPERATURE, seed=SEED, round_index=ROUND),
        draft_lengths=ints(length),
        node_limits=ints() if nodes is None else ints(nodes),
        proposal_kinds=np.array([kind], np.uint8),
        support_limit=LIMIT,
        features=to_wire(states),
    )


def states(count: int = 3) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(8))


def wanted(kind: ProposalKind, logits: Tensor, ids: Tensor, position: int, count: int = 1) -> list[int]:
    """The best or first drawn children at a place."""
    q = (logits if kind is GREEDY else logits / TEMPERATURE).softmax(-1)
    columns = q.argsort(descending=True)[: LIMIT if kind is SAMPLED else len(q)].tolist()
    if kind is GREEDY:
        return ids[columns[:count]].tolist()
    purpose, number = (Purpose.MATCH, 0) if kind is MATCHED else (Purpose.DRAFT, ROUND)
    key = noise.key(SEED, purpose, number, position)
    u = noise.uniform(np.array([key]), ids[columns].numpy())
    order = np.argsort(-np.log(u) / q[columns].float().numpy(), kind="stable")
    return ids[columns][torch.from_numpy(order[:count])].tolist()


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("kind", [GREEDY, SAMPLED, MATCHED])
@pytest.mark.parametrize("name", FORMATS)
def test_a_chain_takes_one_token_from_each_head(
    name: str, kind: ProposalKind, kernels: str, target: Path, tmp_path: Path
) -> None:
    config, tensors = FORMATS[name]
    drafter = load(write(tmp_path / "heads", config, tensors), target, kernels=kernels)
    assert (drafter.info.features, drafter.info.feature_width) == (("final",), HIDDEN)
    found = drafter.propose(step(kind, states(), 2))
    expected = []
    for j in range(2):
        logits, ids = reference(tensors, target, j, states()[-1])
        expected += wanted(kind, logits, ids, LENGTH + j)
    assert found.token_ids.tolist() == expected
    assert len(found.parents) == 0
    assert found.supports.counts.tolist() == ([LIMIT, LIMIT, 0] if kind is SAMPLED else [])


def paths_of(found: Proposals) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.token_ids.tolist(), found.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@pytest.mark.parametrize("kind", [GREEDY, SAMPLED, MATCHED])
def test_a_tree_of_a_given_shape_has_the_ranks_of_each_head(kind: ProposalKind, target: Path, tmp_path: Path) -> None:
    shape = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 1, 0]]
    (tmp_path / "tree.json").write_text(json.dumps(shape))
    drafter = load(write(tmp_path / "heads", *FORMATS["official"]), target, tree=tmp_path / "tree.json")
    assert drafter.tree_width == 2
    found = paths_of(drafter.propose(step(kind, states(), 3, nodes=6)))
    assert [len(path) for path in found] == [1, 1, 2, 2, 2, 3]
    # Drawn children have noise of their own by their parent's slot: 2 a level, the first at LENGTH + 1.
    places = {(): LENGTH, (0,): LENGTH + 1, (1,): LENGTH + 2, (1, 1): LENGTH + 4}
    for path, ranks in zip(found, sorted(shape, key=lambda ranks: (len(ranks), ranks)), strict=True):
        token: list[int] = []
        for level, rank in enumerate(ranks):
            logits, ids = reference(OFFICIAL, target, level, states()[-1])
            position = places[tuple(ranks[:level])] if kind is SAMPLED else LENGTH + level
            token.append(wanted(kind, logits, ids, position, 2)[rank])
        assert path == tuple(token)


def test_without_a_shape_the_likeliest_nodes_are_taken(target: Path, tmp_path: Path) -> None:
    """Of all paths over the best eight tokens of each head, those of the highest product of chances."""
    drafter = load(write(tmp_path / "heads", *FORMATS["official"]), target)
    found = paths_of(drafter.propose(step(GREEDY, states(), 9, nodes=10)))
    levels = [reference(OFFICIAL, target, j, states()[-1])[0].log_softmax(-1) for j in range(HEADS)]
    best = [[((), 0.0)]]
    for scores in levels:
        ids = scores.argsort(descending=True)[:8].tolist()
        best.append([((*path, v), total + float(scores[v])) for path, total in best[-1] for v in ids])
    ranked = sorted((node for level in best[1:] for node in level), key=lambda node: -node[1])
    assert set(found) == {path for path, _ in ranked[:10]}


def test_no_proposal_is_longer_than_there_are_heads(target: Path, tmp_path: Path) -> None:
    drafter = load(write(tmp_path / "heads", *FORMATS["vllm"]), target)
    assert drafter.propose(step(GREEDY, states(), 7)).node_counts.tolist() == [HEADS]
    assert drafter.propose(step(GREEDY, states(), 0)).node_counts.tolist() == [0]


def test_rows_are_answered_each_from_its_own_end(target: Path, tmp_path: Path) -> None:
    drafter = load(write(tmp_path / "heads", *FORMATS["official"]), target)
    many = DraftStep(
        step_id=1,
        rows=token_rows(Row([5, 6], 0, [0]), Row([7], 3, [1]), Row([8, 9, 9], 1, [2])),
        sampling=sampling_rows(3, temperature=0.0),
        draft_lengths=ints(2, 0, 3),
        node_limits=ints(2, 0, 5),
        proposal_kinds=np.full(3, GREEDY, np.uint8),
        support_limit=LIMIT,
        features=to_wire(states(6)),
    )
    found = drafter.propose(many)
    assert found.node_counts.tolist() == [2, 0, 5]
    alone = drafter.propose(step(GREEDY, states(6)[:2], 2))
    assert found.token_ids[:2].tolist() == alone.token_ids.tolist()
    alone = drafter.propose(step(GREEDY, states(6)[3:], 3, nodes=5))
    assert found.token_ids[2:].tolist() == alone.token_ids.tolist()
    assert found.parents[2:].tolist() == alone.parents.tolist()


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "model.safetensors"])
def test_other_files_and_the_whole_models_own(file: str, target: Path, tmp_path: Path) -> None:
    """The authors' .pt, and heads among the tensors of their model, whose folder is the target's too."""
    folder, tensors = tmp_path / "heads", OFFICIAL
    if file == "model.safetensors":
        whole = load_file(target / file)
        tensors = {f"medusa_head.{name}": tensor for name, tensor in OFFICIAL.items()}
        write(folder, json.loads((target / "config.json").read_text()), whole | tensors, file)
        (folder / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
        drafter = load(folder, target, target_model=None)
    else:
        drafter = load(write(folder, {"medusa_num_heads": 5}, tensors, file), target)
    logits, _ = reference(tensors, target, 0, states()[-1])
    assert drafter.propose(step(GREEDY, states(), 1)).token_ids.tolist() == [int(logits.argmax())]
    assert wanted_features(folder, target) == ("final",)


def change(name: str, tensor: Tensor | None) -> Callable[[Tensors], Tensors]:
    def changed(tensors: Tensors) -> Tensors:
        return {n: t for n, t in tensors.items() if n != name} | ({} if tensor is None else {name: tensor})

    return changed


@pytest.mark.parametrize(
    ("name", "edit", "config", "fault"),
    [
        ("official", change("1.0.linear.bias", None), {}, r"lacks 1\.0\.linear\.bias"),
        ("official", change("2.2.weight", None), {}, r"lacks 2\.2\.weight"),
        ("official", change("3.2.weight", torch.zeros(VOCAB, HIDDEN)), {}, r"holds 3\.2\.weight"),
        ("official", change("0.2.weight", torch.zeros(VOCAB, 8)), {}, r"0\.2\.weight has shape \(280, 8\); must be"),
        ("vllm", change("blocks.0.layers.0.bias", torch.zeros(HIDDEN)), {}, r"lacks blocks\.0\.layers\.1\.bias"),
        ("vllm", change("lm_heads.2.weight", None), {}, r"lacks lm_heads\.2\.weight"),
        ("vllm", change("x", torch.zeros(1)), {"logit_scale": 0.5}, "logit_scale is 0.5; scaled logits are not built"),
        ("vllm-reduced", change("token_map", None), {}, "has 100 rows; must be 280"),
        ("vllm-reduced", change("x", None), {"truncated_vocab_size": 99}, "truncated_vocab_size is 99 in config.json"),
        ("vllm-reduced", change("token_map", torch.zeros(100).long()), {}, "token_map leads to ids outside"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    name: str, edit: Callable[[Tensors], Tensors], config: dict[str, Any], fault: str, target: Path, tmp_path: Path
) -> None:
    given, tensors = FORMATS[name]
    with pytest.raises(InvalidArgumentError, match=fault):
        load(write(tmp_path / "heads", given | config, edit(tensors)), target)


def test_switches_that_medusa_does_not_have_are_refused(target: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "heads", *FORMATS["official"])
    for setting in ({"h_source": "pre_norm"}, {"feedback": "post_norm"}, {"aux_layers": "1,2,3"}, {"layers": 1}):
        with pytest.raises(InvalidArgumentError, match=next(iter(setting))):
            load(folder, target, **setting)
    with pytest.raises(InvalidArgumentError, match="--target-model"):
        load(folder, target, target_model=None)
