"""Whether two models speak the same tokens, as one hash; imports no torch.

A draft model may only propose for a target whose tokenizer has the same ids for the same text.
Comparing vocabularies alone misses other merges or another normaliser, so the ids of a fixed set
of texts are hashed too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from pilotfish.errors import InvalidArgumentError, NotFoundError

_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a\ttab\nand\r\n\n\nblank lines  ",
    "def f(x):\n    return [x ** 2 for _ in range(10)]  # comment",
    "1234567890 3.14159 1,000,000 0x7f 2026-11-29",
    "don't can't won't I'll they've",
    "Übergröße naïve façade Ærøskøbing Ελλάδα Москва 東京 北京 서울 עברית العربية",
    "🐟🦈 👩‍👩‍👧 e\u0301 \u00e9 \ufb01 \u00a0",
    "<|im_start|>user\nhi<|im_end|>\n<s>[INST] hi [/INST]</s><|endoftext|><|begin_of_text|><|eot_id|>",
    "CamelCase snake_case SCREAMING_CASE https://example.org/a?b=c&d=e",
    '{"key": [1, 2.5, null, true], \'x\': "\\n"}',
)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model folder, without truncation or padding.

    Raises:
        NotFoundError: if there is no tokenizer.json.
        InvalidArgumentError: if it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist; Pilotfish needs the model's fast tokenizer, fetch the model again")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InvalidArgumentError(f"{path} is no tokenizer ({error}); fetch the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_hash(folder: Path) -> str:
    """SHA-256 in hex over the vocabulary, added tokens included, and the ids of the probe texts.

    Special tokens that a post-processor would add around a text do not count: they are part of the
    prompt, which the orchestrator makes from the target's tokenizer alone.
    """
    tokenizer = load_tokenizer(folder)
    vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in _PROBES]
    return hashlib.sha256(json.dumps([vocabulary, ids]).encode()).hexdigest()


def tokenizer_vocab_size(folder: Path) -> int:
    """One more than the largest id of the tokenizer; ids from there on are padding of the model."""
    return max(load_tokenizer(folder).get_vocab(with_added_tokens=True).values()) + 1
