"""Processes forked from one that has imported what they need."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argosy.errors import STOP_SIGNALS
from argosy.processes import fork_server as module
from argosy.processes.child import ChannelClosed, Child, ForkEntry, Message, channel_to_parent
from argosy.processes.fork_server import FEW_HOLES, RENDEZVOUS, ForkServer, Unanswered, tried
from waiting import wait_until


def greet() -> None:
    """Entry: say who it is, and echo what it hears until the client is gone."""
    parent = channel_to_parent()
    parent.send("hello", pid=os.getpid(), colour=os.environ["COLOUR"], imported="colorsys" in sys.modules)
    while True:
        try:
            parent.send("echo", of=parent.receive()["text"])
        except ChannelClosed:
            sys.exit(7)


def fail() -> None:
    """Entry: end with an error."""
    raise SystemExit(3)


def use_gpu() -> None:
    """Entry: compute on a GPU."""
    import torch

    channel_to_parent().send("sum", value=float(torch.ones(3, device="cuda").sum()))


def load_compiler() -> None:
    """Entry of the fork server itself: import what a run that compiles needs."""
    from argosy import compiler

    compiler.load()


class Heap(ctypes.Structure):
    """glibc's mallinfo2(3)."""

    _fields_ = [("arena", ctypes.c_size_t), ("others", ctypes.c_size_t * 9)]


def free_and_allocate() -> None:
    """Entry: hold 38 MiB in 40 blocks aligned as tensors are, free half of them and allocate them anew, 40 times; tell
    how far the heap has grown, and what glibc was told."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX
    libc.mallinfo2.restype, libc.free.argtypes = Heap, [ctypes.c_void_p]

    def allocated(size: int) -> ctypes.c_void_p:
        block = ctypes.c_void_p()
        libc.posix_memalign(ctypes.byref(block), 64, size)
        return block

    before, draw = libc.mallinfo2().arena, random.Random(0)
    sizes = [quarters * 2**18 for quarters in (1, 2, 3, 5, 8) for _ in range(8)]
    held = [allocated(size) for size in sizes]
    for _ in range(40):
        some = draw.sample(range(40), 20)
        for i in some:
            libc.free(held[i])
        for i in draw.sample(some, 20):
            held[i] = allocated(sizes[i])
    grown = libc.mallinfo2().arena - before
    channel_to_parent().send("grown", bytes=grown, tunables=os.environ.get("GLIBC_TUNABLES"))


def stand_still() -> None:
    """Entry: say nothing."""
    time.sleep(60)


GREET = ForkEntry.of(greet)


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    forks = ForkServer("colorsys")
    yield forks
    forks.close()


def wait_for(forks: ForkServer, condition: Callable[[list[Message]], bool]) -> list[Message]:
    """What the fork server says until `condition` holds of it."""
    said: list[Message] = []
    wait_until(lambda: said.extend(forks.take()) or condition(said), story=lambda: said)
    return said


def color() -> None:
    """Entry of the fork server itself."""
    os.environ["COLOUR"] = os.environ["PAINT"] + "ish"


def test_what_it_is_prepared_with_is_there_in_what_it_forks_and_in_those_of_the_next_one(fork_server):
    fork_server.prepare(ForkEntry.of(color), {"PAINT": "green"})
    assert fork_server.fork("a", GREET, {}).receive()["colour"] == "greenish"
    fork_server.replace()
    assert fork_server.fork("b", GREET, {}).receive()["colour"] == "greenish"


def wait_for_a_word() -> None:
    """Entry: return once somebody writes to the pipe."""
    Path(os.environ["PIPE"]).read_text()


def test_what_needs_no_preparing_is_forked_between_two_parts_of_it(fork_server, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fork_server.prepare(ForkEntry.of(wait_for_a_word), {"PIPE": str(pipe)})
    fork_server.prepare(ForkEntry.of(color), {"PAINT": "green"})
    late = fork_server.fork("late", GREET, {})
    now = fork_server.fork("now", GREET, {"COLOUR": "none yet"}, at_once=True)
    pipe.write_text("go")
    assert (now.receive()["colour"], late.receive()["colour"]) == ("none yet", "greenish")
    said = wait_for(fork_server, lambda said: len([m for m in said if m["kind"] == "forked"]) == 2)
    assert [m["key"] for m in said if m["kind"] == "forked"] == ["now", "late"]


def shout() -> None:
    """Entry: print its colour, to both streams."""
    print(os.environ["COLOUR"], flush=True)
    print(os.environ["COLOUR"].upper(), file=sys.stderr, flush=True)


def test_one_that_was_started_early_takes_on_streams_and_what_was_put_into_the_environment(
    fork_server, monkeypatch, tmp_path
):
    monkeypatch.setenv("COLOUR", "blue")
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        fork_server.take_on(out.fileno(), err.fileno())
        for again in (False, True):  # one that replaces it prints there too
            if again:
                fork_server.replace()
            fork_server.fork("a", ForkEntry.of(shout), {})
            wait_for(fork_server, lambda said: any(m["kind"] == "ended" for m in said))
    assert (tmp_path / "out").read_text() == "blue\n" * 2
    assert (tmp_path / "err").read_text() == "BLUE\n" * 2


def test_it_forks_what_is_asked_for_with_a_channel_and_an_environment_of_its_own(fork_server):
    red = fork_server.fork("a", GREET, {"COLOUR": "red"})
    blue = fork_server.fork("b", GREET, {"COLOUR": "blue"})
    hellos = [channel.receive() for channel in (red, blue)]
    assert [h["colour"] for h in hellos] == ["red", "blue"] and all(h["imported"] for h in hellos)
    forked = {m["key"]: m["pid"] for m in wait_for(fork_server, lambda said: len(said) == 2)}
    assert forked == {"a": hellos[0]["pid"], "b": hellos[1]["pid"]}
    blue.send("say", text="x" * 200_000)
    assert len(blue.receive()["of"]) == 200_000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library than glibc")
@pytest.mark.parametrize(
    ("tunables", "driver", "told"),
    [(None, "/no", FEW_HOLES), ("glibc.malloc.perturb=0", "/no", "glibc.malloc.perturb=0"), (None, "/", None)],
)
def test_aligned_blocks_fit_into_the_holes_of_others_without_a_gpu_or_a_heap_that_the_user_sets(
    monkeypatch, tunables, driver, told
):
    """By default they do not under glibc 2.36, and do under 2.43."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr("argosy.processes.fork_server.GPU_DRIVERS", (Path(driver),))
    if tunables:
        monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    with closing(ForkServer("colorsys")) as forks:
        said = forks.fork("a", ForkEntry.of(free_and_allocate), {}).receive()
    assert said["tunables"] == told
    assert told != FEW_HOLES or said["bytes"] < 1.1 * 38 * 2**20


