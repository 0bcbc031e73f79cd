"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from orchestrator.admission import check_ids
from orchestrator.generation import Generation
from orchestrator.http.bodies.tokens import DetokenizeBody, TokenizeBody
from orchestrator.http.errors import api_error
from orchestrator.http.logprobs import token_text
from orchestrator.http.prompts import encode
from orchestrator.tokenizer import Tokenizer
from pilotfish.errors import PilotfishError


async def tokenize(generation: Generation, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a prompt or of a conversation."""
    generation.require_model(body.model or "")
    if body.messages is not None:
        try:
            token_ids = await encode(
                generation,
                body.messages,
                body.tools or (),
                body.chat_template_kwargs,
                adds_prompt=body.add_generation_prompt is not False,
                continues=bool(body.continue_final_message),
            )
        except PilotfishError as error:
            raise api_error(error, {"prompt": "messages"}) from error
    else:
        token_ids = await generation.encode(body.prompt or "", body.add_special_tokens is not False)
    texts = await asyncio.to_thread(_texts, generation.tokenizer, token_ids) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": generation.info().max_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


async def detokenize(generation: Generation, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids, special tokens written out."""
    generation.require_model(body.model or "")
    if size := generation.info().vocab_size:
        check_ids("tokens", body.tokens, size)
    return {"prompt": await generation.decode(body.tokens)}


def _texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    return [token_text(tokenizer, token_id) for token_id in token_ids]
