"""The events of a response."""

from __future__ import annotations

import json
from typing import Any, cast

from orchestrator.core.acceptance import TokenKind
from orchestrator.core.requests import TokenLogprobs
from orchestrator.http.bodies.responses import ResponseBody
from orchestrator.http.bodies.tools import FunctionDefinition, Tool
from orchestrator.http.conversation import Plan
from orchestrator.http.responses import _Writer
from orchestrator.http.tool_writing import HERMES
from orchestrator.outputs import Piece
from orchestrator.tokenizer import Tokenizer
from orchestrator.usage import RoundTimes


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def token_id(self, text: str) -> None:
        return None

    def is_hidden(self, token_id: int) -> bool:
        return False


def piece(letter: str) -> Piece:
    logprobs = (TokenLogprobs(-1.0, ()),)
    return Piece((letter,), (ord(letter),), (TokenKind.BONUS,), 0, 0, RoundTimes(), logprobs=logprobs)


def test_the_log_probabilities_of_a_message_are_those_of_its_text() -> None:
    tool = Tool(type="function", function=FunctionDefinition(name="f"))
    body = ResponseBody.model_validate({"model": "m", "input": "x"})
    writer = _Writer(body, cast(Tokenizer, Letters()), Plan([tool], None, HERMES), 1)
    written = 'Well.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    lines = b"".join(event for letter in written for event in writer.push(0, piece(letter))).decode().split("\n")
    events: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["text"] == "".join(token["token"] for token in done["logprobs"]) == "Well."
    assert events[-1]["type"] == "response.function_call_arguments.delta"
