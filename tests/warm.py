"""Children that are forked from a process which has imported their module, instead of being started.

A start takes 0.4 to 1.6 s of CPU time, nearly all of it for imports, and the tests need 350: each `prepare` has a
worker, each run a fork server. The same `main` runs, in a process of its own and with the
same channel. Commands that run in a process of their own start their children, as a user's do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from argosy import faults
from argosy.processes.child import CHANNEL, PARENT, STDERR, Channel, Child, ForkEntry, process_state, wait_until
from argosy.processes.fork_server import STDOUT, WORKER_MODULE, ForkServer

FORK_SERVER = "argosy.processes.fork_server"
FORKED = "argosy.data.worker"
ASKED = "ARGOSY_TESTS_CHILD"
"""Environment variable of a forked child: what it was asked to be."""


class WarmChild(Child):
    """A `Child` that is forked, if it is a worker of `prepare` or a run's fork server."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = STDERR,
        stderr: IO[bytes] | int | None = None,
        **more: Any,
    ):
        imports = WORKER_MODULE if (module, arguments) == (FORK_SERVER, (WORKER_MODULE,)) else module
        if imports not in (FORKED, WORKER_MODULE) or _Server.is_starting:
            outputs = {"stdout": stdout, "stderr": stderr}
            super().__init__(module, *arguments, environment=environment, **outputs, **more)
            return
        with _STARTS:
            if imports not in _SERVERS:
                _SERVERS[imports] = _Server(imports)
        server = _SERVERS[imports]
        variables = {**os.environ, **(environment or {})}
        asked = [module, arguments, os.getpid(), variables, str(Path.cwd())]
        self.channel, pid = server.fork(asked, _number(stdout, STDOUT), _number(stderr, STDERR))
        self._process = cast("subprocess.Popen[bytes]", _Forked(server, pid))


class _Server:
    """A fork server that has imported `module`, and what became of those it forked."""

    is_starting = False
    """True while one is started, which is a child itself."""

    def __init__(self, module: str):
        _Server.is_starting = True
        try:
            self._server = ForkServer(module)
        finally:
            _Server.is_starting = False
        self._server.prepare(ForkEntry.of(imported), {})
        self._pids: dict[str, int] = {}
        self._exit_codes: dict[int, int] = {}
        self._lock = threading.RLock()
        """Held while its news are taken: parameter servers are threads of a test."""

    def fork(self, asked: list[Any], stdout: int, stderr: int) -> tuple[Channel, int]:
        """Return the channel to a new process, and its number."""
        with self._lock:
            self._server.take_on(stdout, stderr)
            key = str(len(self._pids))
            channel = self._server.fork(key, ForkEntry.of(become), {ASKED: json.dumps(asked)})
            while key not in self._pids:
                select.select([self._server], [], [])
                self._look()
            return channel, self._pids[key]

    def exit_code(self, pid: int) -> int | None:
        """Return how a process has ended; None: it has not."""
        with self._lock:
            self._look()
            return self._exit_codes.get(pid)

    def _look(self) -> None:
        for message in self._server.take():
            if message["kind"] == "forked":
                self._pids[message["key"]] = message["pid"]
                self._exit_codes.pop(message["pid"], None)  # of another that had this number
            else:
                self._exit_codes[message["pid"]] = message["exit_code"]


_SERVERS: dict[str, _Server] = {}
_STARTS = threading.Lock()


class _Forked:
    """What `Child` asks of its Popen, of a process that the server forked."""

    def __init__(self, server: _Server, pid: int):
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> None:
        if not wait_until(lambda: self.poll() is not None, timeout, every_s=0.002):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and that is about to be told
                os.kill(self.pid, signal.SIGKILL)


def _number(output: IO[bytes] | int | None, inherited: int) -> int:
    return inherited if output is None else output if isinstance(output, int) else output.fileno()


def imported() -> None:
    """Called in the server, which has imported this module by then: leave the folder of the test that started it."""
    os.chdir("/")


def become() -> None:
    """Be the process that was asked for, with its environment, folder and words."""
    module, words, asker, variables, folder = json.loads(os.environ[ASKED])
    channel = os.environ[CHANNEL]
    os.environ.clear()
    os.environ |= {**variables, CHANNEL: channel, PARENT: str(asker)}
    os.getppid = lambda: asker if process_state(asker) not in ("", "Z") else 1  # as of one that the asker started
    faults.arm(os.environ.get(faults.FAULTS_VARIABLE, ""))  # as on its import
    os.chdir(folder)
    os.setsid()
    sys.argv = [module, *words]
    ForkEntry(module).resolve()()
