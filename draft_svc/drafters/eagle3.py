"""EAGLE-3 heads (arXiv 2503.01840, section 3): three states of the target, a vocabulary of their own.

    f = fc([a_i ; b_i ; c_i])              states of the target's residual stream after three of its layers
    e = input_layernorm(embed(t_{i+1}))
    u = hidden_norm(f)
    out = layer([e ; u] into the attention, residual f)
    logits = lm_head(norm(out)), of t_{i+2}; draft id j is token j + d2t[j]

Later draft steps put ``out`` in the place of f. Switches of config.json: ``norm_before_residual`` (the residual
is u), ``fc_norm`` (an RMS norm for each state before fc), ``norm_before_fc`` (one over all three, input_norm),
``norm_output``. The last means two things: where speculators wrote the file, that later steps get norm(out);
elsewhere (SpecForge), that there is a norm before lm_head at all. ``feedback`` overrides what later steps get.

Formats: official, SpecForge and SGLang (``midlayer.*`` or ``layers.0.*``), speculators (``layers.0.*``, Llama's
fields in ``transformer_layer_config``). Layers behind the first are ordinary ones, layers.1 and so on.

Which states: ``eagle_aux_hidden_state_layer_ids``, either beside or in ``eagle_config``; absent means after 2,
N // 2 and N - 3 of N layers. Some tools count the layer whose output it is and some the layer before which it
is taken; the former write 1 first, so then 1 is added to all. ``aux_layers`` overrides that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draft_svc.drafters.checkpoint import Checkpoint
from draft_svc.drafters.head_spec import HeadSpec, Switches, Tensors, choose, layer_config, llama_fields, require_target
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from draft_svc.drafters.heads import Parts
    from pilotfish.runtime.models.layers import Layers

STATES = 3
_AUX = "eagle_aux_hidden_state_layer_ids"
_EMBEDDINGS = ("embed_tokens.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class Eagle3Spec(HeadSpec):
    """A head of this kind.

    Attributes:
        norm_before_residual: the first layer's residual is behind hidden_norm.
        norm_logits: there is a norm before lm_head.
        feedback: post_norm or pre_norm.
    """

    norm_before_residual: bool
    norm_logits: bool
    feedback: str

    def build(self, parts: Parts) -> Eagle3Head:
        """The head, from its weights."""
        return Eagle3Head(self, parts)


def read(checkpoint: Checkpoint, target: ModelConfig | None, switches: Switches) -> Eagle3Spec:
    """What head the folder holds; see ``mtp.read``."""
    switches.refuse("EAGLE-3", "h_source")
    is_speculators = checkpoint.config.get("speculators_model_type") is not None
    values = llama_fields(checkpoint.config)
    first = "midlayer" if "midlayer.self_attn.q_proj.weight" in checkpoint.shapes else "layers.0"
    config = layer_config(checkpoint, values, first, layers=_layer_count(checkpoint))
    hidden = config.hidden_size
    tensors = Tensors(checkpoint)
    states_width = tensors.shape("fc.weight")[-1]
    target_hidden = int(checkpoint.config.get("target_hidden_size") or states_width // STATES)
    tensors.need("fc.weight", "fc.weight", (hidden, STATES * target_hidden))
    _take_norms(tensors, checkpoint.config, target_hidden)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors.layer("0.layers.0", first, config, norms=norms, wide=True)
    for i in range(1, config.layers):
        plain = ("input_layernorm", "post_attention_layernorm")
        tensors.layer(f"0.layers.{i}", f"layers.{i}", config, norms=plain)
    norm_output = _flag(checkpoint.config, "norm_output")
    norm_logits = is_speculators or norm_output is not False
    if norm_logits or tensors.stored("norm.weight"):
        tensors.need("norm.weight", "norm.weight", (hidden,))
    tensors.vocabulary(config.vocab_size, hidden, embeddings=_EMBEDDINGS, heads=["lm_head.weight"])
    tensors.check({*_EMBEDDINGS})
    options = ("post_norm", "pre_norm") if "norm.weight" in tensors.names else ("pre_norm",)
    default = "post_norm" if is_speculators and norm_output else "pre_norm"
    return Eagle3Spec(
        features=tuple(f"hidden.{k}" for k in _aux_layers(checkpoint.config, target, switches)),
        target_hidden=target_hidden,
        config=config,
        modules=1,
        names=tensors.names,
        shapes=tensors.shapes,
        norm_before_residual=bool(_flag(checkpoint.config, "norm_before_residual")),
        norm_logits=norm_logits,
        feedback=choose("feedback", switches.feedback, None, default, options),
    )


class Eagle3Head:
    """See the module, and ``heads.Head``."""

    def __init__(self, spec: Eagle3Spec, parts: Parts) -> None:
        kernels, eps = parts.kernels, spec.config.rms_eps
        self.token_ids, self.embed = parts.token_ids, parts.embedding()
        self._post_norm = spec.feedback == "post_norm"
        norms = [parts.pop("input_norm.weight")]
        if spec.has("fc_norm.0.weight"):
            norms = [parts.pop(f"fc_norm.{i}.weight") for i in range(STATES)]
        self._states = len(norms)
        self._fc = kernels.projection(parts.take("fc.weight"), None, norms, eps)
        self._residual_norm = parts.pop("0.layers.0.hidden_norm.weight") if spec.norm_before_residual else None
        self._eps = eps
        self.layers: Sequence[Layers] = [parts.layers(0)]
        norm = parts.pop("norm.weight")
        (self._head,) = parts.output_heads([norm if spec.norm_logits else None])
        self._norm = norm

    def inputs(self, module: int, embeddings: Tensor, states: Tensor, *, is_own: bool) -> tuple[Tensor, Tensor]:
        x = states if is_own else self._fc(*states.chunk(self._states, dim=-1))
        if self._residual_norm is not None:
            x = _rms_norm(x, self._residual_norm, self._eps)
        return x, embeddings

    def state(self, module: int, out: Tensor) -> Tensor:
        return _rms_norm(out, self._norm, self._eps) if self._post_norm else out

    def logits(self, module: int, out: Tensor) -> Tensor:
        return self._head.logits(out)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    from pilotfish.runtime.models.layers import rms_norm  # torch comes with it, and reading a spec needs none

    assert weight is not None
    return rms_norm(x, weight, eps)


def _layer_count(checkpoint: Checkpoint) -> int:
    """By the tensors: config files of one layer are known to say otherwise."""
    count = 1
    while f"layers.{count}.self_attn.q_proj.weight" in checkpoint.shapes:
        count += 1
    return count


def _take_norms(tensors: Tensors, config: Mapping[str, Any], width: int) -> None:
    """The norms before fc; a switch that contradicts the tensors is refused."""
    separate = [tensors.take(f"fc_norm.{i}.weight", [f"fc_norm.{i}.weight"], (width,)) for i in range(STATES)]
    joint = tensors.take("input_norm.weight", ["input_norm.weight"], (STATES * width,))
    if any(separate) and (joint or not all(separate)):
        raise InvalidArgumentError("fc_norm.{0,1,2} must be there all or none, and not beside input_norm")
    for switch, found in (("fc_norm", all(separate)), ("norm_before_fc", joint)):
        if (said := _flag(config, switch)) is not None and said != found:
            raise InvalidArgumentError(
                f"{switch} is {said} in config.json, but its norm is {'' if found else 'not '}there"
            )


def default_layers(layers: int) -> tuple[int, int, int]:
    """After how many of a target's layers its states are taken where nobody says otherwise."""
    return 2, layers // 2, layers - 3


def _aux_layers(config: Mapping[str, Any], target: ModelConfig | None, switches: Switches) -> tuple[int, ...]:
    """After how many layers of the target each state is taken."""
    if switches.aux_layers is not None:
        ids: Sequence[int] = switches.aux_layers
    else:
        nested = config.get("eagle_config") or {}
        given = config.get(_AUX) if config.get(_AUX) is not None else nested.get(_AUX)
        if given is None:
            layers = require_target(target, "a head whose config.json does not name its layers").layers
            given = list(default_layers(layers))
        if nested.get("use_aux_hidden_state") is False:
            raise InvalidArgumentError("use_aux_hidden_state is false; only heads on three states are built")
        if not isinstance(given, list) or not all(isinstance(k, int) for k in given):
            raise InvalidArgumentError(f"{_AUX} is {given!r}; must be {STATES} layer numbers")
        ids = [k + 1 for k in given] if given[:1] == [1] else given
    if len(ids) != STATES or len(set(ids)) < STATES or min(ids) < 0:
        raise InvalidArgumentError(
            f"aux_layers are {list(ids)}; must be {STATES} different layer numbers of at least 0"
        )
    return tuple(ids)


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r}; must be true or false")
    return value
