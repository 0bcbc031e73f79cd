"""What the bodies of /v1/completions and /v1/chat/completions share, and those of responses lack."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from orchestrator.admission import MAX_BIASES
from orchestrator.http.bodies.base import Body, ignored, refused, wrong, wrong_field
from orchestrator.http.bodies.forms import ResponseFormat, check_form
from orchestrator.http.bodies.sampling import Sampling
from pilotfish.errors import shown

_TOKEN_ID = re.compile("-?[0-9]{1,20}")  # whether there is one like it is judged with all others


def _texts(value: Any) -> Any:
    """One text or a list of texts, as a list."""
    if value is None or isinstance(value, str):
        return [] if value is None else [value]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise wrong("it must be a text or a list of texts")
    return value


def _token_biases(value: Any) -> Any:
    """JSON has only texts as keys; they must be token ids."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("it must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise wrong(f"it has {len(value)} ids; at most {MAX_BIASES} may be")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise wrong(f"its keys must be token ids, and {shown(key)} is none")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise wrong(f"its values must be numbers, and that of {shown(key)} is none")
    return {int(key): float(bias) for key, bias in value.items()}


Texts = Annotated[list[str], BeforeValidator(_texts)]
TokenBiases = Annotated[dict[int, float], BeforeValidator(_token_biases)]


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """A last chunk without choices has the usage; in all others it is null."""
    continuous_usage_stats: Any = refused("usage comes once, in the last chunk", False)
    include_obfuscation: Any = ignored("chunks are never padded")


class Classic(Sampling):
    """What completions and chat completions share, and responses lack."""

    n: int | None = None
    """Completions of the prompt; with a seed, sample 0 is what the seed gives alone."""
    stop: Texts = Field(default_factory=list)
    """Texts that end the completion and are no part of it."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: TokenBiases = Field(default_factory=dict)
    """Added to the logits of these token ids; -100 bans."""
    stream_options: StreamOptions | None = None
    show_tokens: bool | None = None
    """Streams carry each round: token ids, how each came about, times and the proposal."""
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    """The likeliest alternatives of each token of the prompt, so many."""

    @model_validator(mode="after")
    def _goes_with_streams(self) -> Classic:
        if self.stream_options is not None and not self.stream:
            raise wrong_field("stream_options", "goes with stream: true only")
        if self.prompt_logprobs is not None and self.stream:
            raise wrong_field("prompt_logprobs", "goes with stream: false only")
        check_form(self.response_format, self.structured_outputs)
        return self
