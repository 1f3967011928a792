"""The server of `argosy serve`: a model behind OpenAI's API, to try it. One request computes at a time; some wait."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from argosy.config.launch import OWN_HOSTS, host_of
from argosy.errors import UserError
from argosy.inference.loaded_model import ChatModel, LoadedModel
from argosy.inference.openai_requests import (
    MOST_CHOICES,
    ApiAnswer,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GrowingChoice,
    SamplingRequest,
)
from argosy.inference.sampling import Sampling, TextPiece
from argosy.watch.http import uvicorn_config

SERVE_PORT = 8000
"""The port that vLLM has too; the next free one if it is taken."""
MOST_BODY_BYTES = 16 * 2**20
HUNG_UP = 499
"""Status of an answer that nobody reads any more."""
MOST_WAITING_REQUESTS = 32
"""Requests that wait for their turn; one more is told to come again."""
USUAL_TOKENS = 16
"""Tokens of a text that says no max_tokens, as OpenAI has it; an answer in a conversation may fill the context."""

Asked = TypeVar("Asked", bound=SamplingRequest)


class ModelQueue:
    """A model that writes for one request at a time, on a thread of its own."""

    def __init__(self) -> None:
        self._lock, self._thread = asyncio.Lock(), ThreadPoolExecutor(1)
        self._waiting = 0

    def check_room(self) -> None:
        """Raise ApiError if as many requests wait as may."""
        if self._waiting > MOST_WAITING_REQUESTS:
            raise ApiError(
                429, f"{MOST_WAITING_REQUESTS} requests wait already. Send it again later.", "rate_limit_exceeded"
            )

    async def pieces(self, begun: Generator[TextPiece]) -> AsyncGenerator[TextPiece]:
        """Yield the pieces of a text, when it is its turn; closing the iterator ends the work."""
        self._waiting += 1
        try:
            async with self._lock:
                run = asyncio.get_running_loop().run_in_executor
                while (piece := await run(self._thread, next, begun, None)) is not None:
                    yield piece
        finally:
            self._waiting -= 1
            self._thread.submit(begun.close)  # after the piece that is being written


class OpenAIApi:
    """The addresses under /v1."""

    def __init__(self, model: LoadedModel, name: str, chat: ChatModel | None):
        """name: the model's in requests. chat: None if it has no chat template."""
        self._model, self._name, self._chat = model, name, chat
        self._queue, self._created = ModelQueue(), int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.one_model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/health", lambda request: Response()),
        ]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def one_model(self, request: Request) -> Response:
        self._check_name(request.path_params["model"])
        return JSONResponse(self._described())

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        asked = await self._asked(request, CompletionRequest)
        prompts = asked.prompts()
        if len(prompts) > MOST_CHOICES:
            raise ApiError(400, f"{len(prompts)} texts at once: at most {MOST_CHOICES}. Send several requests.")
        tokens = [self._model.tokens_of(prompt) for prompt in prompts]
        return await self._answer(request, asked, tokens, asked.sampling(asked.max_tokens, USUAL_TOKENS), False)

    async def chat_completions(self, request: Request) -> Response:
        """ApiAnswer a conversation."""
        asked = await self._asked(request, ChatRequest)
        if self._chat is None:
            raise ApiError(400, "the model has no chat template. Use /v1/completions, or serve it with --template.")
        tokens = [self._chat.prompt_of(asked.messages)] * (asked.n or 1)
        most = asked.max_completion_tokens or asked.max_tokens
        return await self._answer(request, asked, tokens, asked.sampling(most, self._model.config.max_seq_len), True)

    async def _asked(self, request: Request, kind: type[Asked]) -> Asked:
        """Return the request's body, checked. Raises: ApiError."""
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY_BYTES:
                    raise ApiError(413, f"the request has more than {MOST_BODY_BYTES >> 20} MiB. Send less text.")
        except ClientDisconnect:
            raise ApiError(HUNG_UP, "the request was cut off.") from None
        try:
            asked = kind.model_validate_json(bytes(body))
        except ValidationError as problem:
            loc = problem.errors()[0]["loc"]
            key = str(loc[0]) if loc else None
            of_key = [each["msg"] for each in problem.errors() if each["loc"][:1] == loc[:1]]
            wrong = of_key[-1].removeprefix("Value error, ")  # of a text or a list, what is wrong with the list
            raise ApiError(400, f"{key or 'the request'}: {wrong}.", param=key) from None
        self._check_name(asked.model)
        return asked

    async def _answer(
        self, request: Request, asked: SamplingRequest, prompts: Sequence[list[int]], sampling: Sampling, is_chat: bool
    ) -> Response:
        self._queue.check_room()
        writer = self._chat if is_chat and self._chat is not None else self._model
        begun = writer.stream(prompts, sampling)  # what is wrong is said before the answer begins
        told = len(prompts[0]) if is_chat else sum(map(len, prompts)) // (asked.n or 1)
        answer, choices = ApiAnswer(self._name, is_chat, told), [GrowingChoice() for _ in prompts]
        pieces = self._queue.pieces(begun)
        if asked.stream:
            says_usage = asked.stream_options is not None and asked.stream_options.include_usage
            chunks = _chunks(answer, choices, pieces, says_usage)
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"cache-control": "no-store"})
        async with aclosing(pieces):
            async for piece in pieces:
                _grow(choices, piece)
                if await request.is_disconnected():
                    return Response(status_code=HUNG_UP)
        return JSONResponse(answer.whole(choices))

    def _described(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._created, "owned_by": "argosy"}

    def _check_name(self, model: str) -> None:
        if model != self._name:
            raise ApiError(404, f"model {model[:100]!r}: there is {self._name!r} alone.", "model_not_found", "model")


