"""Processes that start in milliseconds: forked from one that has imported what they need.

Importing torch takes seconds, at a run's start and for every worker that takes a dead one's place. The fork server
imports it once and then only forks. It computes nothing and starts no thread, so that a fork of it is as good as a new
process.

Not `multiprocessing.forkserver`: that one runs the caller's `__main__` in each process, gives them all the same
environment, leaves them alive when their client is killed, and reports exit code 255 for all once it is killed itself.
Here each process has an environment of its own and a channel that closes with its client, and a killed fork server is
noticed and replaced.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from argosy.errors import STOP_SIGNALS
from argosy.processes.child import (
    CHANNEL,
    PARENT,
    PARENT_S,
    STDERR,
    STOPPED_S,
    Channel,
    ChannelClosed,
    Child,
    ForkEntry,
    Message,
    Patience,
    channel_to_parent,
)

WORKER_MODULE = "argosy.supervise.worker"
"""The module of a run's workers, by name, as it imports torch."""
RENDEZVOUS = ForkEntry("argosy.parallel.world", "hold_store")
"""The process that holds the store in which the members of a world find each other."""
STDOUT = 1
STORE_HOST = "ARGOSY_STORE_HOST"
"""Environment variable of that process: the address of this machine at which the members reach the store."""


NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""torch's environment variable: "1" has `torch.cuda.is_available`, which its compiler calls when it is imported, ask
NVML. CUDA itself, once asked, works in no process that is forked afterwards."""

GLIBC_TUNABLES = "GLIBC_TUNABLES"
"""glibc's environment variable, read when a process starts."""
FEW_HOLES = "glibc.malloc.tcache_max=24:glibc.malloc.mxfast=0"
"""Its value, where the user has set none. An aligned tensor leaves up to 96 bytes free before and behind it. By default
glibc 2.36 keeps these apart for small objects, so that no tensor of that size fits into the hole that the first one
leaves (`benchmarks/results/planner_memory_cpu.md`); 2.43 does not."""
GPU_DRIVERS = Path("/dev/nvidiactl"), Path("/dev/kfd")
"""Files of NVIDIA's and AMD's drivers. Where one is, tensors are on GPUs, and glibc keeps its defaults: with
`FEW_HOLES` eight layers of 16 x 16, forward and backward, take a core 393 us in place of 366 (torch 2.13, Intel)."""
ANSWER_LOOK_S = 0.5
"""Time between two looks at a process that is waited for."""
FORK_S, FORK_AGAIN_S = 10.0, 0.1
"""Time for which a fork is tried that the system refuses, and time between two tries."""

T = TypeVar("T")


class Unanswered(Exception):
    """A process that was asked for does not answer; it says why. It is killed, or the fork server is."""


def _tunables() -> dict[str, str]:
    has_gpu = any(driver.exists() for driver in GPU_DRIVERS)
    return {} if has_gpu or GLIBC_TUNABLES in os.environ else {GLIBC_TUNABLES: FEW_HOLES}


class ForkServer:
    """The client's side: `fork` asks for processes, `take` tells which were forked and which have ended."""

    def __init__(self, imports: str, stdout: int | None = None, stderr: int | None = None):
        """Return at once; forking waits for the import.

        imports: the module that its processes will need. stdout, stderr: the descriptors that they print to; None: this
        process's own.
        """
        self._imports, self._stdout, self._stderr = imports, stdout, stderr
        self._environment = dict(os.environ)
        self._prepared: dict[str, Any] | None = None
        self._start()

    def _start(self) -> None:
        # Workers, and the compilers that they start, are told of a terminal's Ctrl-C by their agent, and not by the
        # terminal. What workers print is for it all the same.
        self._process = tried(
            partial(
                Child,
                "argosy.processes.fork_server",
                self._imports,
                environment=_tunables(),
                stdout=self._stdout,
                stderr=self._stderr,
            )
        )
        self.has_forked = False
        """True once it has forked any process."""
        if self._prepared is not None:
            self._send_prepare()

    @property
    def pid(self) -> int:
        """The fork server's own process."""
        return self._process.pid

    def fileno(self) -> int:
        return self._process.channel.fileno()

    def prepare(self, entry: ForkEntry, environment: Mapping[str, str]) -> None:
        """Have it call `entry`, with `environment` added to its own, before it forks anything more, except `at_once`.

        So it imports what its next processes need beside `imports`; one that replaces it does so too.
        """
        self._prepared = {"entry": astuple(entry), "environment": dict(environment)}
        self._send_prepare()

    def _send_prepare(self) -> None:
        with suppress(ChannelClosed):
            self._process.channel.send("prepare", asked=self._prepared)

    def take_on(self, stdout: int | None, stderr: int | None) -> None:
        """Have it print to these descriptors, with what this process has put into its environment since `__init__`.

        For one that was started before its client knew them.
        """
        changed = {name: value for name, value in os.environ.items() if self._environment.get(name) != value}
        self._stdout, self._stderr, self._environment = stdout, stderr, dict(os.environ)
        given = {number: ours for number, ours in ((STDOUT, stdout), (STDERR, stderr)) if ours is not None}
        asked = {"of": list(given), "environment": changed}
        with suppress(ChannelClosed):
            self._process.channel.send("take_on", descriptors=list(given.values()), asked=asked)

    def fork(self, key: str, entry: ForkEntry, environment: Mapping[str, str], *, at_once: bool = False) -> Channel:
        """Ask for a process that calls `entry`, with `environment` added to its own.

        at_once: it needs nothing that `prepare` still has to be called for.
        Returns the client's end of a channel to it; `channel_to_parent` gives it the other end. `take` tells under its
        `key` what becomes of the request. If the fork server is gone, or dies before it forks, nobody has the other
        end, and `take` says so.
        """
        ours, theirs = socket.socketpair()
        asked = {"key": key, "entry": astuple(entry), "environment": dict(environment), "at_once": at_once}
        with theirs, suppress(ChannelClosed):
            self._process.channel.send("fork", descriptors=[theirs.fileno()], asked=asked)
        return Channel(ours)

    def take(self) -> list[Message]:
        """Return what was "forked" (key, pid) and what has "ended" (pid, exit_code) since the last call.

        Raises: ChannelClosed.
        """
        messages = self._process.channel.take()
        self.has_forked = self.has_forked or bool(messages)
        return messages

    def answer(self, key: str, channel: Channel, limit_s: float, stopped_s: float = STOPPED_S) -> Message:
        """Return the first message of the process that `fork` was asked for under `key`, over its `channel`.

        limit_s, stopped_s: of the `Patience` with the fork server until it has forked, and then with the process.
        Raises: ChannelClosed if the process ended without one; Unanswered.
        """
        patience = Patience(self.pid, limit_s, stopped_s)
        while not channel.wait(ANSWER_LOOK_S):
            with suppress(ChannelClosed):  # then the channel's other end closes as well, unless it has forked already
                for message in self.take():
                    if message["kind"] == "forked" and message["key"] == key:
                        patience = Patience(message["pid"], limit_s, stopped_s)
            if why := patience.end():
                with suppress(ProcessLookupError):
                    os.kill(patience.pid, signal.SIGKILL)
                raise Unanswered(f"the process that forks it: {why}" if patience.pid == self.pid else why)
        return channel.receive()

    def replace(self) -> None:
        """End it, and start another. What it was asked for is lost, and nothing tells how its processes end."""
        self.close()
        self._start()

    def close(self) -> None:
        """End it; processes that it forked live on, or end with their channel."""
        self._process.kill()


