"""Tiny random draft heads in every published format, names and shapes exact, and their slow twin.

``FORMATS`` has one ``Written`` per format and variant: what its folder holds, and the twin's reading of it,
which goes by the definitions of the papers and knows nothing of how the drafter reads a checkpoint. The twin
keeps no cache: it runs the whole row anew for every token, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 4, 2, 16, 280
DRAFT_VOCAB = 120
EPS, THETA = 1e-5, 10000.0

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}

Weights = dict[str, Tensor]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Weights:
    """Large enough that every tensor shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[name] = 0.3 * noise if name.endswith("bias") else 1 + 0.2 * noise
        else:
            scale = 4.0 if "embed_tokens" in name or "head" in name else 0.8
            weights[name] = noise * scale / shape[-1] ** 0.5
    return weights


def layer_shapes(
    prefix: str, *, norms: bool = True, wide: bool = False, bias: bool = False, qk_norm: bool = False
) -> dict[str, tuple[int, ...]]:
    """A decoder layer; ``norms`` False leaves input_layernorm out."""
    q, kv, read = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, (2 if wide else 1) * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.self_attn.q_proj.weight": (q, read),
        f"{prefix}.self_attn.k_proj.weight": (kv, read),
        f"{prefix}.self_attn.v_proj.weight": (kv, read),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, q),
        f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }
    if norms:
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
    if wide:
        shapes[f"{prefix}.hidden_norm.weight"] = (HIDDEN,)
    if bias:
        shapes |= {f"{prefix}.self_attn.{n}_proj.bias": (r,) for n, r in (("q", q), ("k", kv), ("v", kv))}
    if qk_norm:
        shapes |= {f"{prefix}.self_attn.{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
    return shapes


def draft_vocabulary(seed: int = 5) -> Weights:
    """``d2t`` and ``t2d`` of a random reduced vocabulary, ascending."""
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[chosen] = True
    return {"d2t": chosen - torch.arange(DRAFT_VOCAB), "t2d": mask}


# The twin's mathematics.


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """[tokens, heads, dim]."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = positions.double()[:, None] * frequencies
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None] for f in (torch.cos, torch.sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def run_layer(w: Weights, prefix: str, x: Tensor, read: Tensor, sees: Tensor, positions: Tensor) -> Tensor:
    """One decoder layer: attention over ``read``, residual ``x``; ``sees`` bool[tokens, tokens]."""

    def linear(name: str, value: Tensor) -> Tensor:
        return functional.linear(value, w[f"{prefix}.{name}.weight"], w.get(f"{prefix}.{name}.bias"))

    n = len(x)
    q = linear("self_attn.q_proj", read).view(n, HEADS, HEAD_DIM)
    k = linear("self_attn.k_proj", read).view(n, KV_HEADS, HEAD_DIM)
    v = linear("self_attn.v_proj", read).view(n, KV_HEADS, HEAD_DIM)
    q = rotated(norm(q, w.get(f"{prefix}.self_attn.q_norm.weight")), positions)
    k = rotated(norm(k, w.get(f"{prefix}.self_attn.k_norm.weight")), positions)
    out = torch.zeros(n, HEADS, HEAD_DIM, dtype=x.dtype)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = (q[:, head] @ k[:, group].T / HEAD_DIM**0.5).masked_fill(~sees, -torch.inf)
        out[:, head] = scores.softmax(-1) @ v[:, group]
    x = x + linear("self_attn.o_proj", out.reshape(n, -1))
    h = norm(x, w[f"{prefix}.post_attention_layernorm.weight"])
    return x + linear("mlp.down_proj", functional.silu(linear("mlp.gate_proj", h)) * linear("mlp.up_proj", h))


@dataclass(frozen=True)
class Paths:
    """Stored names of a head of the kind [embedding ; state] -> projection -> layers."""

    projection: str
    layers: tuple[str, ...]
    embed_norm: str = ""
    state_norm: str = ""
    output_norm: str = ""


@dataclass(frozen=True)
class Written:
    """One checkpoint and how the twin reads it.

    Attributes:
        name: of the format.
        kind: what ``kind_of`` should say.
        config: config.json.
        shapes: of its tensors.
        paths: of each module; none for EAGLE-3.
        features: states that it should ask for.
        extra: tensors that are not random.
        layers: prefixes of an EAGLE-3 head's layers.
        state_first, plus_one, post_norm, residual_behind_norm, norm_logits: what the definition says.
        reduced: has a draft vocabulary.
        suffix: of its file.
    """

    name: str
    kind: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    paths: tuple[Paths, ...] = ()
    features: tuple[str, ...] = ("final",)
    extra: Weights = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    state_first: bool = False
    plus_one: bool = False
    post_norm: bool = True
    residual_behind_norm: bool = False
    norm_logits: bool = True
    file: str = "model.safetensors"

    @property
    def width(self) -> int:
        return HIDDEN * len(self.features)

    def weights(self, seed: int = 3) -> Weights:
        made = random_weights(self.shapes, seed)
        if self.plus_one:
            made = {name: w - 1 if w.dim() == 1 and name.endswith("norm.weight") else w for name, w in made.items()}
        return made | self.extra

    def write(self, folder: Path, seed: int = 3) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith("safetensors"):
            save_file({k: v.contiguous() for k, v in self.weights(seed).items()}, folder / self.file)
        else:
            torch.save(self.weights(seed), folder / self.file)
        return folder


def _mtp_shapes(path: Paths, **layer: Any) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{path.projection}.weight": (HIDDEN, 2 * HIDDEN)}
    norms = (path.embed_norm, path.state_norm, path.output_norm)
    shapes |= {f"{name}.weight": (HIDDEN,) for name in norms if name}
    for prefix in path.layers:
        shapes |= layer_shapes(prefix, **layer)
    return shapes


def _deepseek(module: int, layers: int = 1) -> Paths:
    prefix = f"model.layers.{module}"
    further = tuple(f"{prefix}.layers.{i}" for i in range(1, layers))
    return Paths(
        f"{prefix}.eh_proj", (prefix, *further), f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.shared_head.norm"
    )


def _mtp_layer(prefix: str) -> Paths:
    return Paths(
        f"{prefix}.input_proj",
        (prefix,),
        f"{prefix}.token_layernorm",
        f"{prefix}.hidden_layernorm",
        f"{prefix}.final_layernorm",
    )


def _target_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """A target that a head lies among."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        shapes |= layer_shapes(f"model.layers.{i}")
    return shapes


def _own() -> Written:
    path = _deepseek(0)
    return Written("own", "mtp", LLAMA | {"architectures": ["PilotfishMTP"]}, _mtp_shapes(path), (path,))


def _mtp() -> list[Written]:
    own, two = _own(), _deepseek(0, layers=2)
    modules = (_deepseek(0), _deepseek(1))
    # Without norms: EAGLE's arithmetic under our names.
    bare = replace(_deepseek(0), embed_norm="", state_norm="", output_norm="")
    in_shards, qwen = (
        _deepseek(2),
        Paths("mtp.fc", ("mtp.layers.0",), "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    )
    speculators, mimo = _mtp_layer("mtp_layers.0"), _mtp_layer("model.mtp_layers.0")
    copies: dict[str, tuple[int, ...]] = {
        "model.layers.2.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.2.shared_head.head.weight": (VOCAB, HIDDEN),
    }
    whole = LLAMA | {"num_hidden_layers": 2}
    return [
        own,
        replace(
            own,
            name="own-reduced-pre-norm",
            config=own.config | {"draft_vocab_size": DRAFT_VOCAB, "h_source": "pre_norm", "feedback": "pre_norm"},
            extra=draft_vocabulary(),
            features=("hidden.2",),
            post_norm=False,
        ),
        replace(
            own,
            name="own-two-layers",
            config=own.config | {"num_hidden_layers": 2},
            shapes=_mtp_shapes(two),
            paths=(two,),
        ),
        replace(
            own,
            name="own-two-modules",
            config=own.config | {"num_nextn_predict_layers": 2},
            shapes=_mtp_shapes(modules[0]) | _mtp_shapes(modules[1]),
            paths=modules,
        ),
        replace(
            own,
            name="own-no-norms",
            config=own.config | {"norms": "none"},
            shapes=_mtp_shapes(bare, norms=False),
            paths=(bare,),
        ),
        Written(
            "deepseek-in-shards",
            "mtp",
            whole | {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1},
            _target_shapes(2) | _mtp_shapes(in_shards, bias=True) | copies,
            (in_shards,),
        ),
        Written(
            "deepseek-export",
            "mtp",
            LLAMA | {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_nextn_predict_layers": 1},
            _mtp_shapes(_deepseek(0)),
            (_deepseek(0),),
        ),
        Written(
            "qwen",
            "mtp",
            whole | {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1},
            _target_shapes(2) | _mtp_shapes(qwen, qk_norm=True),
            (qwen,),
            plus_one=True,
        ),
        Written(
            "speculators-mtp",
            "mtp",
            {
                "speculators_model_type": "mtp",
                "architectures": ["MTPDraftModel"],
                "transformer_layer_config": LLAMA | {"model_type": "qwen3", "architectures": None},
                "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "verifier_accept_k": 1}]},
            },
            _mtp_shapes(speculators, qk_norm=True),
            (speculators,),
        ),
        Written(
            "mimo",
            "mtp",
            whole | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
            _target_shapes(2) | _mtp_shapes(mimo, bias=True),
            (mimo,),
            state_first=True,
        ),
    ]


def _eagle() -> list[Written]:
    path = Paths("fc", ("layers.0",))
    official = Written(
        "eagle",
        "eagle",
        LLAMA | {"bias": True},
        _mtp_shapes(path, norms=False) | {"fc.bias": (HIDDEN,)},
        (path,),
        post_norm=False,
    )
    normed = replace(path, embed_norm="enorm", state_norm="hnorm")
    two = Paths("fc", ("layers.0", "layers.1"))
    speculators = Paths("fusion_fc", ("transformer",))
    hass = replace(speculators, embed_norm="embedding_layernorm", output_norm="pre_lm_head_layernorm")
    nested = {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator"],
        "transformer_layer_config": LLAMA,
    }
    return [
        official,
        replace(official, name="eagle-bin", file="pytorch_model.bin"),
        replace(
            official,
            name="eagle-no-bias",
            shapes=_mtp_shapes(path, norms=False, bias=True) | {"embed_tokens.weight": (VOCAB, HIDDEN)},
        ),
        replace(
            official,
            name="eagle-two-layers",
            config=LLAMA | {"num_hidden_layers": 2},
            shapes=_mtp_shapes(Paths("fc", ("layers.0",)), norms=False) | layer_shapes("layers.1"),
            paths=(two,),
        ),
        replace(
            official,
            name="eagle-para-norm",
            config=LLAMA | {"add_para_norm": True},
            shapes=_mtp_shapes(normed, norms=False),
            paths=(normed,),
        ),
        replace(
            official,
            name="speculators-eagle",
            config=nested | {"layernorms": False, "fusion_bias": False},
            shapes=_mtp_shapes(speculators, norms=False),
            paths=(speculators,),
        ),
        replace(
            official,
            name="speculators-hass",
            config=nested | {"layernorms": True, "fusion_bias": True},
            shapes=_mtp_shapes(hass) | {"fusion_fc.bias": (HIDDEN,)},
            paths=(hass,),
            post_norm=True,
        ),
    ]


def _eagle3_shapes(first: str, vocab: int) -> dict[str, tuple[int, ...]]:
    return {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab, HIDDEN),
        **layer_shapes(first, wide=True),
    }


def _eagle3() -> list[Written]:
    reduced = {"draft_vocab_size": DRAFT_VOCAB}
    official = Written(
        "eagle3",
        "eagle3",
        LLAMA
        | reduced
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}},
        _eagle3_shapes("midlayer", DRAFT_VOCAB),
        features=("hidden.0", "hidden.1", "hidden.2"),
        extra=draft_vocabulary(),
        layers=("midlayer",),
        post_norm=False,
    )
    nested = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": LLAMA | {"model_type": "llama", "architectures": None},
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "verifier_accept_k": 1}]},
    }
    own_embeddings: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, HIDDEN)}
    return [
        official,
        replace(
            official,
            name="eagle3-whole-vocabulary-bias",
            config=LLAMA | {"draft_vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 2, 1]},
            shapes=_eagle3_shapes("layers.0", VOCAB) | layer_shapes("layers.0", wide=True, bias=True) | own_embeddings,
            features=("hidden.0", "hidden.2", "hidden.1"),
            extra={},
            layers=("layers.0",),
            file="pytorch_model.bin",
        ),
        replace(
            official,
            name="specforge-no-output-norm",
            config=official.config | {"norm_output": False},
            norm_logits=False,
        ),
        replace(
            official,
            name="specforge-two-layers",
            config=official.config | {"norm_output": True},
            shapes=_eagle3_shapes("layers.0", DRAFT_VOCAB) | layer_shapes("layers.1"),
            layers=("layers.0", "layers.1"),
        ),
        replace(
            official,
            name="speculators-eagle3",
            config=nested | reduced | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
            shapes=_eagle3_shapes("layers.0", DRAFT_VOCAB) | {"input_norm.weight": (3 * HIDDEN,)} | own_embeddings,
            layers=("layers.0",),
            post_norm=True,
            residual_behind_norm=True,
        ),
        replace(
            official,
            name="speculators-eagle3-fc-norm",
            config=nested | reduced | {"norm_before_residual": False, "fc_norm": True, "norm_output": False},
            shapes=_eagle3_shapes("layers.0", DRAFT_VOCAB)
            | {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
            | own_embeddings,
            layers=("layers.0",),
        ),
    ]


FORMATS = {written.name: written for written in [*_mtp(), *_eagle(), *_eagle3()]}


class Twin:
    """Runs a whole row through a head, from its checkpoint and the target's embeddings and output layer.

    Args:
        written: the head.
        target: the target's tensors, for what the head lacks.
        seed: that it was written with.
    """

    def __init__(self, written: Written, target: Weights, seed: int = 3) -> None:
        self.written = written
        w = written.weights(seed)
        if written.plus_one:
            w = {k: v + 1 if v.dim() == 1 and _is_norm_of_head(k) else v for k, v in w.items()}
        self.w = {name: v.double() if v.is_floating_point() else v for name, v in w.items()}
        self.embeddings = self._first(target, "model.layers.2.embed_tokens", "embed_tokens", "model.embed_tokens")
        head = self._first(target, "model.layers.2.shared_head.head", "lm_head")
        self.ids = torch.arange(VOCAB)
        if "d2t" in self.w:
            self.ids = torch.arange(DRAFT_VOCAB) + self.w["d2t"]
            head = head if "lm_head.weight" in self.w else head[self.ids]
        self.head = head

    def _first(self, target: Weights, *names: str) -> Tensor:
        for name in names:
            if f"{name}.weight" in self.w:
                return self.w[f"{name}.weight"]
        whole = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
        return target[f"{whole.get(names[1], names[-1])}.weight"].double()

    def run(
        self, states: list[Tensor], tokens: list[int], step: int, parents: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the last slot, and what stands for a state behind it.

        Args:
            states: of each slot: the target's features first, then the head's own.
            tokens: of each slot.
            step: number of the draft step, which says whose turn it is.
            parents: slot before each; None for a chain.
        """
        parents = list(range(-1, len(tokens) - 1)) if parents is None else parents
        n = len(tokens)
        sees, depths = torch.eye(n, dtype=torch.bool), [0] * n
        for slot, parent in enumerate(parents):
            if parent >= 0:
                sees[slot] |= sees[parent]
                depths[slot] = depths[parent] + 1
        embeddings = self.embeddings[torch.tensor(tokens)]
        run = self._run_eagle3 if self.written.kind == "eagle3" else self._run_pairs
        return run(states, embeddings, sees, torch.tensor(depths), parents, step)

    def _run_pairs(
        self, states: list[Tensor], embeddings: Tensor, sees: Tensor, positions: Tensor, parents: list[int], step: int
    ) -> tuple[Tensor, Tensor]:
        w, written = self.w, self.written
        inputs = torch.stack(states).double()
        turn = step % len(written.paths)
        for module, path in enumerate(written.paths):
            e = norm(embeddings, w.get(f"{path.embed_norm}.weight"))
            h = norm(inputs, w.get(f"{path.state_norm}.weight"))
            both = torch.cat((h, e) if written.state_first else (e, h), -1)
            x = functional.linear(both, w[f"{path.projection}.weight"], w.get(f"{path.projection}.bias"))
            for prefix in path.layers:
                x = run_layer(w, prefix, x, norm(x, w.get(f"{prefix}.input_layernorm.weight")), sees, positions)
            behind = norm(x, w.get(f"{path.output_norm}.weight"))
            passed_on = behind if written.post_norm else x
            if module == turn:
                logits, state = self.head @ behind[-1], passed_on[-1]
            inputs = torch.stack([passed_on[max(parent, 0)] for parent in parents])
        return logits, state

    def _run_eagle3(
        self, states: list[Tensor], embeddings: Tensor, sees: Tensor, positions: Tensor, parents: list[int], step: int
    ) -> tuple[Tensor, Tensor]:
        w, written = self.w, self.written
        f = torch.stack([self._fused(state.double()) if len(state) == 3 * HIDDEN else state for state in states])
        first = written.layers[0]
        e, u = norm(embeddings, w[f"{first}.input_layernorm.weight"]), norm(f, w[f"{first}.hidden_norm.weight"])
        residual = u if written.residual_behind_norm else f
        x = run_layer(w, first, residual, torch.cat((e, u), -1), sees, positions)
        for prefix in written.layers[1:]:
            x = run_layer(w, prefix, x, norm(x, w[f"{prefix}.input_layernorm.weight"]), sees, positions)
        behind = norm(x[-1], w["norm.weight"])
        return self.head @ (behind if written.norm_logits else x[-1]), behind if written.post_norm else x[-1]

    def _fused(self, state: Tensor) -> Tensor:
        w, parts = self.w, list(state.chunk(3))
        if "fc_norm.0.weight" in w:
            parts = [norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        return w["fc.weight"] @ norm(torch.cat(parts), w.get("input_norm.weight"))


def _is_norm_of_head(name: str) -> bool:
    """Of a Qwen head: the target's norms beside it do not matter here."""
    return (name.startswith("mtp.") and name.endswith("norm.weight")) or "pre_fc_norm" in name


Draw = Callable[[Tensor, int], tuple[int, dict[int, float]]]


def chain(twin: Twin, states: list[Tensor], tokens: list[int], count: int, draw: Draw) -> tuple[list[int], list[Any]]:
    """Drafts ``count`` tokens behind true pairs: tokens, and what ``draw`` says of each.

    Args:
        twin: the head.
        states: features of every slot.
        tokens: of every slot.
        count: how many.
        draw: from logits f64[columns] and the position of the token to draw: its id, and its q.
    """
    states, tokens, drafted, laws = list(states), list(tokens), [], []
    for step in range(count):
        logits, state = twin.run(states, tokens, step)
        token, law = draw(logits, len(tokens) + 1)
        drafted.append(token)
        laws.append(law)
        states.append(state)
        tokens.append(token)
    return drafted, laws
