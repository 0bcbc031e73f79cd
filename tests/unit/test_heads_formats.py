"""What is read off the folders of heads without torch, and what is refused, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import FORMATS, HIDDEN, LLAMA, Written
from tiny_models import make_tiny_llama

from draft_svc.drafters import create_drafter
from draft_svc.drafters.checkpoint import Checkpoint
from draft_svc.drafters.head_spec import Switches
from draft_svc.drafters.kinds import describe, kind_of, wanted_features
from draft_svc.server import DraftConfig
from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.runtime.loading import load_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "target")


@pytest.mark.parametrize("name", FORMATS)
def test_the_kind_and_the_features_are_found(name: str, target_folder: Path, tmp_path: Path) -> None:
    written = FORMATS[name]
    folder = written.write(tmp_path)
    assert kind_of(Checkpoint.read(folder)) == written.kind
    assert wanted_features(folder, target_folder) == written.features
    spec = describe(folder, target_folder)
    assert spec is not None
    assert spec.feature_width == written.width
    assert spec.feedback == ("post_norm" if written.post_norm and written.name != "own-no-norms" else spec.feedback)


def test_a_model_is_no_head(target_folder: Path) -> None:
    assert kind_of(Checkpoint.read(target_folder)) == "model"
    assert wanted_features(target_folder, None) == ()


def test_features_are_known_without_torch(target_folder: Path, tmp_path: Path) -> None:
    folder = FORMATS["eagle-bin"].write(tmp_path)
    script = (
        "import sys; from pathlib import Path; from draft_svc.drafters.kinds import wanted_features\n"
        f"print(wanted_features(Path({str(folder)!r}), Path({str(target_folder)!r})), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "('final',) False\n"


@pytest.mark.parametrize("name", ["eagle", "eagle-bin", "eagle3"])
def test_both_kinds_of_files_tell_the_same_shapes(name: str, tmp_path: Path) -> None:
    written = FORMATS[name]
    shapes = Checkpoint.read(written.write(tmp_path)).shapes
    assert shapes == {name: tuple(tensor.shape) for name, tensor in written.weights().items()}


def test_nothing_that_a_pickle_names_is_called(tmp_path: Path) -> None:
    """The outline of a hostile file is read as if it held no tensors."""

    class Hostile:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "touched"), "w")

    torch.save({"fc.weight": torch.zeros(2, 3), "evil": Hostile()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    assert Checkpoint.read(tmp_path).shapes == {"fc.weight": (2, 3)}
    assert not (tmp_path / "touched").exists()


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFoundError, match=r"no file ends in \.safetensors, \.bin, \.pt"):
        Checkpoint.read(tmp_path)
    (tmp_path / "head.pt").write_bytes(b"PK")
    with pytest.raises(InvalidArgumentError, match=r"head\.pt is no file of torch\.save"):
        Checkpoint.read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors cannot be read"):
        Checkpoint.read(tmp_path)


# Which of the target's states.


@pytest.mark.parametrize(
    ("config", "switches", "features"),
    [
        ({}, Switches(), (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}, Switches(), (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, Switches(), (2, 15, 27)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [24, 30, 29]}}, Switches(), (24, 30, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}, Switches(aux_layers=(1, 14, 26)), (1, 14, 26)),
    ],
)
def test_layer_numbers_of_both_conventions(
    config: dict[str, Any], switches: Switches, features: tuple[int, ...], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 30}))
    written = FORMATS["eagle3"]
    plain = {key: value for key, value in written.config.items() if key != "eagle_config"}
    folder = replace(written, config=plain | config).write(tmp_path / "head")
    assert wanted_features(folder, target, switches) == tuple(f"hidden.{k}" for k in features)


@pytest.mark.parametrize(
    ("stored", "switch", "features"),
    [
        (None, None, "final"),
        ("pre_norm", None, "hidden.2"),
        ("pre_norm", "post_norm", "final"),
        (None, "pre_norm", "hidden.2"),
    ],
)
def test_a_flag_wins_over_the_file(
    stored: str | None, switch: str | None, features: str, target_folder: Path, tmp_path: Path
) -> None:
    written = FORMATS["own"]
    folder = replace(written, config=written.config | {"h_source": stored}).write(tmp_path)
    assert wanted_features(folder, target_folder, Switches(h_source=switch)) == (features,)


def test_feedback_follows_flag_file_and_family(target_folder: Path, tmp_path: Path) -> None:
    def feedback(written: Written, **given: Any) -> str:
        spec = describe(written.write(tmp_path), target_folder, Switches(**given))
        assert spec is not None
        return spec.feedback

    own, eagle3 = FORMATS["own"], FORMATS["eagle3"]
    assert feedback(own) == "post_norm"
    assert feedback(replace(own, config=own.config | {"feedback": "pre_norm"})) == "pre_norm"
    assert feedback(own, feedback="pre_norm") == "pre_norm"
    assert feedback(replace(eagle3, config=eagle3.config | {"norm_output": True})) == "pre_norm"
    assert feedback(eagle3, feedback="post_norm") == "post_norm"
    for path in tmp_path.iterdir():
        path.unlink()
    assert feedback(FORMATS["speculators-eagle3"]) == "post_norm"


# What is refused.


def with_config(name: str, **config: Any) -> Written:
    return replace(FORMATS[name], config=FORMATS[name].config | config)


def with_shapes(name: str, **shapes: tuple[int, ...] | None) -> Written:
    """Other tensors: dots in names are written as two underscores; None takes one away."""
    changed = {key.replace("__", "."): shape for key, shape in shapes.items()}
    kept = {key: shape for key, shape in (FORMATS[name].shapes | changed).items() if shape is not None}
    return replace(FORMATS[name], shapes=kept)


REFUSED: list[tuple[str, Written, Switches]] = [
    (
        r"holds model\.layers\.0\.extra\.weight, which",
        with_shapes("own", model__layers__0__extra__weight=(4,)),
        Switches(),
    ),
    (
        r"lacks the state_norm of module 0; norms is 'all'",
        with_shapes("own", model__layers__0__hnorm__weight=None),
        Switches(),
    ),
    (
        r"num_nextn_predict_layers is 2 in config\.json, but the tensors have 1",
        with_config("own", num_nextn_predict_layers=2),
        Switches(),
    ),
    (
        r"verifier_accept_k is 3;",
        with_config("speculators-mtp", speculators_config={"proposal_methods": [{"verifier_accept_k": 3}]}),
        Switches(),
    ),
    (
        r"lacks model\.layers\.0\.mlp\.down_proj\.weight",
        with_shapes("own", model__layers__0__mlp__down_proj__weight=None),
        Switches(),
    ),
    (
        r"eh_proj\.weight has shape \(64, 64\); must be \(64, 128\)",
        with_shapes("own", model__layers__0__eh_proj__weight=(HIDDEN, HIDDEN)),
        Switches(),
    ),
    (r"norms is 'some' in config\.json; must be all or none", with_config("own", norms="some"), Switches()),
    (r"holds the embed_norm of module 0; norms is 'none'", with_config("own", norms="none"), Switches()),
    (r"h_source is 'final'; must be post_norm or pre_norm", with_config("own", h_source="final"), Switches()),
    (
        r"draft_vocab_size is 99 in config\.json, but the tensors have 280",
        with_config("own", draft_vocab_size=99),
        Switches(),
    ),
    (r"aux_layers is given, but MTP heads have no such choice", FORMATS["own"], Switches(aux_layers=(1, 2, 3))),
    (r"h_source is given, but EAGLE heads", FORMATS["eagle"], Switches(h_source="pre_norm")),
    (r"feedback is 'post_norm'; must be pre_norm", FORMATS["eagle"], Switches(feedback="post_norm")),
    (
        r"latent attention \(MLA\) is not built",
        with_shapes("deepseek-export", model__layers__0__self_attn__kv_a_proj_with_mqa__weight=(96, HIDDEN)),
        Switches(),
    ),
    (
        r"a mixture of experts is not built",
        with_shapes("deepseek-export", model__layers__0__mlp__gate__weight=(8, HIDDEN)),
        Switches(),
    ),
    (
        r"weight_scale_inv: FP8 weights are not read",
        with_shapes("deepseek-export", model__layers__0__eh_proj__weight_scale_inv=(1, 1)),
        Switches(),
    ),
    (
        r"q_proj\.weight has 128 rows; gated attention is not built",
        with_shapes("qwen", mtp__layers__0__self_attn__q_proj__weight=(128, HIDDEN)),
        Switches(),
    ),
    (r"partial_rotary_factor is not 1", with_config("qwen", partial_rotary_factor=0.25), Switches()),
    (r"hidden_act is 'gelu'", with_config("eagle", hidden_act="gelu"), Switches()),
    (r"sliding_window is 4096", with_config("eagle", sliding_window=4096), Switches()),
    (r"add_para_norm is True in config\.json, but", with_config("eagle", add_para_norm=True), Switches()),
    (r"layernorms is False in config\.json, but", with_config("speculators-hass", layernorms=False), Switches()),
    (
        r"holds layers\.0\.input_layernorm\.weight; EAGLE has none",
        with_shapes("eagle", layers__0__input_layernorm__weight=(HIDDEN,)),
        Switches(),
    ),
    (r"lacks fc\.weight", replace(with_shapes("eagle3", fc__weight=None), kind="eagle3"), Switches()),
    (r"lacks midlayer\.hidden_norm\.weight", with_shapes("eagle3", midlayer__hidden_norm__weight=None), Switches()),
    (r"fc_norm is True in config\.json, but its norm is not there", with_config("eagle3", fc_norm=True), Switches()),
    (
        r"norm_before_fc is False in config\.json, but its norm is there",
        with_config("speculators-eagle3", norm_before_fc=False),
        Switches(),
    ),
    (r"fc_norm\.\{0,1,2\} must be there all or none", with_shapes("eagle3", fc_norm__1__weight=(HIDDEN,)), Switches()),
    (r"norm_output is 'yes'; must be true or false", with_config("eagle3", norm_output="yes"), Switches()),
    (
        r"feedback is 'post_norm'; must be pre_norm",
        replace(with_shapes("eagle3", norm__weight=None), config=FORMATS["eagle3"].config | {"norm_output": False}),
        Switches(feedback="post_norm"),
    ),
    (r"aux_layers are \[1, 1, 2\]; must be 3 different", FORMATS["eagle3"], Switches(aux_layers=(1, 1, 2))),
    (
        r"fc\.weight has shape \(64, 192\); must be \(64, 96\)",
        with_config("eagle3", target_hidden_size=32),
        Switches(),
    ),
    (
        r"verifier_accept_k is 2; only the target's own token",
        with_config("speculators-eagle3", speculators_config={"proposal_methods": [{"verifier_accept_k": 2}]}),
        Switches(),
    ),
    (
        r"speculators_model_type is 'dflash'; known are",
        with_config("speculators-eagle3", speculators_model_type="dflash"),
        Switches(),
    ),
    (
        r"transformer_layer_config is missing",
        with_config("speculators-mtp", transformer_layer_config=None),
        Switches(),
    ),
]


@pytest.mark.parametrize(("message", "written", "switches"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_not_built_is_refused_by_name(
    message: str, written: Written, switches: Switches, target_folder: Path, tmp_path: Path
) -> None:
    kind = "eagle3" if "fc\\.weight" in message and "lacks" in message else "auto"
    with pytest.raises(InvalidArgumentError, match=message):
        describe(written.write(tmp_path), target_folder, switches, kind)


def changed(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Written:
    written = FORMATS[name]
    extra = {key: tensor.clone() for key, tensor in written.extra.items()}
    change(extra)
    return replace(written, extra=extra)


@pytest.mark.parametrize(
    ("message", "written"),
    [
        (r"d2t leads to ids outside", changed("eagle3", lambda w: w["d2t"].__setitem__(-1, 200))),
        (
            r"d2t leads to ids outside \[0, 280\) or to one twice",
            changed("eagle3", lambda w: w["d2t"].zero_().__setitem__(3, 1)),
        ),
        (r"d2t is stored as torch\.float32", changed("eagle3", lambda w: w.update(d2t=w["d2t"].float()))),
        (r"t2d and d2t name different tokens", changed("eagle3", lambda w: w["t2d"].logical_not_())),
    ],
)
def test_a_draft_vocabulary_that_contradicts_itself_is_refused(
    message: str, written: Written, target_folder: Path, tmp_path: Path
) -> None:
    config = DraftConfig(model=written.write(tmp_path), target_model=target_folder, device="cpu", pages=4)
    with pytest.raises(InvalidArgumentError, match=message):
        create_drafter(config)


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        (r"target_model is missing; .* holds no tokenizer\.json", {"target_model": None}),
        (r"layers is 1; a head runs whole", {"layers": 1}),
        (r"drafter is 'lookahead'; known are auto, eagle, eagle3, ", {"drafter": "lookahead"}),
        (r"aux_layers is '2;3'; must be numbers with commas", {"aux_layers": "2;3"}),
        (r"max_len is 4096; the model holds rows of 1 to 512", {"max_len": 4096}),
        (r"holds no projection of an MTP head", {"drafter": "mtp", "model": "eagle"}),
        (r"feedback is given, but a language model has no", {"drafter": "model", "feedback": "pre_norm"}),
        (r"tree_width is given, but a language model has no", {"drafter": "model", "tree_width": 4}),
        (r"tree_width is given, but the file of tree says", {"tree": "shape.json", "tree_width": 4}),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    message: str, settings: dict[str, Any], target_folder: Path, tmp_path: Path
) -> None:
    for name in ("own", "eagle"):
        FORMATS[name].write(tmp_path / name)
    chosen = settings | {"model": tmp_path / settings.get("model", "own")}
    config = DraftConfig(**({"target_model": target_folder, "device": "cpu", "pages": 4} | chosen))
    with pytest.raises(InvalidArgumentError, match=message):
        create_drafter(config)


def test_embeddings_of_another_width_are_refused(tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "wide", hidden_size=96)
    folder = FORMATS["eagle"].write(tmp_path / "head")
    config = DraftConfig(model=folder, target_model=target, device="cpu", pages=4)
    with pytest.raises(InvalidArgumentError, match=r"hidden_size is 64 in the head's config\.json and 96 in that of"):
        create_drafter(config)


def test_a_vocabulary_of_another_size_is_refused(target_folder: Path, tmp_path: Path) -> None:
    written = FORMATS["eagle"]
    folder = replace(written, config=written.config | {"vocab_size": 281}).write(tmp_path)
    config = DraftConfig(model=folder, target_model=target_folder, device="cpu", pages=4)
    with pytest.raises(InvalidArgumentError, match=r"vocab_size is 281 in the head's config\.json and 280 in that of"):
        create_drafter(config)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_in_anything_but_floats_are_refused(dtype: torch.dtype, target_folder: Path, tmp_path: Path) -> None:
    folder = FORMATS["eagle"].write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(dtype)}, folder / "model.safetensors")
    config = DraftConfig(model=folder, target_model=target_folder, device="cpu", pages=4)
    with pytest.raises(InvalidArgumentError, match=rf"fc\.weight is stored as {dtype}; weights must be floats"):
        create_drafter(config)


def test_a_tensor_stored_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = FORMATS["eagle"].write(tmp_path)
    save_file({"fc.weight": torch.zeros(1)}, folder / "more.safetensors")
    with pytest.raises(InvalidArgumentError, match=r"holds fc\.weight twice"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("name", "key"), [("deepseek-in-shards", "num_nextn_predict_layers"), ("qwen", "mtp_num_hidden_layers")]
)
def test_a_head_in_its_target_s_shards_hinders_neither(name: str, key: str, tmp_path: Path) -> None:
    """The target skips the tensors that config.json counts, the drafter those of the target."""
    folder = make_tiny_llama(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    head = {key: tensor for key, tensor in FORMATS[name].weights().items() if key not in tensors}
    save_file(tensors | head, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidArgumentError, match="unknown to LlamaForCausalLM"):
        load_model(folder, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 1}))
    assert load_model(folder, dtype="float32").config.layers == 2
    assert wanted_features(folder, None) == ("final",)
    drafter = create_drafter(DraftConfig(model=folder, device="cpu", pages=4))
    assert drafter.info.features == ("final",)
    as_model = create_drafter(DraftConfig(model=folder, device="cpu", pages=4, drafter="model"))
    assert as_model.info.features == ()
