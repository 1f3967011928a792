"""A world of processes on this machine that one command starts for itself: they serve it, and end with it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from argosy.errors import ArgosyError, Interrupted, RunFailed, signals_to
from argosy.parallel.encoding import ErrorRecord, from_text, to_text
from argosy.parallel.world import WorldSeat
from argosy.processes.child import Channel, ChannelClosed, Data, ForkEntry, Message, Patience
from argosy.processes.fork_server import ForkServer

LINGER_S = 1.0
"""Seconds to wait for more news after an error: a process may report a lost peer before the peer's death shows."""
FAILED = "failed"


class LocalWorld:
    """Processes that form a world of their own, each with a channel to this one. Close it: they end then."""

    def __init__(self, entry: ForkEntry, size: int, name: str):
        """Return at once, while the processes start.

        entry: what each of them calls; `parallel.world.join_world` finds its place. name: what they are processes of,
        in messages: "the probe".
        """
        self._name, self._held = name, ExitStack()
        self._fork_server = self._held.enter_context(closing(ForkServer(entry.module)))
        self._patience = [Patience(self._fork_server.pid)]
        self._rank_of: dict[int, int] = {}
        self._failures: list[MemberFailure] = []
        self._heard: deque[tuple[int, Message]] = deque()
        folder = self._held.enter_context(TemporaryDirectory(prefix="argosy-world-"))
        seats = [WorldSeat(rank, size, rank, size, file=str(Path(folder) / "store")) for rank in range(size)]
        #: The members' channels, by rank.
        self.members = {seat.rank: self._fork(entry, seat) for seat in seats}
        self._speaking = dict(self.members)

    def _fork(self, entry: ForkEntry, seat: WorldSeat) -> Channel:
        return self._held.enter_context(closing(self._fork_server.fork(str(seat.rank), entry, seat.environment())))

    def send(self, kind: str, /, *, data: list[Data] | None = None, **facts: Any) -> None:
        """Send a message to all members. What keeps one from taking it is told by `receive`."""
        for channel in self.members.values():
            try:
                channel.send(kind, data=data, **facts)
            except ChannelClosed:
                return

    def receive(self) -> tuple[int, Message]:
        """Return the next message of a member, and its rank, however long it takes to come.

        Raises: the ArgosyError that a member ended with; RunFailed if it ended otherwise, or does not go on.
        """
        while not self._heard:
            try:
                self._listen()
            except ChannelClosed as problem:
                raise RunFailed(f"a process of {self._name} is gone ({problem}). Nothing was written.") from None
        return self._heard.popleft()

    def close(self) -> None:
        self._held.close()

    def _listen(self) -> None:
        """Wait some time for news, and take note of it.

        Raises: ChannelClosed if the fork server is gone; else as `receive`.
        """
        listened_to: list[ForkServer | Channel] = [self._fork_server, *self._speaking.values()]
        ready, _, _ = select.select(listened_to, [], [], LINGER_S)
        for one in self._patience:
            if why := one.end():
                os.kill(one.pid, signal.SIGKILL)
                raise RunFailed(
                    f"a process of {self._name} ({one.pid}) was waited for, and {why}. Nothing was written."
                )
        if self._failures and not ready:
            failure = min(self._failures, key=lambda failure: (not failure.is_killed, failure.at_s))
            raise failure.error(self._name)
        for rank, channel in list(self._speaking.items()):
            if channel not in ready:
                continue
            try:
                for message in channel.take():
                    if message["kind"] == FAILED:
                        record = from_text(message["error"], ErrorRecord)
                        self._failures.append(MemberFailure(rank, "", message["at_s"], record=record))
                    else:
                        self._heard.append((rank, message))
            except ChannelClosed:
                del self._speaking[rank]  # it is ending: the fork server tells how
        for message in self._fork_server.take() if self._fork_server in ready else []:
            if message["kind"] == "forked":
                self._rank_of[message["pid"]] = int(message["key"])
                self._patience.append(Patience(message["pid"]))
            elif message["kind"] == "ended":
                self._failures.append(_ended(self._rank_of[message["pid"]], message["exit_code"]))


@dataclass(frozen=True)
class MemberFailure:
    """A member ended, and no message was to come before."""

    rank: int
    why: str
    at_s: float
    """Seconds of the machine's monotonic clock, which its processes share."""
    is_killed: bool = False
    record: ErrorRecord | None = None
    """The error that it ended with, if it could say."""

    def error(self, name: str) -> ArgosyError:
        """Return what to raise for it in the process that started it, for members of `name`."""
        found = None if self.record is None else self.record.error()
        if isinstance(found, ArgosyError):
            return found
        why = self.why if self.record is None else f"{self.record.name}: {self.record.text}"
        return RunFailed(f"process {self.rank} of {name} ended: {why}. Nothing was written.")


def _ended(rank: int, exit_code: int) -> MemberFailure:
    if exit_code < 0:
        return MemberFailure(rank, f"killed by {signal.Signals(-exit_code).name}", time.monotonic(), is_killed=True)
    return MemberFailure(rank, f"exit code {exit_code}", time.monotonic())


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise Interrupted in this block."""

    def interrupt(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number)
        raise Interrupted(f"stopped by {name.name}; nothing was written.", name)

    with signals_to(interrupt, signal.SIGTERM, signal.SIGINT):
        yield


# ---- in a member -----------------------------------------------------------------------------------------------


@contextmanager
def failure_told(client: Channel) -> Iterator[None]:
    """Tell the client of an error in this block, and end this process: before the others can lose their connections."""
    try:
        yield
    except Exception as error:
        client.send(FAILED, error=to_text(ErrorRecord.of(error), ErrorRecord), at_s=time.monotonic())
        sys.exit(1)
