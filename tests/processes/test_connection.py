"""Frames arrive whole and in order, or the connection has a problem; nothing waits, and nothing is believed."""

from __future__ import annotations

import select
import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.processes import connection as module
from argosy.processes.connection import FRAME_BYTES, Connection, listener_of
from argosy.processes.connection import call as connect
from argosy.processes.secret import HELLO_MAGIC, Handshake, call, certificate_of, listen
from waiting import PATIENT_S

SECRET = b"s" * 32


class Pair:
    """Two ends on one selector, and what each has received."""

    def __init__(
        self,
        caller: Handshake | None = None,
        callers_tls: ssl.SSLContext | None = None,
        listeners_tls: ssl.SSLContext | None = None,
    ):
        one, other = _sockets()
        self.selector = selectors.DefaultSelector()
        self.received: dict[str, list[bytes]] = {"caller": [], "listener": []}
        self.caller = Connection(one, caller or call(SECRET), self.selector, "caller", callers_tls)
        self.listener = Connection(other, listen(SECRET), self.selector, "listener", listeners_tls)

    def turn_until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            for key, _ in self.selector.select(0.05):
                frames = getattr(self, key.data).take()
                self.received[key.data] += frames
                if getattr(self, key.data).problem:
                    getattr(self, key.data).close()

    @property
    def is_proven(self) -> bool:
        return self.caller.is_proven and self.listener.is_proven

    def close(self) -> None:
        self.caller.close()
        self.listener.close()
        self.selector.close()


def _sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = socket.create_connection(server.getsockname()), server.accept()[0]
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ends


@pytest.mark.parametrize(
    ("host", "called"), [("", "127.0.0.1"), ("", "::1"), ("::1", "::1"), ("127.0.0.1", "localhost")]
)
def test_a_listener_answers_both_families_where_it_is_at_no_address(host, called):
    if called == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with listener_of((host, 0)) as listener:
        socket.create_connection((called, listener.getsockname()[1]), PATIENT_S).close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    certificate_of(folder)
    return folder


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest, made: Path) -> Iterator[Pair]:
    certificate = certificate_of(made)
    contexts = (certificate.context(False), certificate.context(True)) if request.param == "tls" else (None, None)
    some = Pair(None, *contexts)
    some.turn_until(lambda: some.is_proven)
    yield some
    some.close()


def test_frames_of_all_sizes_arrive_in_order_both_ways(pair):
    frames = [b"x" * size for size in (0, 1, 1000, FRAME_BYTES, 3)]
    for frame in frames:
        pair.caller.send(frame)
        pair.listener.send(frame)
    pair.turn_until(lambda: all(len(got) == len(frames) for got in pair.received.values()))
    assert pair.received == {"caller": frames, "listener": frames}


