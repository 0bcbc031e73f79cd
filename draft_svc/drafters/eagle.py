"""EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077 and 2406.16858): which checkpoints are read.

The two have the same weights and differ by their trees. Slot i holds (h_i, t_{i+1}), h_i being the target's
state behind its last norm; the head's output is its guess of h_{i+1}: the target's lm_head reads it, and the
next draft step takes it for a state. What is computed between, ``pair_head`` says.

Formats:

- official: fc.weight [H, 2H], fc.bias if the head has one (whatever ``bias`` in config.json says), layers.0.*
  without input_layernorm, further layers with; embed_tokens.weight may be there.
- vLLM's variant of HASS with ``add_para_norm``: enorm and hnorm before fc.
- speculators (type "eagle"): fusion_fc.*, transformer.* for the layer, and with ``layernorms`` true
  embedding_layernorm before fc, input_layernorm in the layer and pre_lm_head_layernorm behind it.
"""

from __future__ import annotations

from draft_svc.drafters.checkpoint import Checkpoint
from draft_svc.drafters.head_spec import Switches, Tensors, choose, layer_config, llama_fields
from draft_svc.drafters.pair_head import Layout, PairSpec, collect
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig

_OFFICIAL = Layout(projection="fc", layer="layers.{i}", further="layers.{i}", embed_norm="enorm", state_norm="hnorm")
_SPECULATORS = Layout(
    projection="fusion_fc",
    layer="transformer",
    further="transformer.layers.{i}",
    embed_norm="embedding_layernorm",
    output_norm="pre_lm_head_layernorm",
)


def read(checkpoint: Checkpoint, target: ModelConfig | None, switches: Switches) -> PairSpec:
    """What head the folder holds; see ``mtp.read``."""
    switches.refuse("EAGLE", "h_source", "aux_layers")
    layout = _SPECULATORS if "fusion_fc.weight" in checkpoint.shapes else _OFFICIAL
    values = llama_fields(checkpoint.config)
    layers = 1 if layout is _SPECULATORS else int(values.get("num_hidden_layers", 1))
    config = layer_config(checkpoint, values, layout.layer.format(i=0), layers=layers)
    tensors = Tensors(checkpoint)
    collect(tensors, layout, config, [0])
    _require_norms(checkpoint, tensors, layout)
    embeddings, heads = ["embed_tokens.weight"], ["lm_head.weight"]
    tensors.vocabulary(config.vocab_size, config.hidden_size, embeddings=embeddings, heads=heads)
    tensors.check()
    has_norm = "0.output_norm.weight" in tensors.names
    options = ("post_norm", "pre_norm") if has_norm else ("pre_norm",)
    return PairSpec(
        features=("final",),
        target_hidden=config.hidden_size,
        config=config,
        modules=1,
        names=tensors.names,
        shapes=tensors.shapes,
        layout=layout,
        feedback=choose("feedback", switches.feedback, None, options[0], options),
    )


def _require_norms(checkpoint: Checkpoint, tensors: Tensors, layout: Layout) -> None:
    """The norms of a variant are all there or none; config.json must not say otherwise."""
    names = ["embed_norm", "layers.0.input_layernorm", "output_norm"]
    switch = "layernorms"
    if layout is _OFFICIAL:
        names, switch = ["embed_norm", "state_norm"], "add_para_norm"
        if "0.layers.0.input_layernorm.weight" in tensors.names:
            raise InvalidArgumentError(
                f"{checkpoint.folder} holds layers.0.input_layernorm.weight; EAGLE has none in its first layer"
            )
    present = [f"0.{name}.weight" in tensors.names for name in names]
    wanted = checkpoint.config.get(switch, present[0])
    if any(is_there != wanted for is_there in present):
        found = [name for name, is_there in zip(names, present, strict=True) if is_there]
        raise InvalidArgumentError(f"{switch} is {wanted} in config.json, but of {names} there are {found}")
