"""``pilotfish train capture``: the target's own text, with its hidden states, in shards.

A head learns best from what the target itself would write (on-policy data; HEADS.md, section 3.1), and from states as
the serving runtime computes them. Documents are numbered; a shard holds a block of consecutive numbers and is written
once all of them are there, so that a capture that was killed goes on after its last whole shard and writes the same
text. Same up to near-ties: the last bits of a state depend on what else is in the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from draft_svc.training.conversation import Conversations, Message
from draft_svc.training.documents import Document, Plan
from draft_svc.training.shards import CapturedDocument, Manifest, Shard, shard_path
from draft_svc.training.writing import Row, Writer
from pilotfish.errors import InvalidArgumentError, NotFoundError
from pilotfish.runtime.loading import LoadedModel, load_model

_QUESTION_TOP_P = 0.95  # questions from the tail of the distribution are noise
_SHORTEST_QUESTION = 4
_ATTEMPTS = 8
_SHORTEST_ANSWER = 16  # room that a prompt must leave


@dataclass(frozen=True, slots=True)
class CaptureConfig:
    """What to capture, and how."""

    plan: Plan
    features: tuple[str, ...]
    """States kept at every token, by the names of types.proto."""
    max_tokens: int = 256
    """Of an answer. Longer ones show more of what the target does late in an answer, from fewer prompts."""
    question_tokens: int = 200
    """Of a question that the target asks itself; one that is not over by then is thrown away."""
    max_len: int = 1024
    """Of prompt and answer together; prompts that leave no room are left out."""
    rows: int = 32
    """Written at once. More are faster, up to what the caches and the memory hold."""
    documents_per_shard: int = 64
    """A killed capture loses what it had of shards that were not whole."""

    def __post_init__(self) -> None:
        limits = {
            "max_tokens": 1,
            "question_tokens": 1,
            "max_len": 2 * _SHORTEST_ANSWER,
            "rows": 1,
            "documents_per_shard": 1,
        }
        for name, low in limits.items():
            if getattr(self, name) < low:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; must be at least {low}")
        if not self.features:
            raise InvalidArgumentError("features is empty; name at least one state, such as final")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a capture is."""

    answer_tokens: int
    documents: int
    shards: int


