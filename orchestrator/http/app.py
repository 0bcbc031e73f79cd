"""What is served where."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from orchestrator.generation import Generation
from orchestrator.http.bodies.base import body_error
from orchestrator.http.bodies.chat import ChatBody
from orchestrator.http.bodies.completions import CompletionBody
from orchestrator.http.bodies.responses import ResponseBody
from orchestrator.http.bodies.tokens import DetokenizeBody, TokenizeBody
from orchestrator.http.chat import chat
from orchestrator.http.completions import complete
from orchestrator.http.errors import ApiError, api_error
from orchestrator.http.keys import OPEN_PATHS, Keys
from orchestrator.http.lenient import Lenient
from orchestrator.http.limits import Budget, Limits
from orchestrator.http.playground import playground
from orchestrator.http.reasoning import PARSERS, Marks
from orchestrator.http.request_ids import RequestIds
from orchestrator.http.responses import create
from orchestrator.http.settings import HttpSettings
from orchestrator.http.tokens import detokenize, tokenize
from pilotfish.errors import PilotfishError, UnavailableError

EXPOSED_HEADERS = ("X-Request-Id", "Warning", "Retry-After")
"""That scripts of other servers' pages may read."""


def make_app(generation: Generation, keys: Sequence[str], settings: HttpSettings) -> ASGIApp:
    """The application, behind ids, keys and limits.

    Args:
        generation: serves the requests.
        keys: of the clients; without any, everybody may ask.
        settings: of the gateway.
    """
    routes = _routes(generation, PARSERS.get(settings.reasoning_parser))
    if settings.http_playground:
        page = playground()

        @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
        async def root() -> Response:
            return page

    app: ASGIApp = Lenient(routes) if settings.lenient else routes
    budget = Budget(settings.http_body_budget_bytes, settings.http_body_budget_bytes_per_key)
    app = Limits(app, settings.http_max_body_bytes, settings.http_max_requests, budget)
    if keys:
        app = Keys(app, keys, OPEN_PATHS | ({"/metrics"} if settings.metrics_without_key else set()))
    app = RequestIds(app, lambda: generation.info().model)
    if settings.allowed_origins:  # before keys: browsers ask for leave without one
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    return app


def _routes(generation: Generation, marks: Marks | None) -> FastAPI:
    # The interactive pages are left out: they fetch scripts from elsewhere.
    app = FastAPI(title="Pilotfish", version=generation.info().version, docs_url=None, redoc_url=None)
    started = int(time.time())

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether requests are answered: 503 while the target is away."""
        info = generation.info()
        if not info.target_ready:
            raise UnavailableError("the target is away")
        return {"status": "ok", "model": info.model, "draft_replicas": info.draft_replica_count}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        assert generation.metrics is not None
        content, media_type = generation.metrics.exposition(request.headers.get("accept", ""))
        return Response(content, media_type=media_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model served."""
        return {"object": "list", "data": [_model(generation, started)]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The model served, by its name."""
        generation.require_model(model)
        return _model(generation, started)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continues plain prompts."""
        return await complete(generation, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        return await chat(generation, body, request, marks)

    @app.post("/v1/responses")
    async def responses(body: ResponseBody, request: Request) -> Response:
        """Answers a conversation, in OpenAI's newer form."""
        return await create(generation, body, request, marks)

    @app.post("/tokenize")
    async def to_tokens(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        return await tokenize(generation, body)

    @app.post("/detokenize")
    async def from_tokens(body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids."""
        return await detokenize(generation, body)

    @app.exception_handler(RequestValidationError)
    async def refused_body(request: Request, error: RequestValidationError) -> Response:
        return body_error(error.errors()).response()

    @app.exception_handler(PilotfishError)
    @app.exception_handler(ApiError)
    async def failed(request: Request, error: Exception) -> Response:
        return api_error(error).response()

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return api_error(error).response()

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        return _not_served(request, error, app).response()

    return app


def _model(generation: Generation, created: int) -> dict[str, Any]:
    info = generation.info()
    return {
        "id": info.model,
        "object": "model",
        "created": created,
        "owned_by": "pilotfish",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_len,
        "speculation": {
            "draft_length": "auto" if info.adaptive_draft_length else info.draft_length,
            "drafters": [{"model": each.model, "scheme": each.scheme} for each in generation.offer().drafters],
        },
    }


def _not_served(request: Request, error: HTTPException, app: FastAPI) -> ApiError:
    """What is wrong with a path, a method or a body that could not be read."""
    path = request.url.path
    if error.status_code == 404:
        served = ", ".join(route.path for route in app.routes if isinstance(route, APIRoute))
        return ApiError(404, f"nothing is served at {path}; there are {served}", code="unknown_url")
    if error.status_code == 405:
        message = f"{path} does not take {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    return ApiError(error.status_code, f"the body cannot be read: {error.detail}", code="invalid_body")
