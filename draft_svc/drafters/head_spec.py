"""What the readers of every head format have in common. Imports no torch.

A reader takes a ``Checkpoint`` and says what head it holds: a ``HeadSpec``. It goes by the names and
shapes of the tensors first and by config.json second, because published files contradict themselves
there; what neither settles is a switch with a default. Tensors get names of ours:

    {m}.{name}                    of module m, such as 0.projection.weight
    {m}.layers.{i}.{name}         of its layers, with Hugging Face's names behind
    embed_tokens.weight, lm_head.weight, d2t, t2d
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from draft_svc.drafters.checkpoint import Checkpoint, Shape, require_tensors
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig
from pilotfish.runtime.layer_shapes import layer_shapes

EMBEDDINGS, HEAD, OFFSETS, MASK = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"


@dataclass(frozen=True, slots=True)
class Switches:
    """What a person may say against a checkpoint's config.json; None leaves it to the file."""

    h_source: str | None = None
    """post_norm or pre_norm: the target's state behind its last norm, or before."""
    feedback: str | None = None
    """post_norm or pre_norm: which of the head's own outputs the next draft step takes for a state."""
    aux_layers: tuple[int, ...] | None = None
    """EAGLE-3: after how many of the target's layers each state is taken."""

    def refuse(self, kind: str, *names: str) -> None:
        """Raises ``InvalidArgumentError`` if a switch was given that such heads do not have."""
        for name in names:
            if getattr(self, name) is not None:
                raise InvalidArgumentError(f"{name} is given, but {kind} heads have no such choice; leave it out")


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """One head, as far as it can be known without its weights.

    Attributes:
        features: states of the target that it reads, by the names of types.proto.
        target_hidden: width of one of them.
        config: of the layers of one module; ``vocab_size`` is the target's.
        modules: draft step j runs module j mod ``modules``.
        names: stored name of every tensor that is used, by its name here.
        shapes: shape of every one of them.
    """

    features: tuple[str, ...]
    target_hidden: int
    config: ModelConfig
    modules: int
    names: Mapping[str, str]
    shapes: Mapping[str, Shape]

    @property
    def feature_width(self) -> int:
        """Values of a slot's features."""
        return self.target_hidden * len(self.features)

    @property
    def can_round(self) -> bool:
        """Whether its widths suit int8 weights, which come in groups of 32."""
        config = self.config
        widths = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim, self.target_hidden)
        return not any(width % 32 for width in widths)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor of that name here."""
        return name in self.names


class Tensors:
    """Collects what a reader expects a checkpoint to hold.

    Attributes:
        names: stored name of every tensor expected so far, by its name here.
        shapes: shape of every one of them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}

    def stored(self, name: str) -> bool:
        return name in self._checkpoint.shapes

    def shape(self, name: str) -> Shape:
        """Shape of a stored tensor; raises ``InvalidArgumentError`` if there is none."""
        if not self.stored(name):
            raise InvalidArgumentError(f"{self._checkpoint.folder} lacks {name}")
        return self._checkpoint.shapes[name]

    def need(self, name: str, stored: str, shape: Shape) -> None:
        """``name`` is what we call the tensor ``stored``, which must be there in that shape."""
        self.names[name], self.shapes[name] = stored, shape

    def take(self, name: str, stored: Iterable[str], shape: Shape) -> bool:
        """``need`` of the first of ``stored`` that is there, if any is."""
        for candidate in stored:
            if self.stored(candidate):
                self.need(name, candidate, shape)
                return True
        return False

    def layer(self, prefix: str, stored: str, config: ModelConfig, *, norms: Iterable[str], wide: bool = False) -> None:
        """The tensors of one decoder layer.

        Args:
            prefix: here.
            stored: the same in the checkpoint.
            config: sizes, biases and q/k norms.
            norms: which RMS norms it has.
            wide: attends over two states side by side (EAGLE-3).
        """
        for name, shape in layer_shapes(config, wide=wide).items():
            self.need(f"{prefix}.{name}", f"{stored}.{name}", shape)
        for name in norms:
            self.need(f"{prefix}.{name}.weight", f"{stored}.{name}.weight", (config.hidden_size,))

    def vocabulary(self, vocab_size: int, hidden: int, *, embeddings: Iterable[str], heads: Iterable[str]) -> None:
        """Embeddings, output layer and draft vocabulary, as far as the head brings its own.

        Args:
            vocab_size: of the target.
            hidden: width of the head's embeddings and outputs.
            embeddings: stored names that embeddings may have.
            heads: the same of the output layer.
        """
        self.take(EMBEDDINGS, embeddings, (vocab_size, hidden))
        rows = vocab_size
        if self.stored(OFFSETS):
            rows = int(self.shape(OFFSETS)[0]) if self.shape(OFFSETS) else 0
            self.need(OFFSETS, OFFSETS, (rows,))
            self.take(MASK, (MASK,), (vocab_size,))
        self.agree("draft_vocab_size", rows)
        self.take(HEAD, heads, (rows, hidden))

    def check(self, ignored: Iterable[str] = ()) -> None:
        """Holds what was needed against what is stored; see ``require_tensors``."""
        expected = {self.names[name]: shape for name, shape in self.shapes.items()}
        require_tensors(self._checkpoint, expected, ignored=frozenset(ignored))

    def agree(self, key: str, value: int) -> None:
        """Raises ``InvalidArgumentError`` if config.json has another value for what the tensors say."""
        given = self._checkpoint.config.get(key)
        if given is not None and given != value:
            raise InvalidArgumentError(f"{key} is {given} in config.json, but the tensors have {value}")


