"""Messages between processes, and connections that break."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from argosy.processes import channel as module
from argosy.processes.channel import Channel, Gone, call

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = (Channel(end) for end in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_what_was_said_before_the_end_is_heard(ends):
    here, there = ends
    here.send("one", number=1)
    here.send("two")
    here.close()
    assert there.take() == [{"kind": "one", "number": 1}, {"kind": "two"}]
    with pytest.raises(Gone):
        there.take()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"[1]\n", b'{"colour": "red"}\n', b"\xff\n"])
def test_who_says_what_is_no_message_is_gone(data):
    one, other = socket.socketpair()
    with one:
        one.sendall(data)
        there = Channel(other)
        with pytest.raises(Gone, match="no message"):
            there.take()
        there.close()


def test_nothing_follows_half_a_message(monkeypatch):
    """The other end takes nothing for a while: what is said then is cut off, and must not be gone on from."""
    monkeypatch.setattr(module, "SEND_TIMEOUT_S", 0.1)
    one, other = socket.socketpair()
    here, there = Channel(one), Channel(other)
    with pytest.raises(Gone):
        here.send("long", text="x" * 10_000_000)
    with pytest.raises(Gone):
        here.take()
    with pytest.raises(Gone):
        while True:
            assert not there.take()
    here.close()
    there.close()


def test_a_call_is_answered_or_not_and_nobody_waits_for_it():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = call(listener.getsockname())
        connection = calling.result(timeout=10)
        assert connection.getpeername() == listener.getsockname()
        connection.close()
        address = listener.getsockname()
    assert isinstance(call(address).exception(timeout=10), ConnectionRefusedError)
