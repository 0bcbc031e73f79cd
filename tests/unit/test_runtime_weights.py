"""Checkpoints are read whole and exactly, or refused with the tensor or file at fault."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rows import Row, token_rows
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_llama
from torch import Tensor

from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.layer_shapes import expected_shapes
from pilotfish.runtime.loading import load_model, load_worker_model, resolve_device, resolve_dtype
from pilotfish.runtime.paged_model import PagedModel
from pilotfish.runtime.weights import load_weights, read_tensors, weights_hash
from target_svc.server import TargetConfig

CPU = torch.device("cpu")


def load(folder: Path, layers: int | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load_weights(folder, ModelConfig.from_folder(folder).with_layers(layers), dtype, CPU)


@pytest.fixture
def folder(tmp_path: Path, model_folder: Callable[..., Path]) -> Path:
    """A checkpoint of its own, to be spoilt."""
    return Path(shutil.copytree(model_folder(), tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_tensor_of_the_file_is_expected_and_read(family: str, model_folder: Callable[..., Path]) -> None:
    folder = model_folder(family)
    stored, read = load_file(folder / "model.safetensors"), load(folder)
    assert read.keys() == stored.keys() == expected_shapes(ModelConfig.from_folder(folder)).keys()
    assert all(torch.equal(read[name], stored[name]) for name in stored)


def test_shards_hold_what_the_single_file_holds(model_folder: Callable[..., Path]) -> None:
    single, sharded = model_folder(), model_folder(shards=3)
    assert len(list(sharded.glob("model-*.safetensors"))) >= 3
    whole, parts = load(single), load(sharded)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_become_the_dtype_asked_for(dtype: torch.dtype, model_folder: Callable[..., Path]) -> None:
    stored = load_file(model_folder(dtype=torch.bfloat16) / "model.safetensors")
    read = load(model_folder(dtype=torch.bfloat16), dtype=dtype)
    assert all(torch.equal(read[name], stored[name].to(dtype)) for name in stored)


def test_later_layers_are_known_but_not_read(model_folder: Callable[..., Path]) -> None:
    read = load(model_folder(), layers=1)
    assert not any(name.startswith("model.layers.1.") for name in read)
    assert any(name.startswith("model.layers.0.") for name in read)


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda t: (t.pop("model.norm.weight"), t.pop("lm_head.weight")))
    with pytest.raises(InvalidArgumentError, match=r"lacks lm_head\.weight, model\.norm\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "extra"])
def test_unknown_tensors_are_named(name: str, folder: Path) -> None:
    rewrite(folder, lambda t: t.update({name: torch.zeros(4)}))
    with pytest.raises(InvalidArgumentError, match=f"{name}, unknown to LlamaForCausalLM"):
        load(folder)


def test_wrong_shapes_are_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(InvalidArgumentError, match=r"model\.norm\.weight has shape \(63,\).*\(64,\)"):
        load(folder)


def test_quantised_tensors_are_refused(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(InvalidArgumentError, match=r"model\.norm\.weight is stored as I8"):
        load(folder)


def test_frequencies_that_old_llama_files_carry_are_skipped(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert load(folder).keys() == expected_shapes(ModelConfig.from_folder(folder)).keys()


@pytest.mark.parametrize("size", [0, 4, 100, 5000, -1])
def test_a_file_cut_short_is_named(size: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        InvalidArgumentError, match=r"model\.safetensors is corrupt or cut short.*fetch the model again"
    ):
        load(folder)
    with pytest.raises(InvalidArgumentError, match="corrupt"):
        weights_hash(folder)


def test_files_in_other_formats_are_not_taken_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(NotFoundError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_an_index_that_lies_is_refused(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    folder = Path(shutil.copytree(model_folder(shards=3), tmp_path / "model"))
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    name = "model.layers.0.input_layernorm.weight"
    file = good["weight_map"][name]

    def with_map(weight_map: object) -> None:
        index.write_text(json.dumps(good | {"weight_map": weight_map}))

    with_map({n: f for n, f in good["weight_map"].items() if n != name})
    with pytest.raises(InvalidArgumentError, match=f"disagree about {name}"):
        load(folder)
    with_map(good["weight_map"] | {name: "../other.safetensors"})
    with pytest.raises(InvalidArgumentError, match="same folder"):
        load(folder)
    with_map([name])
    with pytest.raises(InvalidArgumentError, match="no weight_map"):
        load(folder)
    with_map(good["weight_map"])
    (folder / file).unlink()
    with pytest.raises(NotFoundError, match=f"{file} does not exist"):
        load(folder)


def test_a_stored_head_of_a_tied_model_must_be_the_embeddings(
    tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    folder = Path(shutil.copytree(model_folder(tie_word_embeddings=True), tmp_path / "model"))
    assert "lm_head.weight" not in load(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load(folder)
    rewrite(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(InvalidArgumentError, match="tie_word_embeddings"):
        load(folder)


def test_the_hash_names_the_checkpoint(folder: Path, model_folder: Callable[..., Path]) -> None:
    original = weights_hash(folder)
    assert original == weights_hash(model_folder()) != weights_hash(model_folder(seed=1))
    assert len({original, weights_hash(folder, 1), weights_hash(folder, 2)}) == 3
    rewrite(folder, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    changed = weights_hash(folder)
    assert changed != original
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert weights_hash(folder) not in (original, changed)


def test_a_loaded_model_is_named_after_its_folder(model_folder: Callable[..., Path]) -> None:
    model = load_model(model_folder(), device="cpu")
    assert (model.model_id, model.decoder.dtype, model.tokenizer_vocab_size) == ("llama", torch.float32, 280)
    assert load_model(model_folder(), device="cpu", name="fish").model_id == "fish"
    assert load_model(model_folder(), device="cpu", layers=1).config.layers == 1


def test_devices_and_dtypes_are_refused_by_name() -> None:
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    with pytest.raises(InvalidArgumentError, match="int4"):
        resolve_dtype("int4", CPU)
    for name in ("tpu", "mps", "cuda:x", "cuda:99"):
        with pytest.raises(InvalidArgumentError, match=name):
            resolve_device(name)


@pytest.mark.parametrize("target_ties", [True, False])
@pytest.mark.parametrize("lacking", ["embeddings", "head", "both", "nothing"])
@pytest.mark.parametrize("draft_ties", [True, False])
def test_a_draft_model_borrows_what_it_lacks(
    lacking: str, target_ties: bool, draft_ties: bool, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    """It answers as a model that has the same tensors of its own."""
    names = {"embeddings": ["model.embed_tokens.weight"], "head": ["lm_head.weight"], "nothing": []}
    names["both"] = names["embeddings"] + names["head"]
    target = model_folder(tie_word_embeddings=target_ties, seed=5)
    lent = load_file(target / "model.safetensors")
    lent.setdefault("lm_head.weight", lent["model.embed_tokens.weight"])
    draft = Path(shutil.copytree(model_folder(tie_word_embeddings=draft_ties), tmp_path / "draft"))
    (draft / "tokenizer.json").unlink()
    rewrite(draft, lambda t: [t.pop(name, None) for name in names[lacking]])
    has_own_head = draft_ties and lacking in ("head", "nothing")
    whole = Path(shutil.copytree(model_folder(tie_word_embeddings=has_own_head), tmp_path / "whole"))
    own = load_file(model_folder(tie_word_embeddings=draft_ties) / "model.safetensors")
    if draft_ties and not has_own_head:
        own["lm_head.weight"] = lent["lm_head.weight"]
    taken = {name: lent[name].clone() for name in names[lacking] if not (has_own_head and name == "lm_head.weight")}
    save_file(own | taken, whole / "model.safetensors")

    batch = token_rows(Row(range(20, 30), 0, [0]))
    answers, loaded = [], []
    for folder, source in ((draft, target), (whole, None)):
        loaded.append(load_model(folder, device="cpu", embeddings_from=source))
        paged = PagedModel(loaded[-1], pages=1)
        with torch.inference_mode():
            answers.append(paged.logits(paged.extend(batch), torch.arange(10)))
    assert torch.equal(*answers)
    assert loaded[0].tokenizer_hash == loaded[1].tokenizer_hash
    if lacking in ("embeddings", "both"):
        assert loaded[0].config.tied_embeddings == (target_ties and (draft_ties or lacking == "both"))


def test_borrowed_embeddings_are_part_of_the_hash_and_must_fit(
    folder: Path, tmp_path: Path, model_folder: Callable[..., Path]
) -> None:
    whole = load_model(folder, device="cpu").weights_hash
    assert load_model(folder, device="cpu", embeddings_from=model_folder(seed=1)).weights_hash == whole
    rewrite(folder, lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(InvalidArgumentError, match=r"lacks model\.embed_tokens\.weight; a draft model"):
        load_model(folder, device="cpu")
    hashes = {
        load_model(folder, device="cpu", embeddings_from=model_folder(seed=seed)).weights_hash for seed in (1, 2, 2)
    }
    assert len(hashes | {whole}) == 3
    with pytest.raises(InvalidArgumentError, match=r"embed_tokens\.weight has shape \(280, 32\).*\(280, 64\)"):
        load_model(folder, device="cpu", embeddings_from=model_folder(hidden_size=32))


def test_single_tensors_are_read_from_any_shard(model_folder: Callable[..., Path]) -> None:
    folder = model_folder(shards=3)
    whole = load(folder)
    wanted = {name: tuple(whole[name].shape) for name in ("lm_head.weight", "model.norm.weight")}
    found = read_tensors(folder, wanted)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], whole[name]) for name in found)
    with pytest.raises(InvalidArgumentError, match="lacks nothing"):
        read_tensors(folder, {"nothing.weight": (1,)})


def test_loading_tells_how_far_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_llama(tmp_path, layers=3, seed=1)
    told: list[tuple[str, int, int]] = []
    model = load_model(folder, dtype="float32", device="cpu", progress=lambda *count: told.append(count))
    total = sum(4 * math.prod(shape) for shape in expected_shapes(model.config).values())
    for what in ("reading", "packing"):
        counts = [count for said, *count in told if said == what]
        assert counts[-1] == [total, total]
        assert counts == sorted(counts)
        assert len(counts) > 5
    load_worker_model(TargetConfig(model=folder, device="cpu", loading_lines=True), folder)
    lines = capfd.readouterr().out.splitlines()
    assert f"loading reading {total} {total}" in lines
    assert lines[-1] == f"loading packing {total} {total}"
