"""A linear layer over [embedding ; state], decoder layers, an output layer: MTP and EAGLE-1 are both this.

    x = projection([norm(embed(t_{i+1})) ; norm(h_i)])      each norm if there is one
    g = layers(x)                                           the first perhaps without its norm
    logits = lm_head(norm(g)), of t_{i+2}

DeepSeek-V3 (arXiv 2412.19437, section 2.2) has all the norms; EAGLE (arXiv 2401.15077, section 4.2) has
none but the MLP's, and a bias on the projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draft_svc.drafters.head_spec import HeadSpec, Tensors
from pilotfish.runtime.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

    from draft_svc.drafters.heads import Parts
    from pilotfish.runtime.models.layers import Layers


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a format keeps which tensor: stored names, with {m} for the module and {i} for the layer."""

    projection: str
    layer: str
    """Prefix of the first layer."""
    further: str
    """Prefix of layer i from the second on."""
    embed_norm: str | None = None
    state_norm: str | None = None
    output_norm: str | None = None
    state_first: bool = False
    """The projection reads [state ; embedding]."""
    norms_plus_one: bool = False
    """RMS norms multiply by 1 + weight."""


@dataclass(frozen=True, slots=True)
class PairSpec(HeadSpec):
    """A head of this kind; ``feedback`` is post_norm or pre_norm, see ``Switches``."""

    layout: Layout
    feedback: str

    def build(self, parts: Parts) -> PairHead:
        """The head, from its weights."""
        return PairHead(self, parts)


def collect(tensors: Tensors, layout: Layout, config: ModelConfig, modules: Iterable[int]) -> None:
    """Expects the tensors of the modules with these stored numbers; norms and bias are those that are there."""
    hidden = config.hidden_size
    for m, number in enumerate(modules):
        projection = layout.projection.format(m=number)
        tensors.need(f"{m}.projection.weight", f"{projection}.weight", (hidden, 2 * hidden))
        tensors.take(f"{m}.projection.bias", [f"{projection}.bias"], (hidden,))
        for name, stored in _norms(layout).items():
            tensors.take(f"{m}.{name}.weight", [f"{stored.format(m=number)}.weight"], (hidden,))
        for i in range(config.layers):
            prefix = (layout.further if i else layout.layer).format(m=number, i=i)
            norms = ["post_attention_layernorm"]
            if i or tensors.stored(f"{prefix}.input_layernorm.weight"):
                norms.append("input_layernorm")
            tensors.layer(f"{m}.layers.{i}", prefix, config, norms=norms)


def _norms(layout: Layout) -> dict[str, str]:
    given = {"embed_norm": layout.embed_norm, "state_norm": layout.state_norm, "output_norm": layout.output_norm}
    return {name: stored for name, stored in given.items() if stored is not None}


class PairHead:
    """See the module, and ``heads.Head``.

    Args:
        spec: what the checkpoint holds.
        parts: its weights.
    """

    def __init__(self, spec: PairSpec, parts: Parts) -> None:
        layout, config, kernels = spec.layout, spec.config, parts.kernels
        if layout.norms_plus_one:
            parts.add_one_to_norms()
        self.token_ids, self.embed = parts.token_ids, parts.embedding()
        self._state_first, self._post_norm = layout.state_first, spec.feedback == "post_norm"
        self._projections, layers = [], []
        for m in range(spec.modules):
            norms = [parts.pop(f"{m}.embed_norm.weight"), parts.pop(f"{m}.state_norm.weight")]
            if layout.state_first:
                norms.reverse()
            weight, bias = parts.take(f"{m}.projection.weight"), parts.pop(f"{m}.projection.bias")
            self._projections.append(kernels.projection(weight, bias, norms, config.rms_eps))
            layers.append(parts.layers(m))
        self.layers: Sequence[Layers] = layers
        self._heads = parts.output_heads([parts.pop(f"{m}.output_norm.weight") for m in range(spec.modules)])

    def inputs(self, module: int, embeddings: Tensor, states: Tensor, *, is_own: bool) -> tuple[Tensor, None]:
        parts = (states, embeddings) if self._state_first else (embeddings, states)
        return self._projections[module](*parts), None

    def state(self, module: int, out: Tensor) -> Tensor:
        return self._heads[module].normed(out) if self._post_norm else out

    def logits(self, module: int, out: Tensor) -> Tensor:
        return self._heads[module].logits(out)
