"""The server process of `argosy watch`: access (token, Host header), the socket, limits, the end."""

from __future__ import annotations

import hmac
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy.config.launch import OWN_HOSTS, host_of, is_loopback
from argosy.watch.http import uvicorn_config
from argosy.watch.library import Library
from argosy.watch.server import Api, failed_answer

if TYPE_CHECKING:
    from mcp.server import MCPServer

QUERY = "token"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads nothing from elsewhere and runs no script in its text: what a run's files hold stays text."""
PAGE_HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
FOR_PROGRAMS = ("/api/", "/metrics", "/mcp")


class AuthMiddleware:
    """Lets a request through if it may read, and marks each answer for the browser.

    Without a token, a request must name this machine's loopback address as its host, which keeps out a foreign page
    whose name leads here (DNS rebinding). With a token, it may name any host.
    """

    def __init__(self, app: ASGIApp, token: str, port: int = 0, names: Iterable[str] = OWN_HOSTS):
        self._app, self._token = app, token
        self._cookie = f"argosy_watch_{port}"  # cookies do not tell ports apart
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, _marking(send))
        else:
            await self._app(scope, receive, _marking(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """Return a refusal, or None if allowed."""
        headers = Headers(scope=scope)
        if headers.get("sec-fetch-site", "none") in ("cross-site", "same-site") and scope["path"] != "/":
            return PlainTextResponse("another site's page may not read this\n", 403)
        if self._token:
            return self._refusal_by_token(scope, headers)
        if host_of(headers.get("host", "")) not in self._names:
            names = ", ".join(sorted(self._names))
            return PlainTextResponse(f"this server answers to {names} only; see argosy watch --help for --host\n", 403)
        return None

    def _refusal_by_token(self, scope: Scope, headers: Headers) -> Response | None:
        try:
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=100)
        except ValueError:
            return PlainTextResponse("too many parameters\n", 400)
        given = [value for name, value in query if name == QUERY]
        if given and self._is_token(given[-1]):
            if scope["path"].startswith(FOR_PROGRAMS):
                return None
            # The token leaves the address bar, so that it is in no history and in no picture of the screen.
            rest = urlencode([(name, value) for name, value in query if name != QUERY])
            path = "/" + scope["path"].lstrip("/")  # never //elsewhere
            answer = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
            answer.set_cookie(self._cookie, given[-1], httponly=True, samesite="lax", path="/")
            return answer
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if not given and self._is_token(_cookie(headers.get("cookie", ""), self._cookie)):
            return None
        wrong = "the token is wrong" if given or bearer else "a token is needed"
        text = f"{wrong}: open the address that `argosy watch` printed, or send Authorization: Bearer TOKEN\n"
        return PlainTextResponse(text, 401, {"www-authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def _marking(send: Send) -> Send:
    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in PAGE_HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return marked


PAGE = Path(__file__).parent / "page"


class PageServer(uvicorn.Server):
    """uvicorn's server, which tells the pages that listen for news when it is asked to end."""

    def __init__(self, config: uvicorn.Config, before_exit: Callable[[], None]):
        super().__init__(config)
        self._before_exit = before_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End at a signal, after the answers that are under way."""
        self._before_exit()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """End after the answers that are under way. Any thread may call it."""
        self._before_exit()
        self.should_exit = True


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers={"cache-control": "no-cache"})


def make_app(
    root: Path, token: str = "", port: int = 0, names: tuple[str, ...] = OWN_HOSTS, mcp: MCPServer | None = None
) -> tuple[AuthMiddleware, Callable[[], None]]:
    """Return the application that shows the runs under `root`, and what lets go of those who wait for its news.

    `token` and `names` as in `AuthMiddleware`. mcp: answers at /mcp.
    """
    api = Api(Library(root))
    # The middleware has looked at Host and token already, for all paths.
    # Stateless: a client that dies leaves no session behind.
    agents = None if mcp is None else mcp.streamable_http_app(json_response=True, stateless_http=True, host="")
    routes = [
        *api.routes(),
        *(agents.routes if agents is not None else ()),
        Route("/", _page),
        Mount("/static", StaticFiles(directory=PAGE, check_dir=False)),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(api.lifespan(app))
            if mcp is not None:
                await stack.enter_async_context(mcp.session_manager.run())
            yield

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(GZipMiddleware, minimum_size=2000, compresslevel=4)],
        exception_handlers={HTTPException: failed_answer, Exception: failed_answer},
    )
    return AuthMiddleware(app, token, port, names), api.news.end


def server_of(
    root: Path, listener: socket.socket, token: str = "", host: str = "127.0.0.1", mcp: MCPServer | None = None
) -> PageServer:
    """Return the server of the runs under `root`. `listener` was made for `host`.

    token: needed to read; empty: none is needed. mcp: answers at /mcp.
    `run(sockets=[listener])` serves until SIGINT or SIGTERM.
    """
    port = listener.getsockname()[1]
    names = (*OWN_HOSTS, host.lower()) if is_loopback(host) else OWN_HOSTS
    app, let_go = make_app(root, token, port, names, mcp)
    return PageServer(uvicorn_config(app), let_go)
