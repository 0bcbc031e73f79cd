"""From what a client sent to a request: defaults filled in, every range checked and named."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from orchestrator.core.acceptance import Rule
from orchestrator.core.requests import Params, Request
from orchestrator.core.shaping import Shaping
from orchestrator.json_schema import written_tag, written_text
from pilotfish.errors import shown
from pilotfish.steps import MAX_GRAMMAR_BYTES, MAX_WRITTEN_BYTES, Grammar, GrammarKind, require

MAX_STOPS = 16
MAX_STOP_LENGTH = 4096  # characters of one
MAX_STOP_TOKENS = 1024
MAX_REQUEST_ID_LENGTH = 256
MAX_INT32 = 2**31 - 1
MAX_DRAFT_LENGTH = 64
MAX_SAMPLES = 128
MAX_TIMEOUT_S = 7 * 24 * 3600.0
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ALLOWED = 4096
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")  # those that are texts
BAN = -100.0  # as logit_bias


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for; None where it said nothing. Meanings as in generation.proto."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    acceptance: Rule | None = None
    draft_length: int | None = None
    n: int | None = None
    echo: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    adaptive_draft_length: bool = False
    draft_model: str = ""
    show_proposals: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the server does where a client says nothing."""

    draft_length: int | None  # None: chosen from round to round
    acceptance: Rule
    end_token_ids: frozenset[int]
    max_tokens: int = 64
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """What the model's generation config says, by the names of ``Asked``; see ``sampling_defaults``."""

    def fill(self, asked: Asked, room: int | None = None) -> Asked:
        """What a client asked for, and what the model or the server would where it said nothing.

        Args:
            asked: by the client.
            room: tokens that fit behind the prompt, so that no default is beyond it; None if that is not known.
        """
        most = int(self.sampling.get("max_tokens", self.max_tokens))
        unsaid: dict[str, Any] = {**self.sampling, "max_tokens": most if room is None else min(most, max(room, 1))}
        return replace(asked, **{name: value for name, value in unsaid.items() if getattr(asked, name) is None})

    def check(self) -> None:
        """Returns if a request that says nothing is sound.

        Raises:
            InvalidArgumentError: naming field, value and limit.
        """
        admit("defaults", [0], self.fill(Asked()), self, vocab_size=1)


def admit(
    request_id: str, prompt: Sequence[int], asked: Asked, defaults: Defaults, vocab_size: int, priority: int = 0
) -> tuple[Request, ...]:
    """One request for each sample, sound in itself; whether it fits the target is for the scheduler to say.

    Everything is checked before anything is made of it, and counts before what they count.

    Args:
        request_id: of the first; the others' are made of it.
        prompt: token ids.
        asked: of the client, filled in by the defaults.
        defaults: of the server.
        vocab_size: ids are below it.
        priority: see ``Request``.

    Raises:
        InvalidArgumentError: naming field, value and limit.
    """
    check_request_id("request_id", request_id)
    require(len(prompt) > 0, "prompt", "empty", "it must have at least one token")
    check_ids("prompt token_ids", prompt, vocab_size)
    _check_stops(asked.stop)
    _check_count("stop_token_ids", asked.stop_token_ids, MAX_STOP_TOKENS)
    check_ids("stop_token_ids", asked.stop_token_ids, vocab_size)
    samples = _integer("n", asked.n, 1, 1, MAX_SAMPLES)
    max_tokens = _integer("max_tokens", asked.max_tokens, defaults.max_tokens, 0)
    has_other = asked.echo or asked.prompt_logprobs is not None
    require(max_tokens > 0 or has_other, "max_tokens", 0, "must be at least 1, or beside echo or prompt_logprobs 0")
    _integer("priority", priority, 0, -MAX_INT32 - 1)
    ends = frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else defaults.end_token_ids)
    params = Params(
        max_tokens=max_tokens,
        temperature=_number("temperature", asked.temperature, 0.0),
        top_k=_integer("top_k", asked.top_k, 0, 0),
        top_p=_number("top_p", asked.top_p, 1.0, high=1.0, open_low=True),
        min_p=_number("min_p", asked.min_p, 0.0, high=1.0),
        seed=_seed(asked.seed),
        rule=_rule(asked, defaults),
        draft_length=_draft_length(asked, defaults),
        end_token_ids=ends,
        draft_model=asked.draft_model,
        show_proposals=asked.show_proposals,
        logprobs=_top_count("logprobs", asked.logprobs),
        prompt_logprobs=_top_count("prompt_logprobs", asked.prompt_logprobs),
        shaping=_shaping(asked, max_tokens, defaults.end_token_ids, vocab_size),
    )
    tokens = np.array(prompt, np.int32)
    first = Request(request_id, tokens, params, priority)
    others = replace(params, prompt_logprobs=None)  # which one is enough to find out
    return first, *(
        Request(f"{request_id}/{i}", tokens, replace(others, seed=sample_seed(params.seed, i)), priority)
        for i in range(1, samples)
    )


