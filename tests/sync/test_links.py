"""A site's exchange lets in only sites of its run; one that is not let in is told why."""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from argosy.processes.connection import Connection
from argosy.processes.secret import call
from argosy.sync.links import Links, contexts
from argosy.sync.messages import (
    FROM_SITE,
    VERSION,
    FromSite,
    LineRequest,
    SiteHello,
    framed,
    unframed,
)  # fmt: skip

SECRET = b"s" * 64
HELLO: dict[str, Any] = {"kind": "hello", "site": "B", "version": VERSION, "run": "r", "model": "m"}


def hello() -> SiteHello:
    """What site A says of itself."""
    return SiteHello(version=VERSION, site="A", run="r", model="m")


class Stranger:
    """Somebody who calls site A, and says what the test wants."""

    def __init__(self, port: int, secret: bytes):
        connected = socket.create_connection(("127.0.0.1", port))
        self.connection = Connection(connected, call(secret), selectors.DefaultSelector(), None)
        self.heard: list[FromSite] = []

    def turn(self) -> None:
        self.heard += [unframed(frame, FROM_SITE)[0] for frame in self.connection.take()]


@pytest.fixture
def told() -> Iterator[Callable[..., tuple[list[str], list[FromSite], Links]]]:
    """Have somebody call site A, who has a secret and says something; A's refusals, what it answered, and its links."""
    opened: list[Links] = []

    def say(*frames: bytes, secret: bytes = SECRET) -> tuple[list[str], list[FromSite], Links]:
        listener, refusals = socket.create_server(("127.0.0.1", 0)), list[str]()
        addresses = {"A": listener.getsockname()[:2], "B": ("127.0.0.1", 1)}
        links = Links("A", addresses, listener, SECRET, None, FROM_SITE, hello,
                      lambda who, why: refusals.append(why))  # fmt: skip
        opened.append(links)
        other, is_said = Stranger(addresses["A"][1], secret), False
        for _ in range(200):
            links.turn(0.01)
            other.turn()
            if other.connection.is_proven and not is_said:
                is_said = True
                for frame in frames:
                    other.connection.send(frame)
            if refusals or "B" in links.sites:
                break
        links.turn(0.01)
        other.turn()
        return refusals, other.heard, links

    yield say
    for links in opened:
        links.close()


def test_a_site_of_the_run_is_let_in(told: Callable[..., Any]) -> None:
    refusals, heard, links = told(json.dumps(HELLO).encode())
    assert not refusals and list(links.sites) == ["B"] and heard[0] == hello()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"version": VERSION + 1}, f"it speaks version {VERSION + 1} of the exchange, and this site {VERSION}"),
        ({"model": "other"}, "it trains another model"),
        ({"run": "other"}, "it is of another run"),
        ({"site": "X"}, 'it calls itself the site "X", which is not expected there'),
    ],
)
def test_one_that_is_of_something_else_is_told_why_not(
    told: Callable[..., Any], other: dict[str, Any], why: str
) -> None:
    refusals, heard, links = told(json.dumps({**HELLO, **other}).encode())
    assert refusals and why in refusals[0] and not links.sites
    assert heard[-1].kind == "refused" and heard[-1].why == refusals[0]


def test_one_with_another_secret_is_not_listened_to(told: Callable[..., Any]) -> None:
    refusals, heard, links = told(json.dumps(HELLO).encode(), secret=b"x" * 64)
    assert refusals and not links.sites and not heard
    assert "the same secret (ARGOSY_SECRET_FILE)" in refusals[0]


def test_one_whose_certificate_follows_from_another_secret_is_told_so() -> None:
    listener, refusals = socket.create_server(("127.0.0.1", 0)), list[str]()
    addresses = {"A": listener.getsockname()[:2], "B": ("127.0.0.1", 1)}
    links = Links("A", addresses, listener, SECRET, contexts(SECRET), FROM_SITE, hello,
                  lambda who, why: refusals.append(why))  # fmt: skip
    connected = socket.create_connection(addresses["A"])
    other = Connection(connected, call(b"x" * 64), selectors.DefaultSelector(), None, contexts(b"x" * 64)[0])
    for _ in range(200):
        links.turn(0.01)
        other.take()
        if refusals:
            break
    links.close()
    assert refusals and refusals[0].startswith("TLS: ") and "the same secret (ARGOSY_SECRET_FILE)" in refusals[0]


