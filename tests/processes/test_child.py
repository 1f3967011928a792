"""Processes that are started: what they are given and say, how they end, and what they leave to their parent."""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from argosy.processes import child as module
from argosy.processes.child import (
    Channel,
    ChannelClosed,
    Child,
    Patience,
    channel_to_parent,
    end_with_parent,
    messages,
    process_state,
)
from waiting import is_alive, wait_until

HERE = "processes.test_child"
Start = Callable[..., Child]


def main() -> None:
    """What the children of these tests run: argument 1 says as what."""
    parent = channel_to_parent()
    match sys.argv[1]:
        case "tell":
            print("a stray print")
            parent.send(
                "told",
                arguments=sys.argv[2:],
                path=sys.path,
                environment=dict(os.environ),
                torch=has_torch(),
                kept=gc.get_freeze_count(),
            )
        case "echo":
            for message in messages(parent):
                parent.send("echo", of=message["text"])
            sys.exit(7)
        case "work":
            end_with_parent(parent)
            parent.send("working")
            time.sleep(60)
        case "nest":
            child = Child(HERE, sys.argv[2])
            if not os.fork():
                time.sleep(60)  # holds the parent's end of the child's channel
            parent.send("nested", pid=child.pid)
            time.sleep(60)
        case "hang":
            parent.close()
            time.sleep(60)


def has_torch() -> bool:
    return "torch" in sys.modules


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Child] = []

    def begin(*arguments: str, **options: Any) -> Child:
        started.append(Child(HERE, *arguments, **options))
        return started[-1]

    yield begin
    for child in started:
        child.kill()


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_alive(pid))


def test_it_finds_what_its_parent_finds_and_has_an_environment_and_a_session_of_its_own(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a file that shadows a module may lie
    child = start("tell", "x y", environment={"COLOUR": "red"})
    told = child.channel.receive()
    assert told["arguments"] == ["x y"] and told["environment"]["COLOUR"] == "red"
    assert str(tmp_path) not in told["path"] and {path for path in sys.path if path} <= set(told["path"])
    assert os.getsid(start("echo").pid) != os.getsid(0)


def test_what_it_imported_is_in_no_garbage_collection(start):
    assert start("tell").channel.receive()["kept"] > 10_000


def test_what_it_prints_is_not_this_process_s_answer(start, capfd, monkeypatch):
    monkeypatch.setattr(module, "KILL_WAIT_S", 60.0)
    child = start("tell")
    child.channel.receive()
    assert child.reap() == "exit code 0"
    out, err = capfd.readouterr()
    assert not out and "a stray print" in err


def test_it_says_how_it_ended(start, monkeypatch):
    monkeypatch.setattr(module, "KILL_WAIT_S", 60.0)  # Python's own end may take long on a busy machine
    child = start("echo")
    child.channel.send("say", text="é")
    assert child.hear(20.0) == [{"kind": "echo", "of": "é"}] and child.is_alive
    assert child.hear(0.0) == []
    assert child.reap() == "exit code 7"
    killed = start("echo")
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        killed.hear(20.0)
    assert killed.reap() == "signal SIGKILL" and not killed.is_alive
    with pytest.raises(ChannelClosed):
        killed.channel.send("say", text="")


def test_one_that_closed_its_end_and_does_not_end_is_killed(start):
    child = start("hang")
    with pytest.raises(ChannelClosed):
        child.hear(20.0)
    assert child.reap() == "signal SIGKILL"


@pytest.mark.parametrize("what", ["echo", "work"])
def test_it_ends_with_its_parent_even_if_another_process_holds_its_channel(start, what):
    parent = start("nest", what)
    pid = parent.channel.receive()["pid"]
    time.sleep(0.2)
    assert is_alive(pid)
    parent.kill()
    wait_until_gone(pid)


def test_it_ends_when_its_channel_closes(start):
    child = start("work")
    child.channel.receive()
    child.channel.close()
    wait_until_gone(child.pid)


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def end_of(patience: Patience) -> str:
    while not (why := patience.end()):
        time.sleep(0.01)
    return why


def test_a_process_that_is_stopped_is_given_up_sooner_than_one_that_is_slow(sleeper):
    assert end_of(Patience(sleeper, limit_s=0.3, stopped_s=60)).startswith("it did not answer")
    os.kill(sleeper, signal.SIGSTOP)
    assert end_of(Patience(sleeper, limit_s=60, stopped_s=0.3)).startswith("it was stopped")


def test_one_that_goes_on_in_between_is_waited_for_anew(sleeper):
    patience = Patience(sleeper, stopped_s=0.5)
    for _ in range(4):
        os.kill(sleeper, signal.SIGSTOP)
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s:
            assert not patience.end()
        os.kill(sleeper, signal.SIGCONT)
        while process_state(sleeper) == "T":
            pass
        assert not patience.end()


def test_time_in_which_the_one_that_waits_stood_still_does_not_count(sleeper, monkeypatch):
    patience = Patience(sleeper, limit_s=30)
    now_s = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s + 3600)
    assert not patience.end()


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
    here.send("another")
    here.send("file", descriptors=second["descriptors"])
    os.close(second["descriptors"][0])
    assert there.receive()["kind"] == "another"
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


if __name__ == "__main__":
    main()


COMMAND = """
import signal, sys, time
from pathlib import Path
from argosy.processes.child import tie_to_starter
signal.signal(signal.SIGTERM, lambda *_: sys.exit(Path(sys.argv[1]).write_text("stopped")))
tie_to_starter()
Path(sys.argv[1]).touch()
time.sleep(600)
"""
STARTER = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]], env={**os.environ, "ARGOSY_TIED_TO": str(os.getpid())})
"""


def test_a_command_that_is_tied_stops_when_the_process_that_has_started_it_is_killed(tmp_path):
    shown = tmp_path / "shown"
    with subprocess.Popen([sys.executable, "-c", STARTER, COMMAND, str(shown)]) as starter:
        wait_until(shown.exists, process=starter)
        starter.kill()
    assert wait_until(shown.read_text) == "stopped"