def main() -> None:
    """`python -m argosy.processes.fork_server MODULE`: serve until the client is gone."""
    client = channel_to_parent()
    os.environ.setdefault(NVML_CHECK, "1")
    gc.disable()  # an eighth of what imports take is looking for garbage, which they hardly leave
    importlib.import_module(sys.argv[1])
    gc.freeze()  # what is here stays here: a collection in a forked process would copy all of its pages
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a terminal or SLURM sends them to all
    entry = _serve(client)
    if entry is not None:
        for number in STOP_SIGNALS if entry != RENDEZVOUS else ():  # a world that saves needs its store to the end
            signal.signal(number, signal.SIG_DFL)
        _call_and_exit(entry)


def _call_and_exit(entry: ForkEntry) -> NoReturn:
    """End this process as Python would after `entry`, but without taking all of torch down: that takes 0.2 s."""
    exit_code: int | str | None = 0
    try:
        entry.resolve()()
    except SystemExit as end:
        exit_code = end.code
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    if isinstance(exit_code, str):
        print(exit_code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(exit_code if isinstance(exit_code, int) else int(exit_code is not None))


def _serve(client: Channel) -> ForkEntry | None:
    """Fork on request. Return the entry in the forked process, and None in the fork server once the client is gone."""
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    parent = int(os.environ[PARENT])
    with selectors.DefaultSelector() as selector, suppress(ChannelClosed):
        selector.register(client, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        requests: list[Message] = []
        while os.getppid() == parent:  # another process may still hold the client's end of the channel
            for key, _ in selector.select(0 if requests else PARENT_S):
                if key.fileobj is woken:
                    woken.recv(1 << 12)
                    _tell_ends(client)
                else:
                    requests += client.take()
            if not requests:
                continue
            request = requests.pop(next((at for at, each in enumerate(requests) if _is_for_now(each)), 0))
            if request["kind"] == "prepare":
                _prepare(request["asked"])
                continue
            if request["kind"] == "take_on":
                _take_on(request["asked"], request.get("descriptors", []))
                continue
            asked, (descriptor,) = request["asked"], request["descriptors"]
            pid = tried(os.fork)
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor_of_another in _descriptors(requests):
                    os.close(descriptor_of_another)  # or its end would stay open here
                client.forget()
                woken.close()
                wake.close()
                return _become(asked, descriptor)
            os.close(descriptor)
            client.send("forked", key=asked["key"], pid=pid)
    signal.set_wakeup_fd(-1)
    return None


def tried(start: Callable[[], T]) -> T:
    """Return what `start` does; try for `FORK_S` where there can be no more processes or memory: the dead one whose
    place is filled may still be letting go of its own.

    Raises: OSError. All that a fork server has forked ends with it.
    """
    end = time.monotonic() + FORK_S
    while True:
        try:
            return start()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(FORK_AGAIN_S)


def _is_for_now(request: Message) -> bool:
    """Return True for a request that may go before those that came earlier."""
    return request["kind"] == "take_on" or (request["kind"] == "fork" and request["asked"]["at_once"])


def _take_on(asked: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    os.environ |= asked["environment"]
    for number, descriptor in zip(asked["of"], descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _prepare(asked: Mapping[str, Any]) -> None:
    os.environ |= asked["environment"]
    ForkEntry(*asked["entry"]).resolve()()
    gc.freeze()


def _descriptors(requests: Sequence[Message]) -> list[int]:
    return [descriptor for request in requests for descriptor in request.get("descriptors", ())]


def _become(asked: Mapping[str, Any], descriptor: int) -> ForkEntry:
    """Take on what was asked for, in the forked process."""
    gc.enable()
    del os.environ[PARENT]  # it belongs to the client, not to the fork server or to that one's parent
    os.environ |= {**asked["environment"], CHANNEL: str(descriptor)}
    return ForkEntry(*asked["entry"])


def _tell_ends(client: Channel) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            client.send("ended", pid=pid, exit_code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
