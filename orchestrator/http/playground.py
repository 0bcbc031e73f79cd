"""The playground: one page that shows what speculation does to an answer, as it comes."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.responses import Response


def playground() -> Response:
    """The page, as it is served. It loads nothing else, and its policy lets it ask this server alone.

    Script and style are allowed by their hashes, so that no other script runs, whatever a model writes.
    """
    page = _read("playground.html").replace("/* markdown.js */", _read("markdown.js"))
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", page),
        "style-src": _hash_of("style", page),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {source}" for name, source in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, headers=headers, media_type="text/html")


def _read(name: str) -> str:
    return files("orchestrator.http").joinpath(name).read_text(encoding="utf-8")


def _hash_of(tag: str, page: str) -> str:
    """Of the one element of that name, as policies name inline sources."""
    (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inline.encode()).digest()).decode()}'"
