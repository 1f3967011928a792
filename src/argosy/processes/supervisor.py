"""Restarts of processes: a policy, a count of failures in a row, and a supervisor of one child.

What is restarted without being a `Child` (a command, a job of an engine, a fork server) counts its ends by `Restarts`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from argosy.processes.child import STOPPED_S, ChannelClosed, Child, Message, Patience

KEEP_S = 0.5
"""Time between two looks at a child by a thread, in a process that has no loop for it."""


@dataclass(frozen=True)
class RestartPolicy:
    """The restarts of a process, and the limits at which a child is killed."""

    most_failures: float = math.inf
    """Ends in a row without progress at which the child is given up."""
    pause_s: float = 0.0
    """Time between the end and the next start."""
    growth: float = 1.0
    """Factor of the pause from one failure in a row to the next."""
    progress_s: float = math.inf
    """A process that lived this long has made progress."""
    silent_s: float = math.inf
    """A child that says nothing for this long is killed."""
    stopped_s: float = STOPPED_S
    """A child that is stopped (SIGSTOP) for this long is killed."""
    finish_s: float = 0.0
    """A child that was told to finish is killed after this long."""


class Restarts:
    """Counts the ends of one process that came without progress."""

    def __init__(self, policy: RestartPolicy, failures: int = 0):
        """failures: in a row so far, where another process has counted them."""
        self.policy, self.failures = policy, failures

    def progress(self) -> None:
        """Forget the failures so far."""
        self.failures = 0

    def ended(self, made_progress: bool = False) -> float | None:
        """Count an end. Return the seconds until the next start; None if there is to be none."""
        self.failures = 0 if made_progress else self.failures + 1
        if self.failures >= self.policy.most_failures:
            return None
        return self.policy.pause_s * self.policy.growth ** max(0, self.failures - 1)


@dataclass(frozen=True)
class ChildEnd:
    """The end of a supervised child."""

    why: str
    again_s: float | None
    """Seconds until it is started again; None: it is not."""
    was_killed: bool
    """True if its supervisor killed it, and `why` says what for; else `why` is the signal or exit code."""


class Supervisor:
    """Starts a child, hears it, kills it if it hangs, and starts it again as its policy says. Only `finish` waits."""

    def __init__(
        self,
        policy: RestartPolicy,
        start: Callable[[], Child],
        on_end: Callable[[ChildEnd], None],
        on_message: Callable[[Message], None] = lambda message: None,
        is_wanted: bool = True,
    ):
        """start: raises OSError if the child cannot be started, which counts as an end.
        on_end: called with each end but that of a child that was told to finish, and ended with exit code 0.
        """
        self._policy, self._start, self._on_end, self._on_message = policy, start, on_end, on_message
        self._restarts = Restarts(policy)
        self._child: Child | None = None
        self._patience: Patience | None = None
        self._started_s = 0.0
        self._start_at_s: float | None = -math.inf
        self._finish_by_s: float | None = None
        self.starts = 0
        """Number of starts."""
        self.is_wanted = is_wanted
        """False while another machine has the child: then it is ended here."""

    @property
    def is_running(self) -> bool:
        return self._child is not None

    @property
    def is_given_up(self) -> bool:
        """True once it does not run and will not be started again."""
        return self._child is None and self._start_at_s is None

    @property
    def pid(self) -> int:
        """The process's number; 0 while there is none."""
        return 0 if self._child is None else self._child.pid

    @property
    def failures(self) -> int:
        """Ends in a row without progress."""
        return self._restarts.failures

    def keep(self) -> None:
        """Do what is due: start it, hear it, end it. Call this a few times a second."""
        now_s = time.monotonic()
        if not self.is_wanted:
            self.kill()
        elif self._child is not None:
            self._hear(self._child)
            if self._patience is not None and (why := self._patience.end()):
                self.fail(why)
            elif self._child is not None and self._finish_by_s is not None and now_s > self._finish_by_s:
                self.fail(f"it did not finish within {self._policy.finish_s:g} s")
        elif self._start_at_s is not None and now_s >= self._start_at_s:
            self.start()

    def start(self) -> None:
        self.starts, self._started_s = self.starts + 1, time.monotonic()
        try:
            self._child = self._start()
        except OSError as problem:
            self._ended(f"it cannot be started: {problem}", was_killed=True)
            return
        self._patience = Patience(self._child.pid, self._policy.silent_s, self._policy.stopped_s)

    def fail(self, why: str) -> None:
        """End it for this reason, as if it had died."""
        self.kill()
        self._ended(why, was_killed=True)

    def kill(self) -> None:
        """End it, and say nothing. `keep` starts it again if it is wanted."""
        if self._child is not None:
            self._child.kill()
        self._child = self._patience = None

    def tell_to_finish(self) -> None:
        """Have it do what is left, and end. From now on it is not started again."""
        self._start_at_s = None
        if self._child is not None and self._finish_by_s is None:
            self._finish_by_s = time.monotonic() + self._policy.finish_s
            with suppress(ChannelClosed):  # `keep` finds out how it ended
                self._child.channel.send("finish")

    def finish(self, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Have it do what is left, and wait until it has ended; once `is_urgent`, end it at once."""
        self.tell_to_finish()
        while self.is_running and not is_urgent():
            self.wait(0.02)
            self.keep()
        self.kill()

    def wait(self, seconds: float) -> None:
        """Wait until it says something or ends, up to `seconds`."""
        if self._child is None:
            time.sleep(seconds)
        else:
            self._child.channel.wait(seconds)

    def _hear(self, child: Child) -> None:
        try:
            for message in child.channel.take():
                if self._patience is not None:
                    self._patience.answered()
                self._on_message(message)
                if self._child is None:  # the message had it killed
                    return
        except ChannelClosed:
            self._child = self._patience = None
            self._ended(child.reap(), was_killed=False, is_clean=child.exit_code == 0)

    def _ended(self, why: str, was_killed: bool, is_clean: bool = False) -> None:
        is_over = self._start_at_s is None
        if is_over and is_clean:
            return
        now_s = time.monotonic()
        again_s = self._restarts.ended(now_s - self._started_s > self._policy.progress_s)
        if is_over or again_s is None:
            self._start_at_s = again_s = None
        else:
            self._start_at_s = now_s + again_s
        self._on_end(ChildEnd(why, again_s, was_killed))


@contextmanager
def supervised(supervisor: Supervisor, name: str) -> Iterator[None]:
    """Look after `supervisor` in a thread of this name while the block runs, and finish it after the block."""
    supervisor.is_wanted = True
    supervisor.keep()
    try:
        with repeated(supervisor.keep, KEEP_S, name):
            yield
    finally:
        supervisor.finish()


@contextmanager
def repeated(action: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `action` every `every_s` while the block runs, in a thread of this name."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            action()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
