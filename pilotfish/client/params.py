"""What a caller may ask of a completion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from pilotfish.errors import refusal, shown
from pilotfish.v1 import generation_pb2 as pb

Acceptance = Literal["match", "ratio", "block"]

_RULES = {name: pb.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{name.upper()}") for name in get_args(Acceptance)}
_WANTED = {
    "max_tokens": "an integer of 32 bits",
    "temperature": "a number",
    "top_k": "an integer of 32 bits",
    "top_p": "a number",
    "min_p": "a number",
    "seed": "None or an integer of 64 bits, from -2**63 to 2**64 - 1",
    "stop": "a text or a sequence of texts",
    "stop_token_ids": "a sequence of integers of 32 bits",
    "ignore_eos": "True or False",
    "acceptance": "None, 'match', 'ratio' or 'block'",
    "draft_length": "None or an integer of 32 bits",
    "n": "an integer of 32 bits",
    "echo": "True or False",
    "logprobs": "None or an integer of 32 bits",
    "prompt_logprobs": "None or an integer of 32 bits",
    "adaptive_draft_length": "True or False",
    "draft_model": "a text",
    "show_proposals": "True or False",
    "include_stop_str_in_output": "True or False",
    "skip_special_tokens": "True or False",
    "truncate_prompt_tokens": "None or an integer of 32 bits",
    "repetition_penalty": "a number",
    "presence_penalty": "a number",
    "frequency_penalty": "a number",
    "logit_bias": "a mapping of integers of 32 bits to numbers",
    "banned_token_ids": "a sequence of integers of 32 bits",
    "allowed_token_ids": "a sequence of integers of 32 bits",
    "min_tokens": "an integer of 32 bits",
    "json_schema": "None, a mapping or a text",
    "json_object": "True or False",
    "regex": "None or a text",
    "ebnf": "None or a text",
    "structural_tag": "None, a mapping or a text",
}

_GRAMMARS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag")
_NUMBERS_OR_NONE = ("seed", "draft_length", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_MAY_BE_NONE = (*_NUMBERS_OR_NONE, *set(_GRAMMARS) - {"json_object"})
_TRUTHS = tuple(name for name, wanted in _WANTED.items() if wanted == "True or False")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample and when to stop.

    Every field is sent, so that what is not given is greedy whatever the model's generation config says: texts that are
    compared must not depend on it. ``Client.capabilities`` tells what the model would.

    Only what could not be sent is refused here; the server judges the ranges, so that there is one truth.

    Raises:
        InvalidArgumentError: a value of the wrong type, naming the field.
    """

    max_tokens: int = 64
    """Most tokens to generate, at least 1; prompt and completion together may not exceed the model's length. 0 beside
    ``echo`` or ``prompt_logprobs`` only scores the prompt."""

    temperature: float = 0.0
    """0 is greedy; finite, at least 0."""

    top_k: int = 0
    """Keeps the k likeliest tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keeps the likeliest tokens that together reach this probability; in (0, 1]."""

    min_p: float = 0.0
    """Drops tokens less likely than this times the likeliest one's probability; in [0, 1]."""

    seed: int | None = None
    """Makes the text a function of (seed, prompt, model) alone, whatever the draft; 64 bits. Those below 0 are as
    their two's complement, so that -1 is 2**64 - 1."""

    stop: str | Sequence[str] = ()
    """Texts that end the completion and are not part of it; special tokens by their names. At most 16, none empty."""

    stop_token_ids: Sequence[int] = ()
    """Tokens that end the completion; part of ``token_ids``, not of the text."""

    ignore_eos: bool = False
    """Goes on after the model's own end token."""

    acceptance: Acceptance | None = None
    """Rule by which draft tokens are kept, all lossless. None: "match" for temperature 0 and for seeds, else the
    server's default."""

    draft_length: int | None = None
    """Most draft tokens per round, from 0 to 64; 0 does without the draft. None: the server's. No choice changes the
    text of a greedy or seeded request."""

    n: int = 1
    """Completions of the same prompt, from 1 to 128; see ``Completion.samples``. The first is what it is alone."""

    echo: bool = False
    """Sends the prompt back; see ``Completion.prompt``."""

    logprobs: int | None = None
    """Gives every token its log probability by the model's own law, before temperature and whatever else shapes it, and
    so many of the likeliest tokens in its place, from 0 to 20; see ``Token``. None: neither."""

    prompt_logprobs: int | None = None
    """The same for the prompt, from its second token on; see ``Prompt``. It is then computed as a whole, whatever the
    prefix cache holds."""

    adaptive_draft_length: bool = False
    """Has the server choose the draft tokens from round to round, by what pays, where its default is a fixed number;
    not beside ``draft_length``."""

    draft_model: str = ""
    """Name of the drafters that draft for this request, or their way of drafting: "model", "mtp", "eagle3" and so on.
    It goes without while none of them answers. Empty: any."""

    show_proposals: bool = False
    """Pieces bring the proposals that they came of; see ``Piece.proposal``."""

    include_stop_str_in_output: bool = False
    """What ends the completion is part of its text: the stop text, or the text of the stop or end token."""

    skip_special_tokens: bool = True
    """Special tokens of the completion have no text; False writes them out."""

    truncate_prompt_tokens: int | None = None
    """Keeps so many of the prompt's last tokens, from 1 to the model's length; -1 keeps as many as fit before
    max_tokens. None: a prompt is never cut."""

    repetition_penalty: float = 1.0
    """Divides the logits of tokens of the prompt and the completion so far, or multiplies those below 0; above 0."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that stand in the completion so far; in [-2, 2]."""

    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token stands in the completion so far; in [-2, 2]."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of token ids; in [-100, 100], of which -100 bans the token altogether. At most 1024."""

    banned_token_ids: Sequence[int] = ()
    """Tokens that never come; at most 1024."""

    allowed_token_ids: Sequence[int] = ()
    """No others come, unless it is empty; at most 4096."""

    min_tokens: int = 0
    """Tokens of the completion before an end token, a stop token or a stop text can end it; at most max_tokens."""

    json_schema: str | Mapping[str, Any] | None = None
    """JSON schema that the completion fits, as a mapping or as JSON; of this and the next four, one at most."""

    json_object: bool = False
    """The completion is a JSON object."""

    regex: str | None = None
    """Regular expression that the whole completion matches."""

    ebnf: str | None = None
    """Rules in GBNF that the completion keeps to, from ``root`` on."""

    structural_tag: str | Mapping[str, Any] | None = None
    """xgrammar's structural tag, as a mapping or as JSON: calls of tools in free text."""

    def __post_init__(self) -> None:
        self.to_pb()

    def to_pb(self) -> pb.SamplingParams:
        """The message of the contract."""
        message = pb.SamplingParams()
        given = [name for name in _GRAMMARS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise refusal(given[1], "given", f"so is {given[0]}; a completion keeps to one grammar")
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            try:
                message.MergeFrom(pb.SamplingParams(**{name: _wire_value(name, value)}))
            except (TypeError, ValueError, KeyError) as error:
                raise refusal(name, shown(value), f"it must be {_WANTED[name]}") from error
        return message


def _wire_value(name: str, value: Any) -> Any:
    """The value for protobuf, which itself refuses wrong types and what does not fit."""
    if name == "stop":
        return [value] if isinstance(value, str) else list(value)
    if name == "logit_bias":
        return {token_id: _wire_value(name + " value", bias) for token_id, bias in dict(value).items()}
    if name == "acceptance":
        return None if value is None else _RULES[value]
    if value is None and name not in _MAY_BE_NONE:
        raise TypeError(f"{name} may not be None")
    if isinstance(value, bytes):
        raise TypeError("protobuf would take bytes for a text")
    if isinstance(value, bool) is not (name in _TRUTHS):
        raise TypeError("a truth value is no number, and a number no truth value")
    if name == "seed" and isinstance(value, int) and -(2**63) <= value < 0:
        return value + 2**64  # unsigned on the wire
    if name in ("json_schema", "structural_tag") and isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if name == "json_object":
        return value or None  # False is no grammar, and must not stand in the place of another
    return value
