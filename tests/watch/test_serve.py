""""""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from argosy.config.launch import host_of, is_loopback
from argosy.watch import http
from argosy.watch.http import new_token
from argosy.watch.serve import AuthMiddleware
from run_folders import Made
from watch.served import Served, served

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    Made(steps=5).write(root / "demo")
    return root


@pytest.fixture(scope="module")
def open_server(root: Path) -> Iterator[Served]:
    with served(root) as found:
        yield found


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with served(root, TOKEN) as found:
        yield found


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/demo", "/api/live", "/metrics", "/static/app.js"])
@pytest.mark.parametrize(
    "given",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"authorization": TOKEN},
     {"cookie": "argosy_watch_0=wrong"}, {"cookie": '"'}, {"authorization": "Bearer \xff"},
     {"authorization": f"Bearer {TOKEN[:-1]}"}, {"authorization": f"Bearer {TOKEN}x"}],
)  # fmt: skip
def test_without_the_token_nothing_is_read(server: Served, path: str, given: dict[str, str]) -> None:
    answer = server.get(path, **given)
    assert answer.status == 401
    assert b"argosy watch" in answer.body
    assert b"demo" not in answer.body


def test_a_wrong_token_in_the_address_is_refused_although_the_cookie_is_right(server: Served) -> None:
    cookie = {"cookie": f"argosy_watch_{server.port}={TOKEN}"}
    assert server.get("/api/runs", **cookie).status == 200
    answer = server.get("/api/runs?token=wrong", **cookie)
    assert answer.status == 401
    assert b"the token is wrong" in answer.body


def test_the_printed_address_opens_the_page_and_leaves_a_cookie(server: Served) -> None:
    answer = server.get(f"/?token={TOKEN}&run=a%2Fb")
    assert answer.status == 303
    assert answer.headers["location"] == "/?run=a%2Fb"  # the token is in no history
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "Domain" not in cookie
    assert server.get("/api/runs", cookie=cookie.partition(";")[0]).status == 200


def test_programs_give_the_token_in_a_header_or_the_address(server: Served) -> None:
    assert server.get("/metrics", authorization=f"Bearer {TOKEN}").status == 200
    assert server.get(f"/api/runs?token={TOKEN}").status == 200


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "/%2f%2fevil.example"])
def test_the_way_back_leads_to_this_server(server: Served, path: str) -> None:
    location = server.get(f"{path}?token={TOKEN}").headers.get("location", "/")
    assert location.startswith("/") and not location.startswith(("//", "/\\"))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "", "10.0.0.1"]
)
def test_a_name_that_was_made_to_lead_here_is_refused(open_server: Served, host: str) -> None:
    answer = open_server.get("/api/runs", host=host)
    assert answer.status == 403
    assert b"demo" not in answer.body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "[::1]:9000", "127.0.0.1:80"])
def test_this_machine_s_own_names_are_answered(open_server: Served, host: str) -> None:
    assert open_server.get("/api/runs", host=host).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_s_page_reads_nothing(open_server: Served, site: str) -> None:
    assert open_server.get("/api/runs", sec_fetch_site=site).status == 403
    assert open_server.get("/api/runs", sec_fetch_site="same-origin").status == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/none", "/nothing", "/metrics"])
def test_every_answer_tells_the_browser_what_the_page_may_do(open_server: Served, path: str) -> None:
    headers = open_server.get(path, origin="http://evil.example").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_a_request_that_does_not_arrive_ends(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_LIMIT_S", 0.3)
    with served(root) as server:
        silent, slow = server.connection(), server.connection()
        slow.sendall(b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nX: ")
        reused = server.connection()
        reused.sendall(b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in reused.recv(100)
        reused.sendall(b"GET /api")
        for _ in range(3):
            time.sleep(0.2)
            with_more = b"x"
            try:
                slow.sendall(with_more)
            except OSError:
                break
        silent.settimeout(5)
        assert silent.recv(10) == b""
        _wait_for_end(reused)
        assert server.get("/api/runs").status == 200


@pytest.mark.parametrize("limits", [{"MOST_OF_ADDRESS": 10}, {"MOST_OF_ADDRESS": 1000}])
def test_connections_that_idle_keep_nobody_out(
    root: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    for name, value in {"MOST_CONNECTIONS": 20, **limits}.items():
        monkeypatch.setattr(http, name, value)
    with served(root, TOKEN) as server, ExitStack() as held:
        idle = [held.enter_context(server.connection()) for _ in range(60)]
        assert server.get("/api/runs", authorization=f"Bearer {TOKEN}").status == 200
        idle[0].settimeout(20)
        assert idle[0].recv(1) == b"", "the one that idled for longest is closed"


def _wait_for_end(connection) -> None:
    connection.settimeout(5)
    while connection.recv(65536):
        pass


def test_news_are_not_cut_off_as_a_slow_request(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_LIMIT_S", 0.2)
    with served(root) as server, server.connection() as line:
        line.sendall(b"GET /api/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.8)
        Made(steps=7).write(root / "other")
        line.settimeout(15)
        text = b""
        while b'"other"' not in text:
            part = line.recv(65536)
            assert part
            text += part


def test_a_client_that_takes_nothing_holds_nobody_up(root: Path, open_server: Served) -> None:
    lazy = [open_server.connection() for _ in range(20)]
    for connection in lazy:
        connection.sendall(b"GET /api/runs/demo HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    assert open_server.get("/api/runs").status == 200
    for connection in lazy:
        connection.close()


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"b" * 100_000, b"\x16\x03\x01\x00",
     b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"\r\n" * 10_000, b"NONSENSE\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request_is_refused(open_server: Served, request_bytes: bytes) -> None:
    with open_server.connection() as connection:
        connection.settimeout(10)
        try:
            connection.sendall(request_bytes)
            connection.shutdown(1)
            answer = connection.recv(100)
        except OSError:
            answer = b""
        assert answer == b"" or b" 4" in answer[:15]
    assert open_server.get("/api/runs").status == 200


def test_tokens_are_long_and_never_the_same() -> None:
    assert len(new_token()) > 40
    assert new_token() != new_token()


def test_a_host_s_name_is_told_from_its_port() -> None:
    assert [host_of(text) for text in ("a:1", "A", "[::1]:2", "::1", "[fe80::1]", "")] == [
        "a", "a", "::1", "::1", "fe80::1", "",
    ]  # fmt: skip


def test_only_loopback_goes_without_a_token() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_the_guard_passes_on_what_is_no_request(root: Path) -> None:
    passed = []

    async def app(scope, receive, send) -> None:
        passed.append(scope["type"])

    import asyncio

    asyncio.run(AuthMiddleware(app, TOKEN)({"type": "lifespan"}, None, None))
    assert passed == ["lifespan"]