def truncate(prompt: Sequence[int], count: int | None, max_tokens: int, max_len: int) -> Sequence[int]:
    """A prompt's last tokens.

    Args:
        prompt: token ids.
        count: how many are kept; -1 for as many as fit before the completion, None for all.
        max_tokens: of the completion.
        max_len: of the model, 0 if that is not known yet.

    Raises:
        InvalidArgumentError: naming field, value and limit.
    """
    if count is None:
        return prompt
    most = max_len or MAX_INT32
    allowed = f"must be in [1, {most}], or -1 for what fits"
    require(count == -1 or 1 <= count <= most, "truncate_prompt_tokens", count, allowed)
    if count == -1:
        count = max(1, max_len - max_tokens) if max_len else len(prompt)
    return prompt[-count:]


def sample_seed(seed: int, index: int) -> int:
    """Seed of one sample of several: that of the first is the request's own.

    So a seeded request for one sample has the text of the first of many, and others have texts of their own.
    """
    if index == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")


def check_request_id(name: str, value: str) -> str:
    """The id, if it can stand in a header and in a line of a log; empty where none is given.

    Raises:
        InvalidArgumentError: it cannot.
    """
    length = len(value)
    require(length <= MAX_REQUEST_ID_LENGTH, name, f"{length} characters", f"at most {MAX_REQUEST_ID_LENGTH}")
    is_visible = all("!" <= character <= "~" for character in value)
    require(is_visible, name, shown(value), "it must be visible ASCII characters, without spaces")
    return value


def check_timeout(timeout_s: float | None) -> float | None:
    """Seconds that a request may take, None for ever.

    Raises:
        InvalidArgumentError: naming field, value and limit.
    """
    if timeout_s is None:
        return None
    return _number("timeout_s", timeout_s, 0.0, high=MAX_TIMEOUT_S, open_low=True)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Returns if the model may know all of these token ids.

    Raises:
        InvalidArgumentError: naming field, value and limit.
    """
    if len(ids) and not (min(ids) >= 0 and max(ids) < vocab_size):
        index, token_id = next((index, each) for index, each in enumerate(ids) if not 0 <= each < vocab_size)
        require(False, f"{name}[{index}]", token_id, f"must be in [0, {vocab_size})")


def _top_count(name: str, count: int | None) -> int | None:
    if count is not None:
        require(0 <= count <= MAX_TOP_LOGPROBS, name, count, f"must be in [0, {MAX_TOP_LOGPROBS}]")
    return count


def _shaping(asked: Asked, max_tokens: int, end_token_ids: frozenset[int], vocab_size: int) -> Shaping:
    low = _integer("min_tokens", asked.min_tokens, 0, 0)
    require(low <= max_tokens, "min_tokens", low, f"must be at most max_tokens, which is {max_tokens}")
    _check_count("logit_bias", asked.logit_bias, MAX_BIASES)
    for name, most in (("banned_token_ids", MAX_BIASES), ("allowed_token_ids", MAX_ALLOWED)):
        _check_count(name, getattr(asked, name), most)
        check_ids(name, getattr(asked, name), vocab_size)
    return Shaping(
        repetition_penalty=_number("repetition_penalty", asked.repetition_penalty, 1.0, open_low=True),
        presence_penalty=_between("presence_penalty", asked.presence_penalty, -2, 2),
        frequency_penalty=_between("frequency_penalty", asked.frequency_penalty, -2, 2),
        logit_bias=_biases(asked, vocab_size),
        allowed_token_ids=tuple(asked.allowed_token_ids),
        min_tokens=low,
        grammar=_grammar(asked, end_token_ids),
    )


def _grammar(asked: Asked, end_token_ids: frozenset[int]) -> Grammar | None:
    """The grammar, of which there is one at most.

    Here JSON schemas are read; whether the others are sound is for the target to say.
    """
    texts = {GrammarKind[name.upper()]: getattr(asked, name) for name in GRAMMARS}
    given = [(kind, text) for kind, text in texts.items() if text is not None]
    if asked.json_object:
        given.append((GrammarKind.JSON_OBJECT, ""))
    if not given:
        return None
    kind, text = given[0]
    name, size = kind.name.lower(), len(text.encode())
    require(len(given) == 1, name, "given", f"so is {given[-1][0].name.lower()}; a completion keeps to one grammar")
    require(text or kind is GrammarKind.JSON_OBJECT, name, "empty", "give a grammar, or leave it out")
    require(size <= MAX_GRAMMAR_BYTES, name, f"of {size} bytes", f"at most {MAX_GRAMMAR_BYTES} are allowed")
    require(not asked.ignore_eos, "ignore_eos", "set", f"with {name} the end token ends the text that fits it")
    require(not asked.min_tokens, "min_tokens", asked.min_tokens, f"must be 0 with {name}, which may be short")
    require(len(end_token_ids) > 0, name, "given", "this model has no end token, so that no grammar could end")
    if kind is GrammarKind.JSON_SCHEMA:
        text = written_text(text, name)
    elif kind is GrammarKind.STRUCTURAL_TAG:
        text = written_tag(text, name)
    size = len(text.encode())
    require(size <= MAX_WRITTEN_BYTES, name, f"of {size} bytes written out", f"at most {MAX_WRITTEN_BYTES} are allowed")
    return Grammar(kind, text, tuple(sorted(end_token_ids)))


def _biases(asked: Asked, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Biases and bans, by token id."""
    banned = asked.banned_token_ids
    for token_id, bias in asked.logit_bias.items():
        require(0 <= token_id < vocab_size, "logit_bias", f"of token {token_id}", f"ids must be in [0, {vocab_size})")
        _between(f"logit_bias of token {token_id}", bias, -100, 100)
    both = asked.logit_bias.keys() & set(banned)
    require(not both, "banned_token_ids", f"{sorted(both)}, in part", "logit_bias names these too; say it once")
    biases = {token_id: -math.inf if bias == BAN else bias for token_id, bias in asked.logit_bias.items()}
    return tuple(sorted((biases | dict.fromkeys(banned, -math.inf)).items()))


