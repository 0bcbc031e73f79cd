"""What must hold of every answer, whatever was asked. Pure."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pilotfish.client.params import SamplingParams
    from pilotfish.client.results import Completion, ServerInfo

_ROUNDING = 1e-3


def audit(params: SamplingParams, completion: Completion, info: ServerInfo) -> list[str]:
    """What is wrong with an answer by itself."""
    return [
        *_tokens(params, completion, info),
        *_end(params, completion),
        *_speculation(params, completion),
        *_logprobs(params, completion),
    ]


def _tokens(params: SamplingParams, completion: Completion, info: ServerInfo) -> list[str]:
    ids, faults = completion.token_ids, []
    fewest = 0 if params.stop else 1  # what comes may all belong to a stop text
    if not fewest <= len(ids) <= params.max_tokens:
        faults.append(f"{len(ids)} tokens with max_tokens {params.max_tokens}")
    if unknown := [each for each in ids if not 0 <= each < info.vocab_size]:
        faults.append(f"token id {unknown[0]} in a vocabulary of {info.vocab_size}")
    if completion.usage.completion_tokens != len(ids):
        faults.append(f"{len(ids)} tokens, but usage counts {completion.usage.completion_tokens}")
    banned = {*params.banned_token_ids, *(each for each, bias in params.logit_bias.items() if bias <= -100)}
    if params.allowed_token_ids:
        banned |= set(ids) - set(params.allowed_token_ids)
    if leaked := banned & set(ids):
        faults.append(f"token {min(leaked)} came, though the request forbids it")
    return faults


def _end(params: SamplingParams, completion: Completion) -> list[str]:
    """The end is where and what it should be, and nothing follows it."""
    ids, faults = completion.token_ids, []
    stops = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
    if params.min_tokens == 0 and (leaked := [stop for stop in stops if stop in completion.text]):
        faults.append(f"the text has the stop text {leaked[0]!r}")
    if len(ids) < params.min_tokens:
        faults.append(f"{len(ids)} tokens with min_tokens {params.min_tokens}")
    ends = set(params.stop_token_ids)
    if ends & set(ids[:-1]):
        faults.append(f"tokens follow stop token {next(each for each in ids if each in ends)}")
    if ends & set(ids[-1:]) and completion.finish_reason != "stop":
        faults.append(f"ended with stop token {ids[-1]}, but finish_reason is {completion.finish_reason}")
    if completion.finish_reason == "length" and len(ids) < params.max_tokens:
        faults.append(f"finish_reason is length after {len(ids)} of {params.max_tokens} tokens")
    if completion.finish_reason == "stop" and params.ignore_eos and not stops and not ends:
        faults.append("finish_reason is stop, but the request had nothing to stop at")
    return faults


def _speculation(params: SamplingParams, completion: Completion) -> list[str]:
    """The counts of drafted and kept tokens agree with each other and with what was asked."""
    usage, pieces, faults = completion.usage, completion.pieces, []
    accepted = sum(kind == "accepted" for piece in pieces for kind in piece.kinds)
    # Tokens that belong to a stop text do not come, and were drafted and kept all the same.
    if accepted > usage.accepted or usage.accepted > usage.drafted or (accepted < usage.accepted and not params.stop):
        faults.append(f"{accepted} tokens of kind accepted; usage counts {usage.accepted} of {usage.drafted} drafted")
    if params.draft_length is not None:
        if most := [piece.drafted for piece in pieces if piece.drafted > params.draft_length]:
            faults.append(f"{most[0]} tokens drafted in a round with draft_length {params.draft_length}")
        longest = max((len(piece.tokens) for piece in pieces), default=0)
        if longest > params.draft_length + 1 and not params.stop:  # else a token may come rounds after it was made
            faults.append(f"a round of {longest} tokens with draft_length {params.draft_length}")
    return faults


def _logprobs(params: SamplingParams, completion: Completion) -> list[str]:
    """There is one of each token, and those of the likeliest could be those of a law."""
    if params.logprobs is None:
        return []
    tokens = [token for piece in completion.pieces for token in piece.tokens]
    faults = []
    for token in tokens:
        if token.logprobs is None:
            return ["a token without the log probability that was asked for"]
        own, top = token.logprobs.logprob, [logprob for _, logprob in token.logprobs.top]
        if own > _ROUNDING or not all(a >= b for a, b in pairwise(top)):
            faults.append("log probabilities above 0, or not in order")
        if sum(map(math.exp, top)) > 1 + _ROUNDING:
            faults.append("probabilities of the likeliest tokens that sum to more than 1")
        told = dict(token.logprobs.top).get(token.id, own)
        if abs(told - own) > _ROUNDING:
            faults.append("a token whose log probability is another among the likeliest")
        if top and token.id not in dict(token.logprobs.top) and own > top[-1] + _ROUNDING:
            faults.append("a token that is likelier than the likeliest, but not among them")
    return faults
