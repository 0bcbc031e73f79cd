"""Small tokenizers of the families that there are, trained on a few lines, each with added tokens.

Their decoders are those of the checkpoints that the families are known from. All of them know the letters, the signs of
JSON and the added tokens of ``SPECIALS`` and ``ADDED``; "čaj" and "café" are written in letters that byte-level BPE
uses for bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIALS = ("<unk>", "<s>", "</s>", "<|tool|>")
END = 2
ADDED = ("čaj", "café", "<think>")
SIGNS = '{}[]":,.-+ \n'
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
CORPUS = (
    '{"city": "Rome", "size": 42, "tags": ["old", "warm"]}',
    "the quick brown fox jumps over the lazy dog, and the dog doesn't mind",
    "0 1 2 3 4 5 6 7 8 9 Grüße aus Köln, naïve façade",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ true false null",
)


def byte_level() -> Tokenizer:
    """Byte-level BPE: GPT-2, Llama 3, Qwen, SmolLM."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _added(tokenizer)


def sentencepiece() -> Tokenizer:
    """SentencePiece BPE with bytes to fall back on, whose decoder strips one space: Llama 2, Mistral."""
    tokenizer = _sentencepiece()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _added(tokenizer)


def gemma() -> Tokenizer:
    """SentencePiece BPE that strips nothing, and has runs of spaces as added tokens."""
    tokenizer = _sentencepiece("▁▁", "▁▁▁")
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("▁▁▁", normalized=False)])
    return _added(tokenizer)


def unigram() -> Tokenizer:
    """Unigram with a mark for spaces and bytes to fall back on."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=list(SPECIALS),
        unk_token="<unk>",
        initial_alphabet=list(SIGNS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    trained = {piece: round(score, 1) for piece, score in _model(tokenizer)["vocab"]}
    pieces = _ids([*SPECIALS, *sorted(trained), *_letters(), *BYTES])  # the trainer's order differs from run to run
    tokenizer.model = models.Unigram([(piece, trained.get(piece, -20.0)) for piece in pieces], 0, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _added(tokenizer)


def wordpiece() -> Tokenizer:
    """Words and what goes on the word before: BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=list(SPECIALS), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    letters = [*_letters(), *(f"##{letter}" for letter in _letters())]
    pieces = _ids([*SPECIALS, *sorted(tokenizer.get_vocab()), *letters])  # as above
    tokenizer.model = models.WordPiece(pieces, unk_token="<unk>")
    tokenizer.decoder = decoders.WordPiece()
    return _added(tokenizer)


def characters() -> Tokenizer:
    """A token for each character, and none for others."""
    tokenizer = Tokenizer(models.WordLevel(_ids([*SPECIALS, *_letters(), " ", "\n"]), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _added(tokenizer)


def words() -> Tokenizer:
    """A token for each word, and no decoder, so that there are spaces between them."""
    found = sorted({word for line in CORPUS for word in line.split()} | {'{"n":', "4}", '"x"'})
    tokenizer = Tokenizer(models.WordLevel(_ids([*SPECIALS, *found]), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _added(tokenizer)


def suffixes() -> Tokenizer:
    """BPE that marks the ends of words: the first GPT."""
    letters = _letters()
    pieces = [*SPECIALS, *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = Tokenizer(models.BPE(_ids(pieces), [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    return _added(tokenizer)


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    build.__name__: build
    for build in (byte_level, sentencepiece, gemma, unigram, wordpiece, characters, words, suffixes)
}


def _sentencepiece(*more: str) -> Tokenizer:
    """BPE over texts with marks for spaces; normaliser and decoder are left to the caller."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=120, initial_alphabet=[*_letters(), "▁"], show_progress=False)
    tokenizer.train_from_iterator(["▁" + line.replace(" ", "▁") for line in CORPUS], trainer)
    learnt = _model(tokenizer)
    trained = sorted(learnt["vocab"], key=lambda piece: int(learnt["vocab"][piece]))
    merges = [(a, b) for a, b in learnt["merges"]]
    for run in more:
        merges = [(run[1:], "▁"), *merges]
    pieces = dict.fromkeys([*SPECIALS, *BYTES, *trained, *more])
    return Tokenizer(models.BPE(_ids(list(pieces)), merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def _added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ADDED])
    return tokenizer


def _letters() -> list[str]:
    return sorted(({letter for line in CORPUS for letter in line} | set(SIGNS)) - {" ", "\n"})


def _ids(pieces: Sequence[str]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def _model(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]
