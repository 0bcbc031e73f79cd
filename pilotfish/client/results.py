"""What comes back, as plain immutable values, and how the stream's events fold into them. No IO."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from pilotfish.errors import FailedPreconditionError, InternalError
from pilotfish.v1 import generation_pb2 as pb

TokenKind = Literal["accepted", "recovered", "bonus"]
FinishReason = Literal["stop", "length"]

_KINDS: dict[int, TokenKind] = {
    pb.TOKEN_KIND_ACCEPTED: "accepted",
    pb.TOKEN_KIND_RECOVERED: "recovered",
    pb.TOKEN_KIND_BONUS: "bonus",
}
_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_RULES = {
    pb.ACCEPTANCE_RULE_MATCH: "match",
    pb.ACCEPTANCE_RULE_RATIO: "ratio",
    pb.ACCEPTANCE_RULE_BLOCK: "block",
}


@dataclass(frozen=True)
class RoundTimes:
    """One round, split; in microseconds. The first four parts sum to the time from the end of the round before."""

    target_us: int
    """The target model at work."""
    draft_us: int
    """The slowest draft replica at work."""
    hops_us: int
    """Waiting for workers beyond their work: serialisation and network."""
    orchestrator_us: int
    """The orchestrator itself on the critical path."""
    feature_read_us: int = 0
    """Waiting for features that were read from the target for rows that catch up, beside all that."""
    feature_bytes: int = 0
    """Features that came from the target and went to draft replicas, in bytes."""


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model thought of a token in its place by its own law, before temperature and whatever else shapes it."""

    logprob: float
    """Of the token; natural logarithm."""
    top: tuple[tuple[int, float], ...]
    """Token ids and log probabilities of the likeliest tokens, likeliest first, as many as were asked for."""


@dataclass(frozen=True)
class Token:
    """One token of a completion."""

    id: int
    text: str
    """Text that became final with it; empty inside a character or where a stop text could begin."""
    kind: TokenKind
    """"accepted": a draft token that was kept; "recovered": the target's token where the draft failed; "bonus": the
    target's token after a fully accepted path, which may be empty."""
    logprobs: TokenLogprobs | None = None
    """Where ``logprobs`` asked for it."""


@dataclass(frozen=True)
class Prompt:
    """The prompt as the server read it."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...] = field(repr=False)
    """Text of each token; of special ones their names, but none of those that were put around a plain text."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of each token, None for the first; empty unless ``prompt_logprobs`` asked for them."""

    @property
    def text(self) -> str:
        return "".join(self.token_texts)


@dataclass(frozen=True)
class Proposal:
    """The draft of one round: a chain, or a tree."""

    token_ids: tuple[int, ...]
    """Of its nodes."""
    parents: tuple[int, ...]
    """Index of each node's parent, before it; -1 follows the last token there was."""
    accepted: tuple[int, ...]
    """Nodes that were kept, a path from the root down."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each node by the law from which the drafter drew it and its siblings, as it was drawn from: after temperature
    and whatever else shapes it. Empty unless ``logprobs`` asked for them, and where no such law travels (match)."""


@dataclass(frozen=True)
class Piece:
    """What one round added to one sample."""

    tokens: tuple[Token, ...]
    """Maybe none, or more than the round's: with stop texts a token comes once its text can be no part of one."""
    drafted: int
    """Draft tokens that were judged in the round."""
    times: RoundTimes
    index: int = 0
    """Which sample, from 0."""
    accepted: int = 0
    """Draft tokens of those judged that were kept."""
    proposal: Proposal | None = None
    """What was drafted for the round, where ``show_proposals`` asked for it."""

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    @property
    def kinds(self) -> tuple[TokenKind, ...]:
        return tuple(token.kind for token in self.tokens)


@dataclass(frozen=True)
class Usage:
    """What a completion cost."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the target's prefix cache."""
    rounds: int
    """Propose, verify, accept cycles; the tokens that prefills end with belong to none."""
    drafted: int
    """Draft tokens judged by the target."""
    accepted: int
    """Draft tokens kept."""
    accepted_per_position: tuple[int, ...]
    """Element i: rounds in which the draft token at depth i + 1 was kept."""
    drafted_per_position: tuple[int, ...]
    """Element i: rounds that had a draft token at depth i + 1."""
    queue_us: int
    """From arrival to first being scheduled, in microseconds."""
    first_token_us: int
    """From arrival to the first token, in microseconds."""
    total_us: int
    """From arrival to the end, in microseconds."""
    round_total: RoundTimes
    """Sums over the rounds."""
    round_median: RoundTimes
    """Medians over the rounds."""
    preemptions: int
    """Times the request lost its pages to others and was prefilled again."""

    @property
    def acceptance(self) -> float | None:
        """Share of the draft tokens that were kept; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        """The kept draft tokens and the target's own, per round; None without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else None


