"""What tests of the OpenAI-compatible API ask, and how they look at what comes back."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
from deployment import Deployment

PROMPT = "the cat and the hat"
CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
MODEL = "tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def url(deployment: Deployment) -> str:
    assert deployment.orchestrator.gateway is not None
    return f"http://{deployment.orchestrator.gateway.address}"


def error(answer: httpx2.Response) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's shape."""
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


def extra_field(answer: openai.BaseModel, name: str) -> Any:
    """A field of an answer that OpenAI's own lack."""
    return (answer.model_extra or {})[name]


def metric(http: httpx2.Client, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    total = 0.0
    for line in http.get("/metrics").text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def events(text: str) -> list[Any]:
    """The data of a stream's events, the last of which says that it is done."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def chat_choice(client: openai.OpenAI, settings: dict[str, Any], *, streams: bool) -> Any:
    """The first choice of a chat, whole or as OpenAI's client puts it together from a stream."""
    if not streams:
        return client.chat.completions.create(**settings).choices[0]
    with client.chat.completions.stream(**settings) as stream:
        stream.until_done()
        return stream.get_final_completion().choices[0]
