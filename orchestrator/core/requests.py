"""Requests: what a client asked for, where it stands, and which moves are legal.

    waiting ──► prefill ──► running ──► finished
       ▲           │           │
       └───────────┴───────────┘        preempted, or the target went away
    (from every state but finished a request may finish: cancelled, failed)

A request holds every token it has, prompt and completion. Its place in a worker's cache is a
``RowCache`` and may be lost at any time: what is not cached is prefilled again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.core.acceptance import Rule
from orchestrator.core.features import Features
from orchestrator.core.pages import RowCache
from orchestrator.core.shaping import NOTHING, Shaping
from pilotfish.steps import DrawRule, Ints, ProposalKind

MAX_ADAPTIVE_LENGTH = 16
"""Most draft tokens of a row whose draft length is chosen by the server."""

PROPOSE_BEHIND = 32
"""Most committed tokens that a proposal step brings; a row further behind catches up first.

As many features come with the target's answers at once, and are kept; more are read when they are needed.
"""


_LEAST_BUFFER = 256
"""Tokens that a request has room for once it has any of its own; the room grows as it fills, whatever max_tokens is."""


class State(Enum):
    """Where a request stands."""

    WAITING = auto()
    """Holds no pages of the target."""
    PREFILL = auto()
    """Scheduled; more than its last token is not yet in the target's cache."""
    RUNNING = auto()
    """Everything but its last token is cached; each round verifies a proposal."""
    FINISHED = auto()
    """Ended, for whatever reason; holds no pages."""


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL, State.FINISHED}),
    State.PREFILL: frozenset({State.RUNNING, State.WAITING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


PARAMS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("seed", "u8"),
        ("draw_rule", "u1"),
        ("proposal_kind", "u1"),
        ("is_shaped", "?"),
        ("wants_logprobs", "?"),
    ]
)
"""What a step says of how a row samples; the same in every round."""


Tops = tuple[tuple[int, float], ...]
"""Token ids and their log probabilities, likeliest first."""


class TokenLogprobs(NamedTuple):
    """What the model thought of a token, by its own law.

    Attributes:
        logprob: of the token.
        top: the likeliest tokens in its place, as many as were asked for.
    """

    logprob: float
    top: Tops