def test_what_is_urgent_overtakes_what_is_much(pair):
    much = [bytes([number]) * (FRAME_BYTES // 4) for number in range(32)]
    for frame in much:
        pair.caller.send(frame, is_bulk=True)
    pair.caller.send(b"urgent")
    pair.turn_until(lambda: len(pair.received["listener"]) == 33)
    assert [frame for frame in pair.received["listener"] if frame != b"urgent"] == much
    assert pair.received["listener"].index(b"urgent") < 32


def test_an_end_that_takes_nothing_holds_nobody_up_and_is_given_up(pair):
    began = time.monotonic()
    while not pair.caller.problem:
        pair.caller.send(bytes(FRAME_BYTES))
    assert "accepts no more" in pair.caller.problem and time.monotonic() - began < 5


def test_one_turn_reads_so_much_and_no_more(pair):
    for _ in range(16):
        pair.caller.send(bytes(FRAME_BYTES // 4))
    assert "listener" in [key.data for key, _ in pair.selector.select(10)]
    first = pair.listener.take()
    assert sum(map(len, first)) <= module.TURN_BYTES + module.CONNECTION_RECEIVE_BYTES
    pair.turn_until(lambda: len(pair.received["listener"]) + len(first) == 16)


def test_the_end_of_the_other_is_noticed_after_what_it_said_last(pair):
    pair.caller.send(b"last words")
    pair.caller.close()
    pair.turn_until(lambda: pair.listener.problem)
    assert pair.received["listener"] == [b"last words"] and "closed" in pair.listener.problem


def test_an_end_that_is_called_by_a_stranger_tells_it_nothing_and_says_so():
    pair = Pair(call(b"o" * 32))
    pair.turn_until(lambda: pair.listener.problem and pair.caller.problem)
    assert pair.listener.is_stranger and pair.caller.is_stranger
    assert not pair.received["caller"] and not pair.received["listener"]
    pair.close()


def test_without_the_certificate_nobody_gets_to_the_handshake(made, tmp_path):
    other = certificate_of(tmp_path)
    pair = Pair(None, other.context(False), certificate_of(made).context(True))
    pair.turn_until(lambda: pair.listener.problem and pair.caller.problem)
    assert not pair.is_proven and pair.caller.is_stranger
    pair.close()


def wait_for(end: socket.socket) -> bool:
    """Wait until something has come."""
    return bool(select.select([end], [], [], 10)[0])


class Tapped:
    """A listener behind somebody who holds the wire: `wire` is theirs, and what the caller sends goes through it."""

    def __init__(self) -> None:
        outer, self.inside = _sockets()
        self.wire, inner = _sockets()
        self.selector = selectors.DefaultSelector()
        self.caller = Connection(outer, call(SECRET), self.selector, "caller")
        self.listener = Connection(inner, listen(SECRET), self.selector, "listener")
        while not (self.caller.is_proven and self.listener.is_proven):
            for end in (self.caller, self.listener):
                end.take()
            self.pass_on()

    def pass_on(self) -> None:
        for origin, to in ((self.inside, self.wire), (self.wire, self.inside)):
            origin.setblocking(False)
            with suppress(BlockingIOError):
                to.sendall(origin.recv(1 << 16))

    def recorded(self, frame: bytes) -> bytes:
        """What the caller sends for this frame; it is not passed on."""
        self.caller.send(frame)
        assert wait_for(self.inside)
        return self.inside.recv(1 << 16)

    def hears(self, wire: bytes) -> list[bytes]:
        """What the listener makes of these bytes."""
        self.wire.sendall(wire)
        while "listener" not in [key.data for key, _ in self.selector.select(10)]:
            pass
        return self.listener.take()

    def close(self) -> None:
        for end in (self.caller, self.listener, self.inside, self.wire, self.selector):
            end.close()


@pytest.fixture
def tapped() -> Iterator[Tapped]:
    some = Tapped()
    yield some
    some.close()


def test_what_was_recorded_cannot_be_said_again(tapped):
    said = tapped.recorded(b"finish")
    assert tapped.hears(said) == [b"finish"]
    assert tapped.hears(said) == [] and "did not send" in tapped.listener.problem


def test_nothing_can_be_left_out(tapped):
    tapped.recorded(b"one")
    assert tapped.hears(tapped.recorded(b"two")) == [] and tapped.listener.problem


def test_what_one_end_said_is_not_taken_from_the_other(tapped):
    assert (tapped.hears(tapped.recorded(b"one"))) == [b"one"]
    tapped.listener.send(b"zero")
    assert wait_for(tapped.wire)
    echo = tapped.wire.recv(1 << 16)
    assert tapped.hears(echo) == [] and tapped.listener.problem


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_changed_byte_is_taken(data):
    tapped = Tapped()
    said = bytearray(tapped.recorded(b'{"kind":"done","slot":0}'))
    at = data.draw(st.integers(0, len(said) - 1))
    said[at] ^= data.draw(st.integers(1, 255))
    assert tapped.hears(bytes(said)) == []
    assert tapped.listener.problem or at < 4, "a longer length waits for more"
    tapped.close()


def test_a_frame_that_is_too_long_is_refused_before_it_has_come(tapped):
    assert tapped.hears(struct.pack(">I", FRAME_BYTES + 1) + bytes(32)) == []
    assert "1048576 are the most" in tapped.listener.problem


@settings(max_examples=100, deadline=None)
@given(chunks=st.lists(st.binary(min_size=1, max_size=2000), min_size=1, max_size=6))
def test_whatever_a_stranger_sends_is_the_end_of_its_own_connection_at_most(chunks):
    one, other = _sockets()
    with one, selectors.DefaultSelector() as selector:
        listener = Connection(other, listen(SECRET), selector, None)
        for chunk in chunks:
            one.sendall(chunk)
            assert selector.select(10) and listener.take() == []
            if listener.problem:
                break
        assert not listener.is_proven
        listener.close()
        assert one.recv(len(HELLO_MAGIC)) == HELLO_MAGIC


def test_a_call_does_not_wait_whether_it_is_answered_or_not():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = connect(listener.getsockname())
        connected = calling.result(timeout=PATIENT_S)
        assert connected.getpeername() == listener.getsockname()
        connected.close()
        address = listener.getsockname()
    assert isinstance(connect(address).exception(timeout=PATIENT_S), ConnectionRefusedError)
    assert connect(("a..b", 1)).exception(timeout=PATIENT_S), "a name that cannot be"


def test_a_call_without_a_thread_to_call_in_fails_as_one_that_nobody_answers(monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert isinstance(connect(("127.0.0.1", 9)).exception(timeout=0), OSError)
