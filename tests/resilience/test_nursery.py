"""Processes forked from one that has imported what they need."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from argosy.resilience.channel import Gone, Message
from argosy.resilience.nursery import Nursery, channel_to_parent

HERE = "resilience.test_nursery"


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


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    forks = Nursery("colorsys")
    yield forks
    forks.close()


def wait_for(forks: Nursery, condition: Callable[[list[Message]], bool]) -> list[Message]:
    """What the nursery says until `condition` holds of it."""
    said: list[Message] = []
    end = time.monotonic() + 10
    while not condition(said):
        assert time.monotonic() < end, said
        said += forks.take()
        time.sleep(0.005)
    return said


def test_it_forks_what_is_asked_for_with_a_channel_and_an_environment_of_its_own(nursery):
    red = nursery.fork("a", f"{HERE}:greet", {"COLOUR": "red"})
    blue = nursery.fork("b", f"{HERE}:greet", {"COLOUR": "blue"})
    hellos = [channel.receive() for channel in (red, blue)]
    assert [h["colour"] for h in hellos] == ["red", "blue"] and all(h["imported"] for h in hellos)
    born = {m["key"]: m["pid"] for m in wait_for(nursery, lambda said: len(said) == 2)}
    assert born == {"a": hellos[0]["pid"], "b": hellos[1]["pid"]}
    blue.send("say", text="x" * 200_000)
    assert len(blue.receive()["of"]) == 200_000


def test_it_tells_how_each_of_them_ended(nursery):
    channels = [nursery.fork("loop", f"{HERE}:greet", {"COLOUR": ""}), nursery.fork("fail", f"{HERE}:fail", {})]
    killed, other = channels[0].receive()["pid"], nursery.fork("left", f"{HERE}:greet", {"COLOUR": ""})
    left = other.receive()["pid"]
    os.kill(killed, signal.SIGKILL)
    other.close()
    said = wait_for(nursery, lambda said: sum(m["kind"] == "ended" for m in said) == 3)
    ended = {m["pid"]: m["exit_code"] for m in said if m["kind"] == "ended"}
    failed = next(m["pid"] for m in said if m["kind"] == "born" and m["key"] == "fail")
    assert ended == {killed: -signal.SIGKILL, left: 7, failed: 3}
    with pytest.raises(Gone):
        channels[0].receive()


def test_a_nursery_that_was_killed_is_gone_and_its_processes_hear_of_their_asker_still(nursery):
    channel = nursery.fork("a", f"{HERE}:greet", {"COLOUR": "red"})
    channel.receive()
    os.kill(nursery.pid, signal.SIGKILL)
    channel.send("say", text="still here")
    assert channel.receive()["of"] == "still here"
    with pytest.raises(Gone):
        wait_for(nursery, lambda said: False)
    with pytest.raises(Gone):
        nursery.fork("b", f"{HERE}:greet", {})


def test_signals_that_a_terminal_sends_to_all_do_not_end_it(nursery):
    nursery.fork("a", f"{HERE}:greet", {"COLOUR": "red"}).receive()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(nursery.pid, number)
    assert nursery.fork("b", f"{HERE}:greet", {"COLOUR": "blue"}).receive()["colour"] == "blue"