def capture(
    folder: Path,
    out: Path,
    config: CaptureConfig,
    *,
    answer_tokens: int,
    dtype: str = "auto",
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Manifest:
    """Captures until so many answer tokens are on disk, those of an earlier capture included.

    Args:
        folder: of the target.
        out: made if need be; a capture of the same recipe there is gone on with.
        config: what to capture.
        answer_tokens: that are enough.
        dtype: that the target computes in; that of the target service.
        on_progress: told after every document.

    Raises:
        InvalidArgumentError: if ``out`` holds a capture of another target or recipe, or the model cannot do this.
        NotFoundError: if the model is missing.
    """
    conversations = Conversations(folder)
    model = load_model(folder, dtype=dtype)
    config = _fitting(replace(config, max_len=min(config.max_len, model.config.max_len)), conversations)
    out.mkdir(parents=True, exist_ok=True)
    manifest = _resumed(out, _new_manifest(model, config))
    if manifest.answer_tokens >= answer_tokens:
        return manifest
    manifest = _without_loose_ends(out, manifest, config)
    blocks = _Blocks(out, manifest, config)
    author = _Author(model, conversations, config)
    first = manifest.whole_shards * config.documents_per_shard
    for document in author.write(islice(config.plan.documents(), first, None)):
        blocks.add(*document)
        on_progress(Progress(blocks.answer_tokens, blocks.documents, blocks.manifest.shards))
        if blocks.answer_tokens >= answer_tokens:
            break
    blocks.finish(is_end=blocks.answer_tokens < answer_tokens)
    return blocks.manifest


class _Author:
    """Has documents written, so many at once; gives each back when it is done, so not in their order."""

    def __init__(self, model: LoadedModel, conversations: Conversations, config: CaptureConfig) -> None:
        self._conversations, self._config = conversations, config
        self._opening, self._question_end = conversations.question_opening() if config.plan.ask_itself else ([], -1)
        self._writer = Writer(model, rows=config.rows, max_len=config.max_len, features=config.features)
        self._documents: dict[int, tuple[Document, int]] = {}  # by place: document, and tokens of its prompt

    def write(self, documents: Iterator[Document]) -> Iterator[tuple[int, CapturedDocument]]:
        """(number, document) of all."""
        rows: list[Row] = []
        free = list(range(self._config.rows))[::-1]
        while True:
            while free and (document := next(documents, None)) is not None:
                rows.append(self._begin(document, free.pop()))
            if not rows:
                return
            self._writer.step(rows)
            going_on = []
            for row in rows:
                document, prompt_length = self._documents[row.place]
                if not prompt_length and row.is_written:
                    going_on.append(self._answer_question(document, row))
                elif row.is_computed:
                    free.append(row.place)
                    yield document.number, self._captured(document, prompt_length, row)
                else:
                    going_on.append(row)
            rows = going_on

    def _begin(self, document: Document, place: int) -> Row:
        if document.messages is None:
            return self._ask(document, place, attempt=0)
        if document.is_answered:
            prompt, answer = self._conversations.encode_answered(document.messages)
            return self._row(document, place, prompt, answer)
        return self._row(document, place, self._conversations.encode_prompt(document.messages))

    def _ask(self, document: Document, place: int, attempt: int) -> Row:
        self._documents[place] = (document, 0)
        return Row(
            place=place,
            token_ids=list(self._opening),
            limit=min(len(self._opening) + self._config.question_tokens, self._config.max_len - _SHORTEST_ANSWER),
            end_ids=frozenset({self._question_end}),
            temperature=1.0,
            top_p=_QUESTION_TOP_P,
            seed=document.seed,
            attempt=attempt,
        )

    def _answer_question(self, document: Document, row: Row) -> Row:
        """The row that answers the question which this one wrote, or asks another if it is none.

        The question is encoded anew in the template, since that is how it would be served.
        """
        token_ids = row.token_ids[len(self._opening) :]
        is_whole = token_ids[-1] == self._question_end and len(token_ids) > _SHORTEST_QUESTION
        if not is_whole and row.attempt + 1 < _ATTEMPTS:
            return self._ask(document, row.place, row.attempt + 1)
        question = self._conversations.decode(token_ids).strip()
        return self._row(document, row.place, self._prompt_with_room(question))

    def _prompt_with_room(self, question: str) -> list[int]:
        """The question in the template, cut if it was written in tokens that are not how its text is encoded."""
        prompt = self._conversations.encode_prompt([{"role": "user", "content": question}])
        fits = len(prompt) + _SHORTEST_ANSWER <= self._config.max_len
        return prompt if fits or not question else self._prompt_with_room(question[: len(question) // 2])

    def _row(self, document: Document, place: int, prompt: list[int], given: Sequence[int] = ()) -> Row:
        self._documents[place] = (document, len(prompt))
        room = self._config.max_len - len(prompt)
        given = given[: min(self._config.max_tokens, room)]
        return Row(
            place=place,
            token_ids=[*prompt, *given],
            limit=len(prompt) + (len(given) or min(self._config.max_tokens, room)),
            end_ids=self._conversations.end_ids,
            temperature=document.temperature,
            top_p=1.0,
            seed=document.seed,
        )

    def _captured(self, document: Document, prompt_length: int, row: Row) -> CapturedDocument:
        return CapturedDocument(
            token_ids=torch.tensor(row.token_ids, dtype=torch.int32),
            prompt_length=prompt_length,
            temperature=document.temperature,
            features=self._writer.features(row),
        )


class _Blocks:
    """Gathers documents into blocks of consecutive numbers, and writes those that are whole, in order."""

    def __init__(self, out: Path, manifest: Manifest, config: CaptureConfig) -> None:
        self._out, self._size = out, config.documents_per_shard
        self._open: dict[int, dict[int, CapturedDocument]] = {}
        self.manifest = manifest
        self.answer_tokens, self.documents = manifest.answer_tokens, manifest.documents

    def add(self, number: int, document: CapturedDocument) -> None:
        """Takes one; writes what has become whole."""
        self._open.setdefault(number // self._size, {})[number] = document
        self.answer_tokens += document.answer_tokens
        self.documents += 1
        while len(self._open.get(self.manifest.whole_shards, ())) == self._size:
            self._write(self._open.pop(self.manifest.whole_shards), is_whole=True)

    def finish(self, *, is_end: bool) -> None:
        """Writes what is at hand of blocks that are not whole; if there is no more, these are."""
        for number in sorted(self._open):
            self._write(self._open[number], is_whole=is_end)

    def _write(self, block: dict[int, CapturedDocument], *, is_whole: bool) -> None:
        shard = Shard.of([block[number] for number in sorted(block)])
        shard.write(shard_path(self._out, self.manifest.shards))
        self.manifest = self.manifest.counting(shard, is_whole=is_whole)
        self.manifest.write(self._out)


def _fitting(config: CaptureConfig, conversations: Conversations) -> CaptureConfig:
    """Without the conversations that leave no room for an answer."""
    most = config.max_len - _SHORTEST_ANSWER

    def fits(messages: Sequence[Message]) -> bool:
        if messages[-1]["role"] == "assistant":
            prompt, answer = conversations.encode_answered(messages)
            return len(prompt) <= most and len(answer) > 0
        return len(conversations.encode_prompt(messages)) <= most

    fitting = tuple(messages for messages in config.plan.conversations if fits(messages))
    return replace(config, plan=replace(config.plan, conversations=fitting))


def _new_manifest(model: LoadedModel, config: CaptureConfig) -> Manifest:
    plan = config.plan
    conversations = hashlib.sha256(repr(plan.conversations).encode()).hexdigest()
    return Manifest(
        model_id=model.model_id,
        weights_hash=model.weights_hash,
        tokenizer_hash=model.tokenizer_hash,
        features=config.features,
        hidden_size=model.config.hidden_size,
        dtype=str(model.decoder.dtype).removeprefix("torch."),
        recipe={
            "prompts": len(plan.conversations),
            "prompts_hash": conversations,
            "temperatures": list(plan.temperatures),
            "ask_itself": plan.ask_itself,
            "seed": plan.seed,
            "max_tokens": config.max_tokens,
            "question_tokens": config.question_tokens,
            "max_len": config.max_len,
            "documents_per_shard": config.documents_per_shard,
        },
    )


def _resumed(out: Path, wanted: Manifest) -> Manifest:
    """The manifest of what ``out`` holds, or the wanted one if that is nothing."""
    try:
        found = Manifest.read(out)
    except NotFoundError:
        return wanted
    for name in ("weights_hash", "tokenizer_hash", "features", "dtype", "recipe"):
        old, new = getattr(found, name), getattr(wanted, name)
        if old != new:
            raise InvalidArgumentError(
                f"{name} is {new}, but {out} holds a capture with {old}; take another folder for --out"
            )
    return found


def _without_loose_ends(out: Path, manifest: Manifest, config: CaptureConfig) -> Manifest:
    """Drops what is behind the last whole shard: those documents are written again, in shards of their own."""
    kept = replace(manifest, shards=0, whole_shards=0, documents=0, tokens=0, answer_tokens=0)
    for number in range(manifest.whole_shards):
        kept = kept.counting(Shard.read(shard_path(out, number), manifest.feature_width), is_whole=True)
    for path in out.glob("shard-*"):
        if path not in {shard_path(out, number) for number in range(manifest.whole_shards)}:
            path.unlink()
    kept.write(out)
    return kept
