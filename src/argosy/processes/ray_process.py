"""A process that an actor of Ray owns: it ends when the actor does, and runs again where Ray starts the actor again.

Commands that the kernel kills when the thread that started them has ended, however that came (Linux).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from argosy.processes.ray_cluster import node_and_address
from argosy.processes.supervisor import RestartPolicy, Restarts

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that comes when the parent ends. It outlives exec."""


def tied(words: Sequence[str]) -> list[str]:
    """Return the command that becomes `words`. Start it in a thread that waits for it."""
    return [sys.executable, "-m", "argosy.processes.ray_process", str(os.getpid()), *words]


def main() -> None:
    """`python -m argosy.processes.ray_process PARENT COMMAND ...`."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT in its workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it ended before
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()


KILL_RESTARTS = RestartPolicy(most_failures=5)
"""Of a process that was killed; one that ended otherwise is not started again."""
POLL_S = 0.1
NEWS_WAIT_S = 10.0
"""Longest wait of a question for news."""
PIECE_BYTES = 1 << 16
OF_RAY = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")
"""Environment variables that Ray sets for its own workers."""
THREADS = 2
"""max_concurrency of the actor: one waits for news, while another is told to stop."""


@dataclass(frozen=True)
class ProcessEvent:
    """News of a process."""

    node: str
    output: bytes
    """Whole lines that it has printed since the last news."""
    exit_code: int | None
    """None while it runs; 128 and the signal's number if one ended it."""


class OwnedProcess:
    """The class of the actor."""

    def __init__(self, words: Sequence[str], work_dir: str, environment: Mapping[str, str]):
        """Start `python WORDS` in `work_dir`, with the Python of the node.

        environment: added to that of the node.
        Raises: OSError if the node does not see `work_dir`.
        """
        os.chdir(work_dir)
        self._node, _ = node_and_address()
        mine = {name: value for name, value in os.environ.items() if name not in OF_RAY}
        self._words, self._environment = [sys.executable, *words], {**mine, **environment}
        self._changed = threading.Condition()
        self._output, self._part = b"", b""
        self._exit_code: int | None = None
        self._pid, self._is_stopping = 0, False
        threading.Thread(target=self._hold, name="argosy-process", daemon=True).start()

    def news(self) -> ProcessEvent:
        """Return what is new; wait for that up to `NEWS_WAIT_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._exit_code is not None, NEWS_WAIT_S)
            output, self._output = self._output, b""
            return ProcessEvent(self._node, output, self._exit_code)

    def stop(self) -> None:
        """Send it SIGTERM; it is not started again."""
        with self._changed, suppress(ProcessLookupError):
            self._is_stopping = True
            if self._pid:
                os.kill(self._pid, signal.SIGTERM)

    def _hold(self) -> None:
        code, restarts = self._run(), Restarts(KILL_RESTARTS)
        while code == -signal.SIGKILL and not self._is_stopping and restarts.ended() is not None:
            code = self._run()
        with self._changed:
            self._exit_code = code if code >= 0 else 128 - code
            self._changed.notify_all()

    def _run(self) -> int:
        """Run the command to its end, in this thread, which it is tied to. Return its exit code, as Popen's."""
        ours, theirs = os.pipe()
        try:
            with self._changed:
                if self._is_stopping:
                    return 128 + signal.SIGTERM
                child = subprocess.Popen(
                    tied(self._words), env=self._environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
                )
                self._pid = child.pid
            while (code := child.poll()) is None:
                self._take(ours, POLL_S)
            while self._take(ours, 0):  # not until the other end is closed: what it has started may live on
                pass
            self._put(b"\n" if self._part else b"")
            return code
        finally:
            with self._changed:
                self._pid = 0
            os.close(ours)
            os.close(theirs)

    def _take(self, descriptor: int, timeout_s: float) -> bool:
        """Take in what has been printed, waiting for that. Return False if there is nothing."""
        readable, _, _ = select.select([descriptor], [], [], timeout_s)
        text = os.read(descriptor, PIECE_BYTES) if readable else b""
        self._put(text)
        return bool(text)

    def _put(self, text: bytes) -> None:
        lines, newline, part = (self._part + text).rpartition(b"\n")
        self._part = part
        if not newline:
            return
        with self._changed:
            self._output += lines + newline
            self._changed.notify_all()