@dataclass(frozen=True)
class Completion:
    """A finished request; of several samples the first, which has the others."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    """"stop": an end token, a stop token or a stop text; "length": ``max_tokens`` was reached."""
    usage: Usage
    request_id: str
    model: str
    pieces: tuple[Piece, ...] = field(repr=False)
    """The completion, round by round."""
    index: int = 0
    """Which sample, from 0."""
    others: tuple[Completion, ...] = ()
    """The other samples of ``n``, by index."""
    prompt: Prompt | None = None
    """Where ``echo`` or ``prompt_logprobs`` asked for it."""

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log probability of each token; empty unless ``logprobs`` asked for them."""
        tokens = [token.logprobs for piece in self.pieces for token in piece.tokens]
        return tuple(token.logprob for token in tokens if token is not None)

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All samples, this one first."""
        return (self, *self.others)


@dataclass(frozen=True)
class ServerInfo:
    """What is served."""

    model: str
    version: str
    max_len: int
    """Longest prompt plus completion, in tokens."""
    vocab_size: int
    """Rows of the model's output layer."""
    draft_length: int
    """Most draft tokens per round of a request that names none; 0 without a draft."""
    adaptive_draft_length: bool
    """Whether the server chooses them from round to round, by what pays."""
    draft_replica_count: int
    """Draft replicas that answer now."""
    draft_model: str
    """Name of the drafter's model; empty without one."""
    target_ready: bool
    """False while the target is away."""


@dataclass(frozen=True)
class FieldCapability:
    """One field of a request, by the name that it has in the contract."""

    name: str
    range: str
    """What it may be, in words or as an interval."""
    default: str
    honoured: bool
    reason: str
    """Why it is not honoured; empty if it is."""


@dataclass(frozen=True)
class DrafterCapability:
    """One kind of draft replicas."""

    model: str
    scheme: str
    """How it drafts; it and ``model`` are for ``SamplingParams.draft_model``."""
    acceptance_rules: tuple[str, ...]
    """Rules by which its drafts can be judged."""
    grows_trees: bool
    replica_count: int


@dataclass(frozen=True)
class Capabilities:
    """What a deployment honours now."""

    fields: tuple[FieldCapability, ...]
    drafters: tuple[DrafterCapability, ...]


class Fold:
    """Folds the events of one ``Generate`` call: started, the prompt, then of each sample pieces and finished.

    Raises:
        InternalError: the server breaks that order or sends a value that the contract refuses.
    """

    def __init__(self) -> None:
        self._started: pb.Started | None = None
        self._prompt: Prompt | None = None
        self._pieces: dict[int, list[Piece]] = {}  # by sample
        self._finished: dict[int, pb.Finished] = {}

    def add(self, response: pb.GenerateResponse) -> Piece | None:
        """Takes the next event; returns what a piece brought, None for the others."""
        event = response.WhichOneof("event")
        if event == "started" and self._started is None:
            self._started = response.started
            self._pieces = {index: [] for index in range(max(response.started.sample_count, 1))}
            return None
        if event == "prompt" and self._started is not None and self._prompt is None:
            self._prompt = _prompt_from_pb(response.prompt)
            return None
        if event == "piece" and self._is_open(response.piece.index):
            piece = _piece_from_pb(response.piece)
            self._pieces[piece.index].append(piece)
            return piece
        if event == "finished" and self._is_open(response.finished.index):
            if response.finished.reason not in _REASONS:
                raise InternalError(f"the server sent finish reason {response.finished.reason}")
            self._finished[response.finished.index] = response.finished
            return None
        raise InternalError(f"the server sent event {event!r} out of order")

    def end(self) -> None:
        """The stream ended with status OK."""
        if not self._is_complete:
            raise InternalError("the server ended the stream without `finished`")

    @property
    def result(self) -> Completion:
        if self._started is None or not self._is_complete:
            raise FailedPreconditionError("the stream has no result before its end; read all its pieces first")
        others = tuple(self._completion(self._started, index) for index in range(1, len(self._pieces)))
        return replace(self._completion(self._started, 0), others=others)

    @property
    def _is_complete(self) -> bool:
        return self._started is not None and self._finished.keys() == self._pieces.keys()

    def _is_open(self, index: int) -> bool:
        """Whether more may come of this sample."""
        return index in self._pieces and index not in self._finished

    def _completion(self, started: pb.Started, index: int) -> Completion:
        pieces, finished = self._pieces[index], self._finished[index]
        return Completion(
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
            finish_reason=_REASONS[finished.reason],
            usage=_usage_from_pb(finished.usage),
            request_id=started.request_id,
            model=started.model,
            pieces=tuple(pieces),
            index=index,
            prompt=self._prompt,
        )