def test_a_fork_server_that_is_stopped_while_it_starts_is_waited_for_in_vain_and_replaced(fork_server):
    os.kill(fork_server.pid, signal.SIGSTOP)
    with pytest.raises(Unanswered, match=r"the process that forks it: it was stopped for 1 s"):
        fork_server.answer("a", fork_server.fork("a", GREET, {"COLOUR": "red"}), 60, stopped_s=1)
    fork_server.replace()
    channel = fork_server.fork("b", GREET, {"COLOUR": "blue"})
    assert fork_server.answer("b", channel, 60)["colour"] == "blue"


def test_a_process_that_does_not_answer_is_killed(fork_server):
    channel = fork_server.fork("a", ForkEntry.of(stand_still), {})
    with pytest.raises(Unanswered, match=r"^it did not answer for \d s"):
        fork_server.answer("a", channel, 1)
    (ended,) = wait_for(fork_server, lambda said: len(said) == 1)
    assert ended["exit_code"] == -signal.SIGKILL


def test_it_tells_how_each_of_them_ended(fork_server):
    channels = [fork_server.fork("loop", GREET, {"COLOUR": ""}), fork_server.fork("fail", ForkEntry.of(fail), {})]
    killed, other = channels[0].receive()["pid"], fork_server.fork("left", GREET, {"COLOUR": ""})
    left = other.receive()["pid"]
    os.kill(killed, signal.SIGKILL)
    other.close()
    said = wait_for(fork_server, lambda said: sum(m["kind"] == "ended" for m in said) == 3)
    ended = {m["pid"]: m["exit_code"] for m in said if m["kind"] == "ended"}
    failed = next(m["pid"] for m in said if m["kind"] == "forked" and m["key"] == "fail")
    assert ended == {killed: -signal.SIGKILL, left: 7, failed: 3}
    with pytest.raises(ChannelClosed):
        channels[0].receive()


def test_processes_of_a_killed_fork_server_still_talk_to_their_client(fork_server):
    channel = fork_server.fork("a", GREET, {"COLOUR": "red"})
    channel.receive()
    os.kill(fork_server.pid, signal.SIGKILL)
    channel.send("say", text="still here")
    assert channel.receive()["of"] == "still here"
    with pytest.raises(ChannelClosed):
        wait_for(fork_server, lambda said: False)
    late = fork_server.fork("b", GREET, {})
    with pytest.raises(ChannelClosed):
        late.receive()
    with pytest.raises(ChannelClosed):
        fork_server.take()


