"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from orchestrator.generation import Generation
from orchestrator.http.bodies.tokens import DetokenizeBody, TokenizeBody
from orchestrator.http.conversation import template_messages, template_tool
from orchestrator.http.logprobs import token_text
from pilotfish.steps import require


async def tokenize(generation: Generation, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a prompt or of a conversation."""
    generation.require_model(body.model or "")
    if body.messages is not None:
        token_ids = await generation.encode_chat(
            template_messages(body.messages),
            body.add_generation_prompt,
            tools=[template_tool(tool) for tool in body.tools or ()],
            variables=body.chat_template_kwargs,
        )
    else:
        token_ids = await generation.encode(body.prompt or "", body.add_special_tokens is not False)
    texts = [token_text(generation.tokenizer, token_id) for token_id in token_ids] if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": generation.info().max_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


async def detokenize(generation: Generation, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids, special tokens written out."""
    generation.require_model(body.model or "")
    size = generation.info().vocab_size
    for index, token_id in enumerate(body.tokens):
        require(0 <= token_id < size or not size, f"tokens[{index}]", token_id, f"it must be in [0, {size})")
    return {"prompt": await generation.decode(body.tokens)}
