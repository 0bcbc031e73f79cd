"""Log probabilities in OpenAI's shapes, and those of a prompt in vLLM's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from orchestrator.core.requests import TokenLogprobs
from orchestrator.http.bodies.sampling import Sampling
from orchestrator.tokenizer import Tokenizer

LEAST = -9999.0
"""What OpenAI says for tokens that are all but impossible; JSON knows no infinity."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """What a token stands for by itself; of part of a character, its bytes as OpenAI writes them: ``bytes:\\xe2``."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatLogprobs:
    """The ``logprobs`` of chat completions.

    Args:
        tokenizer: of the model.
        body: of the request; it says which tokens give no text, and so have no bytes.
        shown: special tokens that give one nevertheless.
    """

    def __init__(self, tokenizer: Tokenizer, body: Sampling, shown: Collection[int] = ()) -> None:
        self._tokenizer, self._body, self._shown = tokenizer, body, shown
        self._ends = set(body.stop_token_ids or ()) | (set() if body.ignore_eos else tokenizer.eos_token_ids)

    def of(self, token_ids: Sequence[int], found: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Of some tokens in a row; empty lists if there are none."""
        content = [
            {**self._token(token_id, each.logprob), "top_logprobs": [self._token(*top) for top in each.top]}
            for token_id, each in zip(token_ids, found, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(self._tokenizer, token_id)
        # So that they add up to the text. In a response null is no bytes, to OpenAI's client.
        data = list(self._tokenizer.token_bytes(token_id)) if self._has_text(token_id) else []
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}

    def _has_text(self, token_id: int) -> bool:
        if token_id in self._ends and not self._body.include_stop_str_in_output:
            return False
        skips = self._body.skip_special_tokens is not False and token_id not in self._shown
        return not (skips and self._tokenizer.is_hidden(token_id))


class CompletionLogprobs:
    """The ``logprobs`` of completions, of one choice: lists that grow with its text.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of(
        self, token_ids: Sequence[int], texts: Sequence[str], found: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """Of some more tokens.

        Args:
            token_ids: the tokens.
            texts: what each added to the choice's text.
            found: None for the first of a prompt, which follows nothing.
        """
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": [token_text(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if each is None else max(each.logprob, LEAST) for each in found],
            "top_logprobs": [
                None if each is None else self._top(token_id, each)
                for token_id, each in zip(token_ids, found, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by their texts; the token itself is always among them, as with OpenAI."""
        tops = dict(found.top) | {token_id: found.logprob}
        return {token_text(self._tokenizer, each): max(logprob, LEAST) for each, logprob in tops.items()}


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: Sequence[TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """Of a prompt, as vLLM gives them: by token id, None for the first token."""

    def entries(token_id: int, each: TokenLogprobs) -> Iterator[tuple[str, dict[str, Any]]]:
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(each.top, start=1)}
        for shown, logprob in {token_id: each.logprob, **dict(each.top)}.items():
            text = token_text(tokenizer, shown)
            yield str(shown), {"logprob": max(logprob, LEAST), "rank": ranks.get(shown), "decoded_token": text}

    return [None, *(dict(entries(*pair)) for pair in zip(token_ids[1:], found, strict=True))]
