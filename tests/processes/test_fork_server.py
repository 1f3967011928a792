"""Processes forked from one that has imported what they need."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from argosy.processes.channel import Gone, Message
from argosy.processes.child import Entry, channel_to_parent
from argosy.processes.fork_server import ForkServer


def greet() -> None:
    """Entry: say who it is, and echo what it hears until the asker is gone."""
    parent = channel_to_parent()
    parent.send("hello", pid=os.getpid(), colour=os.environ["COLOUR"], imported="colorsys" in sys.modules)
    while True:
        try:
            parent.send("echo", of=parent.receive()["text"])
        except Gone:
            sys.exit(7)


def fail() -> None:
    """Entry: end with an error."""
    raise SystemExit(3)


GREET = Entry.of(greet)


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    forks = ForkServer("colorsys")
    yield forks
    forks.close()


def wait_for(forks: ForkServer, condition: Callable[[list[Message]], bool]) -> list[Message]:
    """What the fork server says until `condition` holds of it."""
    said: list[Message] = []
    end = time.monotonic() + 10
    while not condition(said):
        assert time.monotonic() < end, said
        said += forks.take()
        time.sleep(0.005)
    return said


def test_it_forks_what_is_asked_for_with_a_channel_and_an_environment_of_its_own(fork_server):
    red = fork_server.fork("a", GREET, {"COLOUR": "red"})
    blue = fork_server.fork("b", GREET, {"COLOUR": "blue"})
    hellos = [channel.receive() for channel in (red, blue)]
    assert [h["colour"] for h in hellos] == ["red", "blue"] and all(h["imported"] for h in hellos)
    forked = {m["key"]: m["pid"] for m in wait_for(fork_server, lambda said: len(said) == 2)}
    assert forked == {"a": hellos[0]["pid"], "b": hellos[1]["pid"]}
    blue.send("say", text="x" * 200_000)
    assert len(blue.receive()["of"]) == 200_000


def test_it_tells_how_each_of_them_ended(fork_server):
    channels = [fork_server.fork("loop", GREET, {"COLOUR": ""}), fork_server.fork("fail", Entry.of(fail), {})]
    killed, other = channels[0].receive()["pid"], fork_server.fork("left", GREET, {"COLOUR": ""})
    left = other.receive()["pid"]
    os.kill(killed, signal.SIGKILL)
    other.close()
    said = wait_for(fork_server, lambda said: sum(m["kind"] == "ended" for m in said) == 3)
    ended = {m["pid"]: m["exit_code"] for m in said if m["kind"] == "ended"}
    failed = next(m["pid"] for m in said if m["kind"] == "forked" and m["key"] == "fail")
    assert ended == {killed: -signal.SIGKILL, left: 7, failed: 3}
    with pytest.raises(Gone):
        channels[0].receive()


def test_processes_of_a_killed_fork_server_still_talk_to_their_asker(fork_server):
    channel = fork_server.fork("a", GREET, {"COLOUR": "red"})
    channel.receive()
    os.kill(fork_server.pid, signal.SIGKILL)
    channel.send("say", text="still here")
    assert channel.receive()["of"] == "still here"
    with pytest.raises(Gone):
        wait_for(fork_server, lambda said: False)
    with pytest.raises(Gone):
        fork_server.fork("b", GREET, {})


def test_signals_that_a_terminal_sends_to_all_do_not_end_it(fork_server):
    fork_server.fork("a", GREET, {"COLOUR": "red"}).receive()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(fork_server.pid, number)
    assert fork_server.fork("b", GREET, {"COLOUR": "blue"}).receive()["colour"] == "blue"


def test_a_channel_is_held_by_its_process_alone(fork_server):
    """Of requests that come at once, the first process must not keep the ends of those that follow."""
    asked = [fork_server.fork(str(number), GREET, {"COLOUR": ""}) for number in range(4)]
    pids = [channel.receive()["pid"] for channel in asked]
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(Gone):
        asked[-1].receive()
