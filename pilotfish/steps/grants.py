"""What a worker grants a stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """What a worker granted one stream, and its limits; checked against every step.

    Fields as in ``StreamOpened``.
    """

    model_id: str
    weights_hash: str
    tokenizer_hash: str
    vocab_size: int
    page_size: int
    first_page: int
    page_count: int
    max_len: int
    max_step_tokens: int
    incarnation: int
    features: tuple[str, ...] = ()
    feature_width: int = 0
    shapes_logits: bool = False
    gives_logprobs: bool = False