def _seed(seed: int | None) -> int:
    if seed is None:
        return secrets.randbits(64)
    require(-(1 << 63) <= seed < 1 << 64, "seed", seed, "must be in [-2**63, 2**64)")
    return seed % (1 << 64)  # the two's complement of those below 0


def _rule(asked: Asked, defaults: Defaults) -> Rule:
    if asked.acceptance is not None:
        return asked.acceptance
    is_function_of_seed = not asked.temperature or asked.seed is not None
    return Rule.MATCH if is_function_of_seed else defaults.acceptance


def _draft_length(asked: Asked, defaults: Defaults) -> int | None:
    if asked.adaptive_draft_length:
        known = "leave it out, or adaptive_draft_length, which has the server choose it"
        require(asked.draft_length is None, "draft_length", asked.draft_length, known)
        return None
    if asked.draft_length is None:
        return defaults.draft_length
    return _integer("draft_length", asked.draft_length, 0, 0, MAX_DRAFT_LENGTH)


def _integer(name: str, value: int | None, default: int, low: int, high: int = MAX_INT32) -> int:
    value = default if value is None else value
    require(value >= low, name, value, f"must be at least {low}")
    require(value <= high, name, value, f"must be at most {high}")
    return value


def _check_count(name: str, ids: Collection[int], most: int) -> None:
    require(len(ids) <= most, name, f"{len(ids)} ids", f"at most {most} may be")


def _number(name: str, value: float | None, default: float, high: float = math.inf, open_low: bool = False) -> float:
    with np.errstate(over="ignore"):  # infinity is refused below
        value = float(np.float32(default if value is None else value))  # as the workers will have it
    allowed = f"{'(' if open_low else '['}0, {high:g}{')' if math.isinf(high) else ']'}"
    fits = math.isfinite(value) and (value > 0 or (value == 0 and not open_low)) and value <= high
    require(fits, name, f"{value:g}", f"must be in {allowed}")
    return value


def _between(name: str, value: float | None, low: float, high: float) -> float:
    value = 0.0 if value is None else value
    require(low <= value <= high, name, f"{value:g}", f"must be in [{low:g}, {high:g}]")
    return value


def _check_stops(stops: Sequence[str]) -> None:
    require(len(stops) <= MAX_STOPS, "stop", f"{len(stops)} texts", f"at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        name, length = f"stop[{index}]", len(stop)
        require(length > 0, name, "empty", "a stop text has at least one character")
        require(length <= MAX_STOP_LENGTH, name, f"{length} characters", f"at most {MAX_STOP_LENGTH} are allowed")