def llama_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sizes of a head's layers, under Llama's names; speculators keeps them one level down.

    Raises:
        InvalidArgumentError: if they are not there, or the file asks for more to be accepted than is exact.
    """
    if config.get("speculators_model_type") is None:
        return config
    for method in (config.get("speculators_config") or {}).get("proposal_methods") or []:
        k = method.get("verifier_accept_k", 1)
        if k != 1:
            raise InvalidArgumentError(f"verifier_accept_k is {k}; only the target's own token is accepted here")
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise InvalidArgumentError("transformer_layer_config is missing in config.json; must be that of a layer")
    return nested


def layer_config(checkpoint: Checkpoint, values: Mapping[str, Any], layer: str, *, layers: int) -> ModelConfig:
    """Sizes of a head's layers; biases and q/k norms are those that its first layer has.

    Args:
        checkpoint: of the head.
        values: Llama's fields, from its config.json.
        layer: stored prefix of the first layer.
        layers: how many a module has.

    Raises:
        InvalidArgumentError: on anything that our layers do not do, by name.
    """
    shapes = checkpoint.shapes
    _refuse_unbuilt(checkpoint, values, layer)
    config = ModelConfig.from_dict({**values, "architectures": ["LlamaForCausalLM"]})
    q_rows = shapes[f"{layer}.self_attn.q_proj.weight"][0] if f"{layer}.self_attn.q_proj.weight" in shapes else 0
    if q_rows == 2 * config.heads * config.head_dim:
        raise InvalidArgumentError(f"{layer}.self_attn.q_proj.weight has {q_rows} rows; gated attention is not built")
    return replace(
        config,
        layers=layers,
        checkpoint_layers=layers,
        qkv_bias=f"{layer}.self_attn.q_proj.bias" in shapes,
        output_bias=f"{layer}.self_attn.o_proj.bias" in shapes,
        mlp_bias=f"{layer}.mlp.gate_proj.bias" in shapes,
        qk_norm=f"{layer}.self_attn.q_norm.weight" in shapes,
    )


def _refuse_unbuilt(checkpoint: Checkpoint, values: Mapping[str, Any], layer: str) -> None:
    marks = {
        "self_attn.kv_a_proj_with_mqa.weight": "latent attention (MLA)",
        "self_attn.q_a_proj.weight": "latent attention (MLA)",
        "mlp.gate.weight": "a mixture of experts",
        "mlp.gate_up_proj": "a mixture of experts",
        "mlp.experts.gate_up_proj": "a mixture of experts",
    }
    for name, what in marks.items():
        if f"{layer}.{name}" in checkpoint.shapes:
            raise InvalidArgumentError(f"{checkpoint.folder} holds {layer}.{name}: {what} is not built for heads")
    scaled = next((name for name in checkpoint.shapes if name.endswith(".weight_scale_inv")), None)
    if scaled is not None:
        raise InvalidArgumentError(f"{checkpoint.folder} holds {scaled}: FP8 weights are not read, convert them first")
    window, switch = values.get("sliding_window"), values.get("use_sliding_window")
    if switch or (window is not None and switch is None):
        raise InvalidArgumentError(f"sliding_window is {window}; sliding windows are not built for heads")


def choose(switch: str, given: str | None, stored: object, default: str, options: tuple[str, ...]) -> str:
    """A switch as given, else as config.json has it, else the default.

    Raises:
        InvalidArgumentError: if it is none of the options.
    """
    value = given if given is not None else (default if stored is None else stored)
    if value not in options:
        raise InvalidArgumentError(f"{switch} is {value!r}; must be {' or '.join(options)}")
    return str(value)


def state_name(h_source: str, target: ModelConfig | None) -> str:
    """Name in types.proto of the target's last state.

    Args:
        h_source: post_norm or pre_norm.
        target: the target's sizes; only pre_norm needs them.
    """
    if h_source == "post_norm":
        return "final"
    return f"hidden.{require_target(target, 'h_source pre_norm').layers}"


def require_target(target: ModelConfig | None, why: str) -> ModelConfig:
    """Raises ``InvalidArgumentError`` if the target's folder is not known."""
    if target is None:
        raise InvalidArgumentError(f"target_model is missing; {why} needs the target's folder, --target-model FOLDER")
    return target