def server_info_from_pb(info: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        model=info.model,
        version=info.version,
        max_len=info.max_len,
        vocab_size=info.vocab_size,
        draft_length=info.draft_length,
        adaptive_draft_length=info.adaptive_draft_length,
        draft_replica_count=info.draft_replica_count,
        draft_model=info.draft_model,
        target_ready=info.target_ready,
    )


def capabilities_from_pb(found: pb.GetCapabilitiesResponse) -> Capabilities:
    return Capabilities(
        fields=tuple(
            FieldCapability(field.name, field.range, field.default, field.honoured, field.reason)
            for field in found.fields
        ),
        drafters=tuple(
            DrafterCapability(
                model=drafter.model,
                scheme=drafter.scheme,
                acceptance_rules=tuple(_RULES[rule] for rule in drafter.acceptance_rules),
                grows_trees=drafter.grows_trees,
                replica_count=drafter.replica_count,
            )
            for drafter in found.drafters
        ),
    )


def _piece_from_pb(piece: pb.Piece) -> Piece:
    if not len(piece.token_ids) == len(piece.token_texts) == len(piece.kinds):
        raise InternalError(
            f"the server sent {len(piece.token_ids)} token_ids with {len(piece.token_texts)} token_texts "
            f"and {len(piece.kinds)} kinds"
        )
    if unknown := [kind for kind in piece.kinds if kind not in _KINDS]:
        raise InternalError(f"the server sent token kind {unknown[0]}")
    logprobs = _logprobs_from_pb(piece.logprobs) or (None,) * len(piece.token_ids)
    if len(logprobs) != len(piece.token_ids):
        raise InternalError(f"the server sent {len(piece.token_ids)} token_ids with {len(logprobs)} logprobs")
    tokens = tuple(
        Token(token_id, text, _KINDS[kind], logprob)
        for token_id, text, kind, logprob in zip(piece.token_ids, piece.token_texts, piece.kinds, logprobs, strict=True)
    )
    proposal = None
    if piece.HasField("proposal"):
        found = piece.proposal
        if len(found.token_ids) != len(found.parents):
            raise InternalError(f"the server sent {len(found.token_ids)} drafted tokens, {len(found.parents)} parents")
        drafted = _logprobs_from_pb(found.logprobs)
        if drafted and len(drafted) != len(found.token_ids):
            raise InternalError(f"the server sent {len(found.token_ids)} drafted tokens, {len(drafted)} logprobs")
        proposal = Proposal(tuple(found.token_ids), tuple(found.parents), tuple(found.accepted), drafted)
    return Piece(tokens, piece.drafted, _times_from_pb(piece.times), piece.index, piece.accepted, proposal)


def _prompt_from_pb(prompt: pb.Prompt) -> Prompt:
    if len(prompt.token_ids) != len(prompt.token_texts):
        raise InternalError(f"the server sent {len(prompt.token_ids)} token_ids with {len(prompt.token_texts)} texts")
    logprobs = _logprobs_from_pb(prompt.logprobs)
    if logprobs and len(logprobs) != len(prompt.token_ids) - 1:
        raise InternalError(f"the server sent {len(prompt.token_ids)} token_ids with {len(logprobs)} logprobs")
    return Prompt(tuple(prompt.token_ids), tuple(prompt.token_texts), (None, *logprobs) if logprobs else ())


def _logprobs_from_pb(tokens: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token.logprob, tuple(zip(token.top_token_ids, token.top_logprobs, strict=True)))
        for token in tokens
    )


def _usage_from_pb(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        rounds=usage.rounds,
        drafted=usage.drafted,
        accepted=usage.accepted,
        accepted_per_position=tuple(usage.accepted_per_position),
        drafted_per_position=tuple(usage.drafted_per_position),
        queue_us=usage.queue_us,
        first_token_us=usage.first_token_us,
        total_us=usage.total_us,
        round_total=_times_from_pb(usage.round_total),
        round_median=_times_from_pb(usage.round_median),
        preemptions=usage.preemptions,
    )


def _times_from_pb(times: pb.RoundTimes) -> RoundTimes:
    return RoundTimes(**{part.name: getattr(times, part.name) for part in fields(RoundTimes)})
