"""Conversations as the target is served them: its chat template, its token ids, its end of an answer.

``transformers`` renders the template here; the orchestrator renders it without torch, and a test of its tokenizer holds
the two together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from pilotfish.errors import FailedPreconditionError, InvalidArgumentError
from pilotfish.runtime.config import read_json
from pilotfish.tokenizer_hash import load_tokenizer

Message = Mapping[str, str]
"""{"role": "user" or "assistant" or "system", "content": text}"""

_MARK = "\N{INFORMATION SEPARATOR FOUR}question\N{INFORMATION SEPARATOR FOUR}"


class Conversations:
    """Encodes conversations for one model.

    Args:
        folder: of the model.

    Attributes:
        end_ids: tokens that end an answer.

    Raises:
        FailedPreconditionError: if the model has no chat template or no end token.
    """

    def __init__(self, folder: Path) -> None:
        load_tokenizer(folder)  # for its errors
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if self._tokenizer.chat_template is None:
            raise FailedPreconditionError(f"{folder} has no chat template; capture needs an instruct model")
        self.end_ids = _end_ids(folder)
        if not self.end_ids:
            raise FailedPreconditionError(f"{folder} names no eos_token_id; capture cannot tell where an answer ends")

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids up to where the answer begins.

        Raises:
            InvalidArgumentError: if the template refuses the messages.
        """
        return self._encode(self._render(messages, add_generation_prompt=True))

    def encode_answered(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Token ids of the prompt, and of the assistant's last message up to its end token.

        Raises:
            InvalidArgumentError: if the template refuses the messages, or writes the answer elsewhere.
        """
        prompt = self._render(messages[:-1], add_generation_prompt=True)
        whole = self._render(messages, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise InvalidArgumentError("the model's chat template does not put an answer behind its prompt")
        answer = self._encode(whole.removeprefix(prompt))
        ends = [i for i, token in enumerate(answer) if token in self.end_ids]
        return self._encode(prompt), answer[: ends[0] + 1] if ends else answer

    def question_opening(self) -> tuple[list[int], int]:
        """Token ids of a conversation up to where the user's first message begins, and the token that ends a message.

        A model goes on from there with a question of its own (Magpie, https://arxiv.org/abs/2406.08464, section 2).

        Raises:
            FailedPreconditionError: if no special token ends a user's message.
        """
        before, _, after = self._render([{"role": "user", "content": _MARK}], True).partition(_MARK)
        end = self._encode(after)[:1]
        if not end or end[0] not in self._tokenizer.all_special_ids:
            raise FailedPreconditionError(
                "this model's chat template ends a user's message without a special token, so that nothing tells where "
                "a question of its own would end; leave --ask-itself out"
            )
        return self._encode(before), end[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"messages do not fit the model's chat template: {error}") from error

    def _encode(self, text: str) -> list[int]:
        # The template has written out the special tokens already.
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _end_ids(folder: Path) -> frozenset[int]:
    """As the orchestrator reads them: generation_config.json before config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder, name).get("eos_token_id") if (folder / name).is_file() else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
