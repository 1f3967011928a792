"""Access to the page: the token, the Host header, and the headers that tell a browser what a page may do."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
FOR_PROGRAMS = ("/api/", "/metrics")
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

    Without a token, a request must name this machine's loopback address as its host: a foreign page whose name was
    made to lead here (DNS rebinding) does not. With one, whoever knows it may come by any name.
    """

    def __init__(self, app: ASGIApp, token: str = "", port: int = 0, names: Iterable[str] = OWN_NAMES):
        self._app, self._token = app, token
        self._cookie = f"argosy_watch_{port}"  # cookies do not tell ports apart
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, _marking(send))
        else:
            await self._app(scope, receive, _marking(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer for whom this is not; None if it is for the caller."""
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
