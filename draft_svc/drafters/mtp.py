"""Multi-token prediction heads (DeepSeek-V3, arXiv 2412.19437, section 2.2): which checkpoints are read.

Slot i holds (h_i, t_{i+1}) and predicts t_{i+2}; what is computed there, ``pair_head`` says. h_i is the
target's state behind its last norm (h_source post_norm) or before it (pre_norm); what the next draft step
takes for a state is the head's output behind its own last norm (feedback post_norm) or before it. Reports
differ on which is right for which model; a wrong choice loses acceptance and nothing else.

Formats, told apart by the names of their tensors:

- PilotfishMTP, our own: DeepSeek's names at index 0 with a dense layer of Llama's kind. config.json has
  ``"architectures": ["PilotfishMTP"]``, Llama's fields, of which ``num_hidden_layers`` counts the decoder
  layers of one module, ``num_nextn_predict_layers`` the modules (1 if absent), and optionally ``h_source``,
  ``feedback``, ``norms`` ("all" or "none") and ``draft_vocab_size``. Module m has

      model.layers.{m}.{enorm,hnorm}.weight [H]       absent with norms none
      model.layers.{m}.eh_proj.weight [H, 2H]         reads [embedding ; state]; a bias is taken if it is there
      model.layers.{m}.{input_layernorm,self_attn.*,post_attention_layernorm,mlp.*}.weight
      model.layers.{m}.layers.{i}.*                   decoder layers i = 1, 2, ... behind that one
      model.layers.{m}.shared_head.norm.weight [H]

  With norms none, input_layernorm (of the first layer) and shared_head.norm are absent too. A reduced
  vocabulary has ``d2t`` i64[Vd]: draft id i is token i + d2t[i]; the output layer then has those rows of the
  target's. ``embed_tokens.weight`` and ``lm_head.weight`` (of Vd rows) may be there, and win over the target's.
- DeepSeek-V3, R1 and GLM-4.5: the same names in the target's shards, at the index behind its last layer, or
  at index 0 in an export of the head alone. With latent attention or experts it is refused.
- Qwen3-Next, Qwen3.5: ``mtp.*`` in the target's shards, with norms that multiply by 1 + weight.
- speculators: ``mtp_layers.{m}.*`` beside ``transformer_layer_config`` in config.json.
- MiMo: ``model.mtp_layers.{m}.*`` in the target's shards; the projection reads [state ; embedding].
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from draft_svc.drafters.checkpoint import Checkpoint
from draft_svc.drafters.head_spec import Switches, Tensors, choose, layer_config, llama_fields, state_name
from draft_svc.drafters.pair_head import Layout, PairSpec, collect
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig

NORMS = ("post_norm", "pre_norm")
OWN = "PilotfishMTP"

_DEEPSEEK = Layout(
    projection="model.layers.{m}.eh_proj",
    layer="model.layers.{m}",
    further="model.layers.{m}.layers.{i}",
    embed_norm="model.layers.{m}.enorm",
    state_norm="model.layers.{m}.hnorm",
    output_norm="model.layers.{m}.shared_head.norm",
)
_QWEN = Layout(
    projection="mtp.fc",
    layer="mtp.layers.{i}",
    further="mtp.layers.{i}",
    embed_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    output_norm="mtp.norm",
    norms_plus_one=True,
)


def _layers_of_mtp(prefix: str, *, state_first: bool) -> Layout:
    return Layout(
        projection=f"{prefix}.input_proj",
        layer=prefix,
        further=f"{prefix}.layers.{{i}}",
        embed_norm=f"{prefix}.token_layernorm",
        state_norm=f"{prefix}.hidden_layernorm",
        output_norm=f"{prefix}.final_layernorm",
        state_first=state_first,
    )


_SPECULATORS = _layers_of_mtp("mtp_layers.{m}", state_first=False)
_MIMO = _layers_of_mtp("model.mtp_layers.{m}", state_first=True)


@dataclass(frozen=True, slots=True)
class _Format:
    """One of the formats above.

    Attributes:
        layout: its names.
        modules: finds the number of a module in the name of its projection.
        layers_key: of config.json: decoder layers of a module. None: one.
        in_shards: may lie among the target's own tensors.
    """

    layout: Layout
    modules: re.Pattern[str]
    layers_key: str | None
    in_shards: bool


_FORMATS = (
    _Format(_DEEPSEEK, re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight"), None, True),
    _Format(_QWEN, re.compile(r"mtp\.fc\.weight()"), "mtp_num_hidden_layers", True),
    _Format(_SPECULATORS, re.compile(r"mtp_layers\.(\d+)\.input_proj\.weight"), None, False),
    _Format(_MIMO, re.compile(r"model\.mtp_layers\.(\d+)\.input_proj\.weight"), None, True),
)


def is_mtp(checkpoint: Checkpoint) -> bool:
    """Whether the folder holds such a head."""
    return any(_modules(checkpoint, known) for known in _FORMATS)


def read(checkpoint: Checkpoint, target: ModelConfig | None, switches: Switches) -> PairSpec:
    """What head the folder holds.

    Args:
        checkpoint: of the folder.
        target: sizes of the target; None if its folder is not known.
        switches: what was said against config.json.

    Raises:
        InvalidArgumentError: if it is none of the formats, or asks for what is not built.
    """
    switches.refuse("MTP", "aux_layers")
    found = next((known for known in _FORMATS if _modules(checkpoint, known)), None)
    if found is None:
        raise InvalidArgumentError(f"{checkpoint.folder} holds no projection of an MTP head (eh_proj, mtp.fc, ...)")
    values, is_own = llama_fields(checkpoint.config), checkpoint.config.get("architectures") == [OWN]
    modules, tensors = _modules(checkpoint, found), Tensors(checkpoint)
    tensors.agree("num_nextn_predict_layers", len(modules))
    key = "num_hidden_layers" if is_own else found.layers_key
    layers = int(values.get(key, 1)) if key is not None else 1
    config = layer_config(checkpoint, values, found.layout.layer.format(m=modules[0], i=0), layers=layers)
    collect(tensors, found.layout, config, modules)
    _require_norms(checkpoint, tensors, len(modules), values.get("norms", "all") if is_own else "all")
    doubles = _vocabulary(tensors, config, modules)
    tensors.check({*doubles, *_of_the_target(checkpoint, found)})
    source = choose("h_source", switches.h_source, values.get("h_source"), "post_norm", NORMS)
    return PairSpec(
        features=(state_name(source, target),),
        target_hidden=config.hidden_size,
        config=config,
        modules=len(modules),
        names=tensors.names,
        shapes=tensors.shapes,
        layout=found.layout,
        feedback=choose("feedback", switches.feedback, values.get("feedback"), "post_norm", NORMS),
    )


def _modules(checkpoint: Checkpoint, known: _Format) -> list[int]:
    """Numbers of the modules, ascending."""
    matches = (known.modules.fullmatch(name) for name in checkpoint.shapes)
    return sorted(int(match[1] or 0) for match in matches if match is not None)


def _require_norms(checkpoint: Checkpoint, tensors: Tensors, modules: int, norms: object) -> None:
    if norms not in ("all", "none"):
        raise InvalidArgumentError(f"norms is {norms!r} in config.json; must be all or none")
    for m in range(modules):
        for name in ("embed_norm", "state_norm", "output_norm", "layers.0.input_layernorm"):
            if (f"{m}.{name}.weight" in tensors.names) != (norms == "all"):
                state = "lacks" if norms == "all" else "holds"
                raise InvalidArgumentError(f"{checkpoint.folder} {state} the {name} of module {m}; norms is {norms!r}")


def _vocabulary(tensors: Tensors, config: ModelConfig, modules: list[int]) -> set[str]:
    """Expects what the head brings of embeddings and output layer; returns names of more of the same."""
    embeddings = [*(f"model.layers.{m}.embed_tokens.weight" for m in modules), "model.embed_tokens.weight"]
    heads = [*(f"model.layers.{m}.shared_head.head.weight" for m in modules), "lm_head.weight"]
    embeddings.append("embed_tokens.weight")
    tensors.vocabulary(config.vocab_size, config.hidden_size, embeddings=embeddings, heads=heads)
    return {*embeddings, *heads}


def _of_the_target(checkpoint: Checkpoint, found: _Format) -> set[str]:
    """Tensors of the target that the head lies among: all but those of modules."""
    if not (found.in_shards and "model.norm.weight" in checkpoint.shapes):
        return set()
    own = {found.layout.layer, found.layout.projection.rpartition(".")[0]}
    prefixes = tuple(name.format(m=m, i=i) + "." for name in own for m in _modules(checkpoint, found) for i in range(8))
    return {name for name in checkpoint.shapes if not name.startswith(prefixes)}
