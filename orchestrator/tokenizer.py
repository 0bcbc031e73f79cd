"""Text to token ids and back, from a Hugging Face model folder, without torch.

``transformers`` is not used: importing its tokenizers loads torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.chat_template import SPECIAL_NAMES, ChatTemplate
from orchestrator.detokenizer import Detokenizer
from orchestrator.generation_config import end_token_ids, read_json
from pilotfish.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from pilotfish.steps import require
from pilotfish.token_bytes import TokenBytes
from pilotfish.tokenizer_hash import load_tokenizer, tokenizer_hash

_SPARE = 4  # times the text that tokens have, in what a tokenizer may make shorter first


class Tokenizer:
    """Tokenizer of one model.

    Args:
        folder: with tokenizer.json, and where the model has them tokenizer_config.json, chat_template.jinja,
            additional_chat_templates, generation_config.json and config.json.

    Raises:
        NotFoundError: if the folder or its tokenizer.json is missing.
        InvalidArgumentError: if a file cannot be read.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise NotFoundError(f"model folder {self._folder} does not exist; see `pilotfish pull`")
        self._tokenizer = load_tokenizer(self._folder)
        self._settings = read_json(self._folder, "tokenizer_config.json")
        self._bytes = TokenBytes(self._tokenizer)
        self.vocab_size = self._bytes.size
        """One more than the largest token id; the model may pad beyond it."""
        self.eos_token_ids = self._read_eos_token_ids()
        """Tokens that end a completion, as model and tokenizer say; may be empty."""
        self._hidden = self.eos_token_ids | self._bytes.special.keys()
        names = ((token_id, self._tokenizer.id_to_token(token_id)) for token_id in self._hidden)
        self._names = {token_id: name for token_id, name in names if name}
        self._templates: dict[str, ChatTemplate] = {}

    @cached_property
    def _longest_piece(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @cached_property
    def hash(self) -> str:
        """Equal for tokenizers that give the same ids; see ``tokenizer_hash`` in types.proto."""
        return tokenizer_hash(self._folder)

    def encode(self, text: str, add_special_tokens: bool = True, max_len: int = 0) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model puts around it, or without.

        Args:
            max_len: of the model: what is far too long for it is refused before it is read; 0 reads any text.

        Raises:
            InvalidArgumentError: the text has half of a surrogate pair, which is no character, or is far too long.
        """
        most = max_len * self._longest_piece * _SPARE
        limit = f"at most {max_len - 1} tokens fit this model"
        require(not most or len(text) <= most, "prompt", f"{len(text)} characters", limit)
        try:
            # As a batch of one: `encode` would hold up every other thread for as long as it takes.
            found = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(found[0].ids)
        except (UnicodeError, TypeError) as error:
            raise InvalidArgumentError(f"prompt is no text in Unicode: {error}", "prompt") from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        max_len: int = 0,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: ends with the beginning of the assistant's answer.
            tools: that the model may call; see ``ChatTemplate.render``.
            variables: further ones of the template.
            max_len: see ``encode``.
            continue_final_message: ends with the content of the last message.

        Raises:
            FailedPreconditionError: if the model has no chat template, or none that takes tools.
            InvalidArgumentError: if the template refuses the messages.
        """
        template = self._template_for(tools)
        text = template.render(messages, add_generation_prompt, tools, variables, continue_final_message)
        # The template has written out the special tokens already.
        return self.encode(text, add_special_tokens=False, max_len=max_len)

    def template_variables(self, tools: Sequence[Mapping[str, Any]] = ()) -> frozenset[str]:
        """Variables that the chat template reads beside the conversation, as ``enable_thinking``.

        Raises:
            FailedPreconditionError: see ``encode_chat``.
        """
        return self._template_for(tools).variables

    def template_source(self, with_tools: bool) -> str:
        """The Jinja text that conversations are written by; empty if there is none."""
        return self._template_sources.get("tool_use" if with_tools else "default", self._template_sources["default"])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; ids beyond the vocabulary give none, and special tokens only if they are not skipped."""
        hidden = self._bytes.special.keys() if skip_special_tokens else ()
        ids = [token_id for token_id in token_ids if token_id not in hidden]
        data = [*map(self._bytes.first, ids[:1]), *map(self._bytes.of, ids[1:])]
        return b"".join(data).decode(errors="replace")

    def prompt_texts(self, token_ids: Sequence[int], *, is_text: bool) -> list[str]:
        """What each token of a prompt adds to its text, special tokens written out.

        Args:
            token_ids: of the prompt, at least one.
            is_text: they are those of a plain text, so that the special tokens around it give no text.
        """
        before, behind = self._around if is_text else ([], [])
        ids = list(token_ids)
        begin = len(before) if ids[: len(before)] == before else 0  # a prompt that was cut may have lost them
        end = len(ids) - len(behind) if ids[len(ids) - len(behind) :] == behind else len(ids)
        detokenizer = Detokenizer(self._bytes.of, (), read_first=self._bytes.first)
        texts = [detokenizer.push(token_id) for token_id in ids[begin:end]]
        if rest := detokenizer.finish():
            texts[-1] += rest
        return [*[""] * begin, *texts, *[""] * (len(ids) - end)]

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself, which may be a part of a character; special tokens by their names."""
        return self._bytes.of(token_id)

    def is_hidden(self, token_id: int) -> bool:
        """Whether a token of a completion gives no text: it is a special or an end token."""
        return token_id in self._hidden

    def detokenizer(self, skip_special_tokens: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """A fresh detokenizer for one completion; special and end tokens give no text but for those ``shown``."""
        return Detokenizer(self._bytes.of, self._hidden - frozenset(shown) if skip_special_tokens else ())

    def is_special(self, text: str) -> bool:
        """Whether a text is the name of a special token."""
        token_id = self.token_id(text)
        return token_id is not None and token_id in self._hidden

    def token_id(self, text: str) -> int | None:
        """The token that is written so; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def hidden_tokens_in(self, texts: Sequence[str]) -> dict[int, str]:
        """Names of the special and end tokens that some of the texts name, by id."""
        hidden = self._names.items() if texts else ()
        return {token_id: name for token_id, name in hidden if any(name in text for text in texts)}

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a plain text, and those behind it."""
        found = self._tokenizer.encode("a")
        are_added, ids = found.special_tokens_mask, list(found.ids)
        begin = next((place for place, is_added in enumerate(are_added) if not is_added), len(ids))
        return ids[:begin], ids[len(ids) - (sum(are_added) - begin) :]

    def _template_for(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        if not (source := self.template_source(bool(tools))):
            raise FailedPreconditionError("this model has no chat template: use a plain prompt", "messages")
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._special_tokens)
        return self._templates[source]

    @cached_property
    def _template_sources(self) -> dict[str, str]:
        """Chat templates by name, at least "default", which may be empty; files go before the configuration."""
        given = self._settings.get("chat_template") or ""
        several = {entry["name"]: entry["template"] for entry in given} if isinstance(given, list) else {}
        found = {"default": "" if several else given} | several
        default = self._folder / "chat_template.jinja"
        for file in (*sorted((self._folder / "additional_chat_templates").glob("*.jinja")), default):
            if file.is_file():
                found["default" if file == default else file.stem] = file.read_text(encoding="utf-8")
        return found

    @property
    def _special_tokens(self) -> dict[str, str]:
        """Texts of the named special tokens, as templates know them."""
        found = {}
        for name in (f"{kind}_token" for kind in SPECIAL_NAMES):
            value = self._settings.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None:
                found[name] = str(text)
        return found

    def _read_eos_token_ids(self) -> frozenset[int]:
        """The model's and the tokenizer's own: a model whose files name one token may have been taught to end its turn
        with another."""
        own = self._tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        return end_token_ids(self._folder) | (frozenset() if own is None else frozenset({own}))


__all__ = ["Detokenizer", "Tokenizer"]
