"""Settings of the gateway, part of the orchestrator's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from pilotfish.settings import Settings, address

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+")


def _split(value: object) -> object:
    """As they stand in the environment: between commas."""
    if not isinstance(value, str):
        return value
    return [key.strip() for key in value.split(",") if key.strip()]


def _maybe_address(value: str) -> str:
    return address(value, to_listen=True) if value else ""


def _origins(value: object) -> object:
    """Between commas, or as vLLM takes them: a list in JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    found = _split(value)
    for origin in found if isinstance(found, list) else ():
        if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} must be * or SCHEME://HOST[:PORT], without a path")
    return found


class HttpSettings(Settings):
    """What is served over HTTP, and to whom."""

    http: Annotated[str, AfterValidator(_maybe_address)] = ""
    """HOST:PORT or port to serve the OpenAI-compatible API on; port 0 takes a free one. Without it there is gRPC
    only."""

    http_next_port: bool = False
    """Take the next free port where that of --http is taken."""

    api_key: Annotated[list[SecretStr], NoDecode, BeforeValidator(_split)] = Field(default_factory=list)
    """Key that HTTP clients must send; give it once for each, in the environment with commas between them. Other users
    of a machine can read flags: the environment and --api-key-file are better places."""

    api_key_file: Path | None = None
    """File with further keys, one a line."""

    http_max_body_bytes: int = Field(8 << 20, ge=1)
    """Largest body of an HTTP request; larger ones are refused with 413."""

    http_body_budget_bytes: int = Field(256 << 20, ge=1)
    """Bytes of HTTP bodies that arrive or are being answered at the same time, but for the first 64 KiB of each; more
    are refused with 503."""

    http_body_budget_bytes_per_key: int = Field(64 << 20, ge=1)
    """The same of one API key, where there are any, so that none takes all; more are refused with 429."""

    http_max_requests: int = Field(1024, ge=1)
    """HTTP requests that are answered at the same time; more are refused with 429."""

    allowed_origins: Annotated[list[str], NoDecode, BeforeValidator(_origins)] = Field(default_factory=list)
    """Web pages of other servers that may ask, as https://chat.example.org, or * for all (CORS); give it once for each.
    Without any, browsers let none. The playground needs none."""

    reasoning_parser: Literal["", "deepseek_r1", "deepseek_v3", "glm45", "granite", "mistral", "qwen3", "seed_oss"] = ""
    """Tell a model's reasoning apart from its answer, by the marks of its family, under vLLM's names. deepseek_r1 reads
    an answer without marks as reasoning, the others as an answer. Empty leaves all in the text."""

    metrics_without_key: bool = False
    """Serve /metrics to those who have no key, too: Prometheus."""

    lenient: bool = False
    """Pass over fields of requests that are unknown, and name them in the answer's Warning header. Without it they are
    refused with 400, so that nobody waits for the effect of a name that was misspelt."""

    http_playground: bool = True
    """Serve a page at / to try the model in, that shows what speculation does. It needs no key itself; it asks for one
    where there are some."""
