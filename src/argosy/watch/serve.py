"""The server process of `argosy watch`: access (token, Host header), the socket, limits, the end."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
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
from uvicorn.protocols.http.h11_impl import H11Protocol

from argosy.errors import UserError
from argosy.watch.library import Library
from argosy.watch.server import Api, failed_answer

if TYPE_CHECKING:
    from mcp.server import MCPServer

TOKEN_BYTES = 32
SHORTEST_TOKEN = 16
QUERY = "token"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere, and no script in the page's text is run: what a run's files hold stays text."""
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
FOR_PROGRAMS = ("/api/", "/metrics", "/mcp")
OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AuthMiddleware:
    """Lets a request through if it may read, and marks each answer for the browser.

    Without a token, a request must name this machine's loopback address as its host, which keeps out a foreign page
    whose name leads here (DNS rebinding). With a token, it may name any host.
    """

    def __init__(self, app: ASGIApp, token: str = "", port: int = 0, names: Iterable[str] = OWN_NAMES):
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
        if host_name(headers.get("host", "")) not in self._names:
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


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


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
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return marked


PAGE = Path(__file__).parent / "page"
PORT = 8765
PORTS_TRIED = 50
"""Ports that are tried, from PORT on, if the user named none."""
REQUEST_S = 15.0
"""Most seconds in which a connection sends its whole request."""
MOST_CONNECTIONS = 400
MOST_OF_ADDRESS = 100
"""Most connections of one address: beyond, the one that has idled for longest is closed."""
MOST_HEADER_BYTES = 2**14


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request does not arrive: uvicorn itself waits for ever."""

    deadline: asyncio.TimerHandle | None = None
    idle_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request; where there are too many connections, close one that idles."""
        super().connection_made(transport)
        self._wait()
        others = [each for each in self.connections if each is not self and isinstance(each, PatientProtocol)]
        same = [each for each in others if each.address == self.address]
        if len(same) >= MOST_OF_ADDRESS:
            _close_one(same)
        elif len(others) >= MOST_CONNECTIONS - 1:
            _close_one(others)

    @property
    def address(self) -> str:
        """The machine at the other end; empty if it is not known."""
        return self.client[0] if self.client else ""

    @property
    def idles(self) -> bool:
        """True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Stop waiting once a request is whole, and begin again with a part of the next one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self.deadline is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.idle_since_s = self.loop.time()
        self.deadline = self.loop.call_later(REQUEST_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _close_one(connections: list[PatientProtocol]) -> None:
    """Close the connection that has idled for longest: an idle one must not keep others out."""
    idle = [each for each in connections if each.idles]
    if idle:
        longest = min(idle, key=lambda each: each.idle_since_s)
        longest.connections.discard(longest)  # it counts no more, at once
        longest.transport.close()


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


def listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens at `host`; with port None, at the first free one from PORT on.

    Raises: UserError if the port is in use, or nothing can listen there.
    """
    if port is not None and not 0 <= port <= 65535:
        raise UserError(f"--port {port}: a port is a number from 0 to 65535. Try --port {PORT}.")
    tried = [port] if port is not None else [*range(PORT, PORT + PORTS_TRIED), 0]
    for each in tried:
        try:
            return _bound(host, each)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE and port is None:
                continue
            raise _cannot_listen(host, each, problem) from None
    raise AssertionError("port 0 is always free")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(256)
        found.set_inheritable(False)
    except BaseException:
        found.close()
        raise
    return found


def _cannot_listen(host: str, port: int, problem: OSError) -> UserError:
    if problem.errno == errno.EADDRINUSE:
        return UserError(f"--port {port}: another program listens there. Name another, or leave --port out.")
    if isinstance(problem, socket.gaierror) or problem.errno == errno.EADDRNOTAVAIL:
        return UserError(f"--host {host}: no address of this machine. Try --host 0.0.0.0 for all that it has.")
    if problem.errno == errno.EACCES:
        return UserError(f"--port {port}: only root may listen there. Try --port {PORT}.")
    return UserError(f"--host {host} --port {port}: cannot listen there ({problem.strerror}).")


async def _page(request: Request) -> Response:
    return FileResponse(PAGE / "index.html", headers={"cache-control": "no-cache"})


def make_app(
    root: Path, token: str = "", port: int = 0, names: tuple[str, ...] = OWN_NAMES, mcp: MCPServer | None = None
) -> tuple[AuthMiddleware, Callable[[], None]]:
    """Return the application that shows the runs under `root`, and what lets go of those who wait for its news.

    `token` and `names` as in `AuthMiddleware`. mcp: answers at /mcp.
    """
    api = Api(Library(root))
    # The middleware has looked at Host and token already, for all paths.
    agents = None if mcp is None else mcp.streamable_http_app(json_response=True, transport_security=None, host="")
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
    names = (*OWN_NAMES, host.lower()) if is_loopback(host) else OWN_NAMES
    app, let_go = make_app(root, token, port, names, mcp)
    options: dict[str, Any] = {
        "http": PatientProtocol,
        "ws": "none",
        "loop": "asyncio",
        "log_level": "error",
        "access_log": False,  # it would show the token
        "server_header": False,
        "limit_concurrency": MOST_CONNECTIONS,
        "h11_max_incomplete_event_size": MOST_HEADER_BYTES,
        "timeout_graceful_shutdown": 2,
        "proxy_headers": False,
    }
    return PageServer(uvicorn.Config(app, **options), let_go)


def url(listener: socket.socket, host: str, token: str) -> str:
    """Return the address to open."""
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname(), "": socket.gethostname()}.get(host, host)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{listener.getsockname()[1]}/" + (f"?token={token}" if token else "")
