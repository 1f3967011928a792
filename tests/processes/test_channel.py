"""Messages between processes, and connections that break."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from argosy.processes.channel import Channel, ChannelClosed

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
    with pytest.raises(ChannelClosed):
        there.take()


def test_data_arrives_as_it_was_sent_between_other_messages(ends):
    here, there = ends
    parts = [b"", b"\n{}\n", bytes(range(256)) * 4000, np.arange(5, dtype=np.int64).data]
    sending = threading.Thread(
        target=lambda: [here.send("one"), here.send("two", data=parts, number=2), here.send("three", data=[])]
    )
    sending.start()
    assert there.receive() == {"kind": "one"}
    two = there.receive()
    assert (two["kind"], two["number"]) == ("two", 2)
    assert [bytes(part) for part in two["data"]] == [bytes(part) for part in parts]
    assert there.receive() == {"kind": "three", "data": []}
    sending.join()


def test_what_came_together_is_not_waited_for(ends):
    here, there = ends
    here.send("one")
    here.send("two")
    assert there.receive() == {"kind": "one"}
    assert there.wait(0.0) and there.take() == [{"kind": "two"}]
    assert not there.wait(0.0)


def test_a_message_is_taken_once_all_of_its_data_is_there(ends):
    here, there = ends
    os.write(here.fileno(), b'{"kind": "half", "data": [4]}\nab')
    assert there.take() == []
    os.write(here.fileno(), b"cd")
    (message,) = there.take()
    assert bytes(message["data"][0]) == b"abcd"


def test_descriptors_go_with_their_message_and_are_closed_if_nobody_takes_them(ends):
    here, there = ends
    read, write = os.pipe()
    for number in range(2):
        here.send("file", descriptors=[write], number=number)
    os.close(write)
    first = there.receive()
    os.write(first["descriptors"][0], b"x")
    assert os.read(read, 10) == b"x"
    os.close(first["descriptors"][0])
    (second,) = there.take()
    here.send("file", descriptors=second["descriptors"])
    os.close(second["descriptors"][0])
    assert there.wait(5)
    there._read()
    there.close()
    assert os.read(read, 10) == b""
    os.close(read)


def test_a_peer_that_takes_nothing_is_waited_for_if_asked():
    one, other = socket.socketpair()
    here, there = Channel(one, send_timeout_s=math.inf), Channel(other)
    sending = threading.Thread(target=here.send, args=("long",), kwargs={"text": "x" * 10_000_000})
    sending.start()
    time.sleep(0.3)
    assert len(there.receive()["text"]) == 10_000_000
    sending.join()
    here.close()
    there.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"[1]\n",
        b'{"colour": "red"}\n',
        b"\xff\n",
        b'{"kind": "hello", "data": "much"}\n',
        b'{"kind": "hello", "data": [-1]}\n',
        b'{"kind": "hello", "descriptors": "1"}\n',
        b'{"kind": "hello", "descriptors": 1}\n',
    ],
)
def test_a_peer_that_does_not_speak_the_protocol_is_gone(data):
    one, other = socket.socketpair()
    with one:
        one.sendall(data)
        there = Channel(other)
        with pytest.raises(ChannelClosed, match="invalid message"):
            there.take()
        there.close()


def test_nothing_follows_half_a_message():
    """The other end takes nothing for a while: what is said then is cut off, and must not be gone on from."""
    one, other = socket.socketpair()
    here, there = Channel(one, send_timeout_s=0.1), Channel(other)
    with pytest.raises(ChannelClosed):
        here.send("long", text="x" * 10_000_000)
    with pytest.raises(ChannelClosed):
        here.take()
    with pytest.raises(ChannelClosed):
        while True:
            assert not there.take()
    here.close()
    there.close()
