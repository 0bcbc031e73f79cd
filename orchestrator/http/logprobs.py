"""Log probabilities in OpenAI's shapes."""

from __future__ import annotations

from orchestrator.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """What a token stands for by itself; of part of a character, its bytes as OpenAI writes them: ``bytes:\\xe2``."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