def test_a_fork_that_the_system_refuses_is_tried_again(monkeypatch):
    answers = iter([BlockingIOError(), OSError(errno.ENOMEM, "no memory"), 7])

    def refuse() -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(module, "FORK_AGAIN_S", 0.0)
    assert tried(refuse) == 7
    answers = iter([BlockingIOError()])
    monkeypatch.setattr(module, "FORK_S", -1.0)
    with pytest.raises(BlockingIOError):
        tried(refuse)


def test_one_that_takes_the_place_of_another_is_tried_again_too(fork_server, monkeypatch):
    refusals = iter([BlockingIOError("no more processes")])
    start = module.Child

    def child(*arguments: Any, **options: Any) -> Child:
        for refusal in refusals:
            raise refusal
        return start(*arguments, **options)

    monkeypatch.setattr(module, "Child", child)
    fork_server.replace()
    assert fork_server.fork("a", GREET, {"COLOUR": "red"}).receive()["kind"] == "hello"


def test_signals_that_a_terminal_sends_to_all_do_not_end_it(fork_server):
    fork_server.fork("a", GREET, {"COLOUR": "red"}).receive()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(fork_server.pid, number)
    assert fork_server.fork("b", GREET, {"COLOUR": "blue"}).receive()["colour"] == "blue"


def test_a_channel_is_held_by_its_process_alone(fork_server):
    """If requests come at once, the first process must not keep the ends of those that follow."""
    asked = [fork_server.fork(str(number), GREET, {"COLOUR": ""}) for number in range(4)]
    pids = [channel.receive()["pid"] for channel in asked]
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        asked[-1].receive()


ASK = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from argosy.processes.fork_server import ForkServer
from processes.test_fork_server import GREET
forks = ForkServer("colorsys")
print(forks.pid, flush=True)
def ask():
    channel = forks.fork("a", GREET, {"COLOUR": ""})
    return channel, sys.argv[2] == "in a burst" or channel.receive()
if sys.argv[2] != "while it imports":
    asked = [ask()]
if sys.argv[2] == "while a fork of it lives" and not os.fork():
    time.sleep(40)
    os._exit(0)
print("ready", flush=True)
while sys.argv[2] == "in a burst":
    asked = [*asked[-20:], ask()]
time.sleep(60)
"""


@pytest.mark.parametrize("when", ["while it imports", "while it waits", "in a burst", "while a fork of it lives"])
def test_it_ends_soon_after_its_client_was_killed_and_takes_no_time_until_then(when):
    command = [sys.executable, "-c", ASK, str(Path(__file__).parents[1]), when]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as client:
        assert client.stdout is not None
        forks, _ = int(client.stdout.readline()), client.stdout.readline()
        client.kill()
    end_s, ticks = time.monotonic() + 30, 0  # before the fork that lives has ended
    try:
        while (found := cpu_ticks(forks)) is not None:
            ticks = found
            assert time.monotonic() < end_s, f"it lives, and took {ticks} ticks of the processor"
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
    assert ticks < os.sysconf("SC_CLK_TCK"), "a second of computing, to do nothing"


def cpu_ticks(pid: int) -> int | None:
    """Return what a process has computed; None if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except FileNotFoundError:
        return None
    return None if state == "Z" else int(rest[10]) + int(rest[11])


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="a process uses a GPU")
def test_a_process_of_one_that_has_loaded_the_compiler_can_use_a_gpu():
    """torch's compiler asks for GPUs when it is imported, and CUDA works in no fork of a process that has asked it."""
    forks = ForkServer("torch")
    forks.prepare(ForkEntry.of(load_compiler), {})
    channel = forks.fork("of a GPU", ForkEntry.of(use_gpu), {})
    assert forks.answer("of a GPU", channel, limit_s=120)["value"] == 3.0
    forks.close()


@pytest.mark.parametrize(("entry", "handler"), [(ForkEntry.of(greet), signal.SIG_DFL), (RENDEZVOUS, signal.SIG_IGN)])
def test_a_signal_to_all_processes_of_a_job_does_not_end_the_store(monkeypatch, entry, handler):
    """As SLURM sends SIGTERM: workers save then, in a world that may just be forming."""
    found = []
    monkeypatch.setattr(module, "channel_to_parent", lambda: None)
    monkeypatch.setattr(module, "gc", SimpleNamespace(disable=lambda: None, freeze=lambda: None))
    monkeypatch.setattr(module, "_serve", lambda _: entry)
    monkeypatch.setattr(module, "_call_and_exit", lambda _: found.extend(map(signal.getsignal, STOP_SIGNALS)))
    monkeypatch.setattr(sys, "argv", ["fork_server", "colorsys"])
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        module.main()
    finally:
        for number, other in before.items():
            signal.signal(number, other)
    assert set(found) == {handler}