def _grow(choices: Sequence[GrowingChoice], piece: TextPiece) -> GrowingChoice:
    choice = choices[piece.row]
    choice.text += piece.text
    choice.tokens += 1
    choice.finish = piece.finish
    return choice


async def _chunks(
    answer: ApiAnswer, choices: Sequence[GrowingChoice], pieces: AsyncGenerator[TextPiece], says_usage: bool
) -> AsyncIterator[str]:
    """Yield the events of a stream. What goes wrong in it is its last one: its status is told already."""
    try:
        for number in range(len(choices)):
            if (first := answer.begin(number)) is not None:
                yield _event(first)
        async with aclosing(pieces):
            async for piece in pieces:
                _grow(choices, piece)
                if piece.text or piece.finish:
                    yield _event(answer.chunk(piece.row, piece.text, piece.finish))
        if says_usage:
            yield _event(answer.end(choices))
        yield "data: [DONE]\n\n"
    except Exception as problem:
        yield _event(_error_of(problem).to_record())
        raise


def _event(record: dict[str, Any]) -> str:
    return f"data: {json.dumps(record, separators=(',', ':'))}\n\n"


class KeyMiddleware:
    """Lets a request through that has the token; without one, that names this machine's loopback address as its host,
    which keeps out a foreign page whose name leads here (DNS rebinding). No page of another site may ask.
    """

    def __init__(self, app: ASGIApp, token: str, names: Sequence[str]):
        self._app, self._token, self._names = app, token, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _failed(None, refusal)(scope, receive, send)

    def _refusal(self, headers: Headers) -> ApiError | None:
        if headers.get("sec-fetch-site", "none") in ("cross-site", "same-site"):
            return ApiError(403, "another site's page may not ask this server.")
        if self._token:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token.encode())
            if scheme.lower() == "bearer" and is_right:
                return None
            return ApiError(401, "the API key is missing or wrong: `argosy serve` printed it.", "invalid_api_key")
        if host_of(headers.get("host", "")) not in self._names:
            return ApiError(403, f"this server answers to {', '.join(self._names)} only; see --host.")
        return None


def _failed(request: Request | None, error: Exception) -> Response:
    """Return the answer for an error, in OpenAI's form."""
    told = _error_of(error)
    return JSONResponse(told.to_record(), told.status)


def _error_of(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, f"{error.detail}: there are /v1/models, completions and chat/completions.")
    return ApiError(500, "the server failed at this request; its terminal says how.")


def make_app(model: LoadedModel, name: str, chat: ChatModel | None, token: str, names: Sequence[str]) -> ASGIApp:
    """Return the application that answers for a model. token: needed if it is not empty. names: else, hosts' names."""
    handlers: Any = dict.fromkeys((ApiError, UserError, HTTPException, Exception), _failed)
    return KeyMiddleware(
        Starlette(routes=OpenAIApi(model, name, chat).routes(), exception_handlers=handlers), token, names
    )


def server_of(model: LoadedModel, name: str, chat: ChatModel | None, token: str, host: str) -> uvicorn.Server:
    """Return the server; `run(sockets=[listener])` serves until SIGINT or SIGTERM."""
    app = make_app(model, name, chat, token, tuple(dict.fromkeys((*OWN_HOSTS, host.lower()))))
    # The app has no lifespan, and Ctrl-C would print the traceback of its end.
    return uvicorn.Server(uvicorn_config(app, lifespan="off"))
