"""What each field of a request may be, and whether this deployment honours it as it stands now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.admission import (
    MAX_ALLOWED,
    MAX_BIASES,
    MAX_DRAFT_LENGTH,
    MAX_REQUEST_ID_LENGTH,
    MAX_SAMPLES,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TIMEOUT_S,
    MAX_TOP_LOGPROBS,
    Defaults,
)
from orchestrator.core.acceptance import Rule
from pilotfish.steps import MAX_GRAMMAR_BYTES, Capabilities, Grant, ProposalKind

LOGITS, LOGPROBS, DRAFT, TEMPLATE, GRAMMARS = "logits", "logprobs", "draft", "template", "grammars"
"""What a field may need."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field; as in generation.proto. ``why_not`` is empty if it is honoured."""

    name: str
    range: str
    default: str
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A kind of draft replicas; as in generation.proto."""

    model: str
    scheme: str
    rules: tuple[Rule, ...]
    grows_trees: bool
    replica_count: int


_UNIT, _TRUTH, _IDS = "[0, 1]", "true or false", "token ids below {vocab_size}"
_ALONE = "one grammar at most, without ignore_eos or min_tokens"
_GRAMMAR = f"at most {MAX_GRAMMAR_BYTES} bytes; {_ALONE}"
_TOP = f"[0, {MAX_TOP_LOGPROBS}]"

_FIELDS: tuple[tuple[str, str, str, str], ...] = (
    # name, range, default, what it needs
    (
        "request_id",
        f"at most {MAX_REQUEST_ID_LENGTH} visible ASCII characters, of no running request",
        "made up",
        "",
    ),
    ("model", "{model}", "{model}", ""),
    ("text", "any text", "one prompt is required", ""),
    ("token_ids", "1 to {most_prompt} " + _IDS, "one prompt is required", ""),
    ("messages", "roles and contents of the model's chat template", "one prompt is required", TEMPLATE),
    ("priority", "32 bits; lower goes first", "0", ""),
    ("timeout_s", f"(0, {MAX_TIMEOUT_S:g}]", "none", ""),
    ("max_tokens", "at least 1; 0 beside echo or prompt_logprobs; to {max_len} with the prompt", "{max_tokens}", ""),
    ("temperature", "[0, inf); 0 is greedy", "{temperature}", ""),
    ("top_k", "[0, 2147483647]; 0 keeps all", "{top_k}", ""),
    ("top_p", "(0, 1]", "{top_p}", ""),
    ("min_p", _UNIT, "{min_p}", ""),
    ("seed", "64 bits; below 0 as its two's complement", "random", ""),
    ("stop", f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters", "none", ""),
    ("stop_token_ids", f"at most {MAX_STOP_TOKENS} {_IDS}", "none", ""),
    ("ignore_eos", _TRUTH, "false", ""),
    ("acceptance", "match, ratio or block", "match if greedy or seeded, else {acceptance}", ""),
    ("draft_length", f"[0, {MAX_DRAFT_LENGTH}]; 0 is without a draft", "{draft_length}", DRAFT),
    ("n", f"[1, {MAX_SAMPLES}]", "1", ""),
    ("echo", _TRUTH, "false", ""),
    ("logprobs", _TOP, "none", LOGPROBS),
    ("prompt_logprobs", _TOP, "none", LOGPROBS),
    ("adaptive_draft_length", "true or false; not beside draft_length", "{is_adaptive}", DRAFT),
    ("draft_model", "{drafts}", "any", DRAFT),
    ("show_proposals", _TRUTH, "false", DRAFT),
    ("include_stop_str_in_output", _TRUTH, "false", ""),
    ("skip_special_tokens", _TRUTH, "true", ""),
    ("truncate_prompt_tokens", "[1, {max_len}], or -1 for what fits", "none", ""),
    ("repetition_penalty", "(0, inf)", "{repetition_penalty}", LOGITS),
    ("presence_penalty", "[-2, 2]", "0", LOGITS),
    ("frequency_penalty", "[-2, 2]", "0", LOGITS),
    ("logit_bias", f"at most {MAX_BIASES} {_IDS}, each [-100, 100]", "none", LOGITS),
    ("banned_token_ids", f"at most {MAX_BIASES} {_IDS}", "none", LOGITS),
    ("allowed_token_ids", f"at most {MAX_ALLOWED} {_IDS}", "all", LOGITS),
    ("min_tokens", "[0, max_tokens]", "0", LOGITS),
    ("json_schema", f"a JSON schema, {_GRAMMAR}", "none", GRAMMARS),
    ("json_object", f"true or false, {_ALONE}", "false", GRAMMARS),
    ("regex", f"a regular expression, {_GRAMMAR}", "none", GRAMMARS),
    ("ebnf", f"rules in GBNF, {_GRAMMAR}", "none", GRAMMARS),
    ("structural_tag", f"a structural tag of xgrammar, {_GRAMMAR}", "none", GRAMMARS),
)


class Offer(NamedTuple):
    """Every field of ``GenerateRequest`` and of ``SamplingParams``, and the drafters."""

    fields: list[Field]
    drafters: list[Drafter]


def offer(
    model: str,
    target: Grant | None,
    replicas: Sequence[tuple[Grant, Capabilities]],
    defaults: Defaults,
    has_chat_template: bool,
) -> Offer:
    """What a deployment offers.

    Args:
        model: its name for clients.
        target: the last that answered, None if none has.
        replicas: of the draft that answer now.
        defaults: where a client says nothing.
        has_chat_template: of the model.
    """
    drafters = _drafters(replicas)
    adaptive = defaults.draft_length is None
    names = ", ".join(dict.fromkeys(name for each in drafters for name in (each.model, each.scheme)))
    values = {
        "model": model,
        "vocab_size": target.vocab_size if target is not None else 0,
        "max_len": target.max_len if target is not None else 0,
        "most_prompt": target.max_len - 1 if target is not None else 0,
        **_sampling(defaults),
        "acceptance": defaults.acceptance.name.lower(),
        "draft_length": "the server chooses, from round to round" if adaptive else defaults.draft_length,
        "is_adaptive": str(adaptive).lower(),
        "drafts": names or "none",
    }
    missing = _missing(target, drafters, has_chat_template, can_end=bool(defaults.end_token_ids))
    fields = [
        Field(name, allowed.format(**values), default.format(**values), missing.get(need, missing.get("", "")))
        for name, allowed, default, need in _FIELDS
    ]
    return Offer(fields, drafters)


def _sampling(defaults: Defaults) -> dict[str, str]:
    """What sampling fields are where a client says nothing, and whether the model says so."""
    ours = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    own = {name: str(value) for name, value in (ours | {"max_tokens": defaults.max_tokens}).items()}
    return own | {name: f"{value:g}, by the model's generation config" for name, value in defaults.sampling.items()}


def _drafters(replicas: Sequence[tuple[Grant, Capabilities]]) -> list[Drafter]:
    counts: dict[tuple[str, Capabilities], int] = {}
    for grant, capabilities in replicas:
        counts[grant.model_id, capabilities] = counts.get((grant.model_id, capabilities), 0) + 1
    return [
        Drafter(model, known.scheme, _rules(known), known.tree_width > 0, count)
        for (model, known), count in counts.items()
    ]


def _rules(capabilities: Capabilities) -> tuple[Rule, ...]:
    """Rules by which its drafts can be judged, at temperature 0 at least."""
    deterministic = {ProposalKind.GREEDY, ProposalKind.MATCHED} & set(capabilities.kinds)
    sampled = ProposalKind.SAMPLED in capabilities.kinds
    return (Rule.MATCH,) * bool(deterministic) + (Rule.RATIO, Rule.BLOCK) * sampled


def _missing(
    target: Grant | None, drafters: Sequence[Drafter], has_chat_template: bool, *, can_end: bool
) -> dict[str, str]:
    """Why what needs something is not honoured, by need; the empty need is that of every field."""
    if target is None:
        return {"": "no target has answered yet"}
    return {
        need: why
        for need, is_missing, why in (
            (LOGITS, not target.shapes_logits, f"target {target.model_id} draws without logits"),
            (GRAMMARS, not target.shapes_logits, f"target {target.model_id} draws without logits"),
            (GRAMMARS, not can_end, "this model has no end token, so that no grammar could end"),
            (LOGPROBS, not target.gives_logprobs, f"target {target.model_id} gives none"),
            (DRAFT, not drafters, "no draft replica answers: requests go without"),
            (TEMPLATE, not has_chat_template, "this model has no chat template"),
        )
        if is_missing
    }
