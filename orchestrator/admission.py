"""From what a client sent to a request: defaults filled in, every range checked and named."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from orchestrator.core.acceptance import Rule
from orchestrator.core.requests import Params, Request
from pilotfish.errors import InvalidArgumentError
from pilotfish.steps import require

MAX_STOPS = 16
MAX_DRAFT_LENGTH = 64
MAX_SAMPLES = 128
MAX_TIMEOUT_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for; None where it said nothing. Meanings as in generation.proto."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    acceptance: Rule | None = None
    draft_length: int | None = None
    n: int | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the server does where a client says nothing."""

    draft_length: int | None  # None: chosen from round to round
    acceptance: Rule
    end_token_ids: frozenset[int]
    max_tokens: int = 64


def admit(
    request_id: str, prompt: list[int], asked: Asked, defaults: Defaults, priority: int = 0
) -> tuple[Request, ...]:
    """One request for each sample, sound in itself; whether it fits the target is for the scheduler to say.

    Raises:
        InvalidArgumentError: naming field, value and limit.
    """
    require(len(prompt) > 0, "prompt", "empty", "it must have at least one token")
    ends = frozenset(asked.stop_token_ids) | (frozenset() if asked.ignore_eos else defaults.end_token_ids)
    params = Params(
        max_tokens=_at_least("max_tokens", asked.max_tokens, defaults.max_tokens, 1),
        temperature=_number("temperature", asked.temperature, 0.0),
        top_k=_at_least("top_k", asked.top_k, 0, 0),
        top_p=_number("top_p", asked.top_p, 1.0, high=1.0, open_low=True),
        min_p=_number("min_p", asked.min_p, 0.0, high=1.0),
        seed=secrets.randbits(64) if asked.seed is None else asked.seed,
        rule=_rule(asked, defaults),
        draft_length=_draft_length(asked, defaults),
        end_token_ids=ends,
    )
    _check_stops(asked.stop)
    samples = _at_least("n", asked.n, 1, 1)
    require(samples <= MAX_SAMPLES, "n", samples, f"must be at most {MAX_SAMPLES}")
    tokens = np.array(prompt, np.int32)
    return tuple(
        Request(
            f"{request_id}/{index}" if index else request_id,
            tokens,
            replace(params, seed=sample_seed(params.seed, index)),
            priority,
        )
        for index in range(samples)
    )


def sample_seed(seed: int, index: int) -> int:
    """Seed of one sample of several: that of the first is the request's own.

    So a seeded request for one sample has the text of the first of many, and others have texts of their own.
    """
    if index == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")


def check_timeout(timeout_s: float | None) -> float | None:
    """Seconds that a request may take, None for ever.

    Raises:
        InvalidArgumentError: naming field, value and limit.
    """
    if timeout_s is None:
        return None
    return _number("timeout_s", timeout_s, 0.0, high=MAX_TIMEOUT_S, open_low=True)


def _rule(asked: Asked, defaults: Defaults) -> Rule:
    if asked.acceptance is not None:
        return asked.acceptance
    is_function_of_seed = not asked.temperature or asked.seed is not None
    return Rule.MATCH if is_function_of_seed else defaults.acceptance


def _draft_length(asked: Asked, defaults: Defaults) -> int | None:
    if asked.draft_length is None:
        return defaults.draft_length
    length = _at_least("draft_length", asked.draft_length, 0, 0)
    require(length <= MAX_DRAFT_LENGTH, "draft_length", length, f"must be at most {MAX_DRAFT_LENGTH}")
    return length


def _at_least(name: str, value: int | None, default: int, low: int) -> int:
    value = default if value is None else value
    require(value >= low, name, value, f"must be at least {low}")
    return value


def _number(name: str, value: float | None, default: float, high: float = math.inf, open_low: bool = False) -> float:
    value = default if value is None else value
    allowed = f"{'(' if open_low else '['}0, {high:g}{')' if math.isinf(high) else ']'}"
    fits = math.isfinite(value) and (value > 0 or (value == 0 and not open_low)) and value <= high
    require(fits, name, f"{value:g}", f"must be in {allowed}")
    return value


def _check_stops(stops: tuple[str, ...]) -> None:
    require(len(stops) <= MAX_STOPS, "stop", f"{len(stops)} texts", f"at most {MAX_STOPS} are allowed")
    if "" in stops:
        raise InvalidArgumentError(f"stop[{stops.index('')}] is empty; a stop text has at least one character")