@dataclass(frozen=True, slots=True)
class Params:
    """How a request samples and when it ends on token ids; ranges are checked where it comes in."""

    max_tokens: int  # 0: the request ends once its prompt is computed
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    rule: Rule = Rule.MATCH
    draft_length: int | None = 0  # None: the server chooses, from round to round
    end_token_ids: frozenset[int] = frozenset()
    shaping: Shaping = NOTHING
    draft_model: str = ""  # name or scheme of the replicas that may draft for it; empty: any
    show_proposals: bool = False
    logprobs: int | None = None  # how many of the likeliest tokens come beside each token's own; None: nothing comes
    prompt_logprobs: int | None = None  # the same of the prompt
    packed: bytes = field(init=False, repr=False, compare=False)
    """One element of ``PARAMS``: those of many rows are joined in no time."""

    def __post_init__(self) -> None:
        values = tuple(getattr(self, name) for name in PARAMS.names or ())
        object.__setattr__(self, "packed", np.array(values, PARAMS).tobytes())

    @property
    def is_shaped(self) -> bool:
        """Whether the workers have anything to do to its logits."""
        return self.shaping != NOTHING

    @property
    def wants_logprobs(self) -> bool:
        """Of the completion or of the prompt."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def draw_rule(self) -> DrawRule:
        """Noise of the target's draws: only the match rule shares it with the drafter."""
        return DrawRule.MATCH if self.rule is Rule.MATCH else DrawRule.OUTSIDE

    @property
    def proposal_kind(self) -> ProposalKind:
        """How a drafter must propose for the rule to be exact."""
        if self.rule is not Rule.MATCH:
            return ProposalKind.SAMPLED
        return ProposalKind.MATCHED if self.temperature > 0 else ProposalKind.GREEDY


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlace:
    """Where a row drafts.

    Attributes:
        replica: its name.
        cache: the row's pages there.
        lookahead: slots less than tokens: 1 if the replica drafts on features, as slot i then holds the
            feature of token i and the token after it.
        drafter: name of the replica's model.
    """

    replica: str
    cache: RowCache
    lookahead: int = 0
    drafter: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        tokens: prompt and completion so far, i32[length], a view.
        priority: lower goes first, whatever the arrival.
        arrival: grows from request to request, set when it is submitted.
        round_index: counts the target's answers to this row; part of the noise of its draws.
        target: place in the target's cache.
        draft: place in a draft replica's cache, if it has one.
        features: those of its newest slots in the target's cache, if they came with the target's answers.
        may_draft: whether replicas may propose for it; not if they fail at it.
        cached_tokens: prompt tokens found in the target's prefix cache when first scheduled.
        highest_token: largest id among its tokens.
        draft_length: most draft tokens in its next round; the params' own, or as last chosen.
        tree_nodes: nodes of its proposal in its next round, where its drafter grows trees; 0 asks for a chain.
        prompt_logprobs: of its prompt tokens from the second on, as far as they are known; see ``Params``.
        judged: how its draft tokens fared, decayed counts, f64[2, positions]; see ``survival``.
    """

    id: str
    prompt: Ints
    params: Params
    priority: int = 0
    state: State = State.WAITING
    round_index: int = 0
    length: int = 0
    target: RowCache | None = None
    draft: DraftPlace | None = None
    features: Features | None = None
    may_draft: bool = True
    arrival: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    highest_token: int = field(init=False)
    draft_length: int = field(init=False)
    tree_nodes: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    judged: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, MAX_ADAPTIVE_LENGTH)))
    _buffer: Ints = field(init=False)

    def __post_init__(self) -> None:
        self._buffer = self.prompt  # which samples share; the first token that is appended makes it the request's own
        self.length = len(self.prompt)
        self.highest_token = int(self.prompt.max())
        self.draft_length = self.params.draft_length or 0

    @property
    def tokens(self) -> Ints:
        return self._buffer[: self.length]

    @property
    def order(self) -> tuple[int, int]:
        """What goes first is smaller; the largest is the first to be preempted."""
        return self.priority, self.arrival

    @property
    def generated(self) -> int:
        """Completion tokens so far."""
        return self.length - len(self.prompt)

    @property
    def reusable(self) -> int:
        """Tokens that it need not compute where others have: not its last, and none after which one is to be scored."""
        if self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1:
            return len(self.prompt_logprobs)
        return self.length - 1

    @property
    def draft_room(self) -> int:
        """Most draft tokens that can be of use: the round's own token must still fit."""
        return max(0, self.params.max_tokens - self.generated - 1)

    @property
    def draft_limit(self) -> int:
        """Draft tokens to ask for."""
        return min(self.draft_length, self.draft_room) if self.may_draft else 0

    @property
    def draft_lag(self) -> int:
        """Tokens that the row has and its draft replica has not cached."""
        place = self.draft
        return self.length if place is None else self.length - place.lookahead - place.cache.length

    def move(self, state: State) -> None:
        """Changes the state; an illegal move is a bug and raises ``RuntimeError``."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"request {self.id} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def append(self, token_ids: list[int]) -> None:
        """Commits tokens to the completion."""
        length = self.length + len(token_ids)
        if length > len(self._buffer):
            most = len(self.prompt) + self.params.max_tokens
            grown = np.zeros(min(max(2 * length, _LEAST_BUFFER), most), np.int32)
            grown[: self.length] = self.tokens
            self._buffer = grown
        self._buffer[self.length : length] = token_ids
        self.length = length
        self.highest_token = max([self.highest_token, *token_ids])

    def drop_target(self) -> None:
        """Gives up the place in the target's cache."""
        if self.target is not None:
            self.target.release()
        self.target = self.features = None

    def drop_draft(self) -> None:
        """Gives up the place in the draft replica's cache."""
        if self.draft is not None:
            self.draft.cache.release()
        self.draft = None