@pytest.mark.parametrize("frame", [b"\xff\xfe", b"[]\n", b'{"kind":"hello"}\n', framed(LineRequest(round=1))])
def test_nonsense_ends_the_conversation(told: Callable[..., Any], frame: bytes) -> None:
    refusals, _, links = told(frame)
    assert refusals and not links.sites


def test_without_a_descriptor_left_it_pauses_and_later_hears_who_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, pauses = socket.create_server(("127.0.0.1", 0)), list[float]()
    addresses = {"A": listener.getsockname()[:2], "B": ("127.0.0.1", 1)}
    links = Links("A", addresses, listener, SECRET, None, FROM_SITE, hello, lambda who, why: None)
    other = Stranger(addresses["A"][1], SECRET)
    limits, next_one = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(listener.fileno())
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, limits[1]))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", pauses.append)
            links.turn(1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert pauses
    for _ in range(200):
        links.turn(0.01)
        other.turn()
        if other.connection.is_proven:
            break
    links.close()
    assert other.connection.is_proven


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
def test_a_connection_that_is_cut_before_it_is_accepted_ends_alone(is_encrypted: bool) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    addresses = {"A": listener.getsockname()[:2], "B": ("127.0.0.1", 1)}
    tls = contexts(SECRET) if is_encrypted else None
    links = Links("A", addresses, listener, SECRET, tls, FROM_SITE, hello, lambda who, why: None)
    stranger = socket.create_connection(addresses["A"])
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets the connection
    stranger.close()
    for _ in range(20):
        links.turn(0.01)
    other = Connection(
        socket.create_connection(addresses["A"]), call(SECRET), selectors.DefaultSelector(), None, tls and tls[0]
    )
    for _ in range(200):
        links.turn(0.01)
        other.take()
        if other.is_proven:
            break
    links.close()
    assert other.is_proven


def test_a_site_that_cuts_a_call_is_called_again() -> None:
    listener, called = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    addresses = {"A": called.getsockname()[:2], "B": listener.getsockname()[:2]}
    tls = contexts(SECRET)
    links = Links("B", addresses, listener, SECRET, tls, FROM_SITE, hello, lambda who, why: None)
    called.settimeout(0.2)  # links do nothing between a call that is answered and its reset
    cut = 0
    for _ in range(100):
        links.turn(0.0)
        with suppress(TimeoutError):
            stranger, _ = called.accept()
            time.sleep(0.05)  # it has connected, and is cut before it is looked at
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
            cut += 1
        if cut == 2:
            break
    links.close()
    assert cut == 2


def test_strangers_are_told_of_once_a_host_and_reason_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, refusals = socket.create_server(("127.0.0.1", 0)), list[tuple[str, str]]()
    addresses = {"A": listener.getsockname()[:2], "B": ("127.0.0.1", 1)}
    links = Links(
        "A", addresses, listener, SECRET, None, FROM_SITE, hello, lambda who, why: refusals.append((who, why))
    )

    def come(secret: bytes, *frames: bytes) -> None:
        stranger, is_said = Stranger(addresses["A"][1], secret), False
        for _ in range(200):
            links.turn(0.01)
            stranger.turn()
            if stranger.connection.is_proven and not is_said:
                is_said = True
                for frame in frames:
                    stranger.connection.send(frame)
            if stranger.connection.problem:
                return
        raise AssertionError("it was not refused")

    for _ in range(3):
        come(b"x" * 64)
    come(SECRET, b"[]")
    assert [who for who, _ in refusals] == ["127.0.0.1"] * 2
    assert "does not know this run's secret" in refusals[0][1] and "invalid message" in refusals[1][1]
    monkeypatch.setattr("argosy.sync.links.MOST_REFUSALS", 2)
    come(SECRET, framed(LineRequest(round=1)))
    assert len(refusals) == 2
    links.close()
