"""Medusa heads (Cai et al., arXiv 2401.10774, section 3.1): which checkpoints are read.

Head j (from 0) reads the target's state behind its last norm at the last position computed, and nothing else:

    x = state;  x = x + SiLU(W x + b)  for each of its blocks;  logits = lm_head_j(x), of the token j + 2 further on

Beside the pair (h_i, t_{i+1}) of slot i that is the law of t_{i+2+j}, the (j+1)-th draft token. It does not depend
on the draft tokens before it, so that there is nothing to cache, and all nodes of a level share their children's
chances; ``medusa_drafter`` makes chains and trees of them.

Formats:

- the authors': {j}.{l}.linear.{weight,bias} for block l of head j and {j}.{L}.weight [V, H] behind the L blocks, in
  medusa_lm_head.safetensors or .pt; with the prefix medusa_head. among the tensors of the whole model. Heads and blocks
  are counted from the tensors, because published configurations name other numbers.
- vLLM's: blocks.{j}.layers.{l}.{weight,bias} and lm_heads.{j}.weight, perhaps under medusa_heads. With
  ``original_lm_head`` all heads share lm_heads.0, or the target's own if there is none. ``token_map`` i64[Vd] names
  the tokens of a reduced vocabulary; output layers have its rows, or all of the target's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from draft_svc.drafters.checkpoint import Checkpoint, Shape, require_tensors
from draft_svc.drafters.head_spec import HEAD
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig

TOKEN_MAP = "token_map"
FEATURES = ("final",)

_OFFICIAL = re.compile(r"(?P<prefix>medusa_head\.)?(?P<head>\d+)\.(?P<block>\d+)\.linear\.weight$")
_VLLM = re.compile(r"(?P<prefix>medusa_heads\.)?blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.weight$")


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """The heads of one checkpoint, as far as they can be known without their weights.

    Attributes:
        config: of the target.
        heads: how many.
        blocks: of each.
        names: stored name of every tensor, by its name here: {j}.{l}.weight, {j}.{l}.bias, {j}.lm_head.weight,
            token_map. A shared output layer is lm_head.weight; not among them, it is the target's.
        shapes: of every one of them.
    """

    config: ModelConfig
    heads: int
    blocks: int
    names: Mapping[str, str]
    shapes: Mapping[str, Shape]

    @property
    def has_own_layers(self) -> bool:
        """Whether every head has an output layer of its own."""
        return "0.lm_head.weight" in self.names


def is_medusa(names: Iterable[str]) -> bool:
    """Whether tensors of these names are Medusa heads."""
    return any(_OFFICIAL.match(name) or _VLLM.match(name) for name in names)


def read(checkpoint: Checkpoint, target: ModelConfig) -> MedusaSpec:
    """What heads the folder holds.

    Args:
        checkpoint: of the heads.
        target: sizes of the target.

    Raises:
        InvalidArgumentError: if tensors are missing, unknown or of another shape, or a switch asks for more.
    """
    for pattern, build in ((_OFFICIAL, _official), (_VLLM, _vllm)):
        found = [match for name in checkpoint.shapes if (match := pattern.match(name))]
        if found:
            heads = 1 + max(int(match["head"]) for match in found)
            blocks = 1 + max(int(match["block"]) for match in found)
            return build(checkpoint, target, found[0]["prefix"] or "", heads, blocks)
    raise InvalidArgumentError(f"{checkpoint.folder} holds no Medusa heads: no 0.0.linear.weight, no blocks.0.layers.0")


def _official(checkpoint: Checkpoint, target: ModelConfig, prefix: str, heads: int, blocks: int) -> MedusaSpec:
    stored = {f"{j}.{layer}": f"{prefix}{j}.{layer}.linear" for j in range(heads) for layer in range(blocks)}
    names = {f"{name}.{part}": f"{at}.{part}" for name, at in stored.items() for part in ("weight", "bias")}
    names |= {f"{j}.lm_head.weight": f"{prefix}{j}.{blocks}.weight" for j in range(heads)}
    rest = [name for name in checkpoint.shapes if prefix and not name.startswith(prefix)]
    return _checked(
        checkpoint, MedusaSpec(target, heads, blocks, names, _shapes(names, target, target.vocab_size)), rest
    )


def _vllm(checkpoint: Checkpoint, target: ModelConfig, prefix: str, heads: int, blocks: int) -> MedusaSpec:
    config, shapes = checkpoint.config, checkpoint.shapes
    if config.get("logit_scale", 1.0) != 1.0:
        raise InvalidArgumentError(f"logit_scale is {config['logit_scale']}; scaled logits are not built for Medusa")
    parts = ("weight", "bias") if f"{prefix}blocks.0.layers.0.bias" in shapes else ("weight",)
    stored = {f"{j}.{layer}": f"{prefix}blocks.{j}.layers.{layer}" for j in range(heads) for layer in range(blocks)}
    names = {f"{name}.{part}": f"{at}.{part}" for name, at in stored.items() for part in parts}
    first = f"{prefix}lm_heads.0.weight"
    if not config.get("original_lm_head", False):
        names |= {f"{j}.lm_head.weight": f"{prefix}lm_heads.{j}.weight" for j in range(heads)}
    elif first in shapes:
        names[HEAD] = first
    rows = shapes[first][0] if shapes.get(first) else target.vocab_size
    expected = _shapes(names, target, rows)
    map_name = next((name for name in (f"{prefix}{TOKEN_MAP}", TOKEN_MAP) if name in shapes), None)
    kept = target.vocab_size
    if map_name is not None:
        names[TOKEN_MAP], expected[TOKEN_MAP] = map_name, (kept := _length(shapes[map_name]),)
    if rows not in (kept, target.vocab_size):
        raise InvalidArgumentError(f"{checkpoint.folder}: {first} has {rows} rows; must be {kept}, one for each token")
    said = config.get("truncated_vocab_size")
    if said is not None and said != kept:
        raise InvalidArgumentError(f"truncated_vocab_size is {said} in config.json, but the tensors have {kept}")
    return _checked(checkpoint, MedusaSpec(target, heads, blocks, names, expected), ())


def _length(shape: Shape) -> int:
    return int(shape[0]) if len(shape) == 1 else 0


def _shapes(names: Mapping[str, str], target: ModelConfig, rows: int) -> dict[str, Shape]:
    hidden = target.hidden_size
    kinds: dict[str, Shape] = {"bias": (hidden,), "weight": (hidden, hidden)}
    return {name: (rows, hidden) if name.endswith(HEAD) else kinds[name.rpartition(".")[2]] for name in names}


def _checked(checkpoint: Checkpoint, spec: MedusaSpec, ignored: Iterable[str]) -> MedusaSpec:
    expected = {spec.names[name]: shape for name, shape in spec.shapes.items()}
    require_tensors(checkpoint, expected, ignored=frozenset(ignored))
    return spec
