"""Processes that are forked from one which has imported their module, instead of being started.

A start takes 0.1 to 1.6 s of CPU time, nearly all of it for imports, and the tests need more than a thousand: each
`prepare` has a worker, each run a fork server and a coordinator, a model in several processes a fork server, each rank
that saves a writer. The same `main` runs, in a process of its own and with the same channel. `WarmCommand` is a command
so (`argosy train`, `sweep`, `serve`, `watch`): its children are forked from one that it forks itself.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, Self, cast

from argosy import cli, faults
from argosy.engines import local
from argosy.processes import fork_server
from argosy.processes.child import CHANNEL, PARENT, STDERR, Channel, Child, ForkEntry, process_state, wait_until
from argosy.processes.fork_server import STDOUT, WORKER_MODULE, ForkServer
from argosy.supervise.coordinator_client import COORDINATOR

PREPARE, WRITER = "argosy.data.worker", "argosy.checkpoint.writer"
COMMAND = "argosy"
WITH_TORCH = (WORKER_MODULE, "argosy.inference.members", "argosy.probe.probe", "probe.test_start")
"""Modules that fork servers import, in which torch takes nearly all the time."""
ASKED = "ARGOSY_TESTS_CHILD"
"""Environment variable of a forked child: what it was asked to be."""
PYTHON = sys.executable
real_parent = os.getppid


class WarmChild(Child):
    """A `Child` that is forked, if it is a worker of `prepare`, a writer, a coordinator or a fork server with torch."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = STDERR,
        stderr: IO[bytes] | int | None = None,
    ):
        if _Server.is_starting and _Server.is_in_command:
            self.channel, pid = _fork_server_of_this_process()
            self._process = cast("subprocess.Popen[bytes]", _Forked(None, pid))
            return
        has_torch = module == COORDINATOR or (module == fork_server.__name__ and arguments[0] in WITH_TORCH)
        is_forked = has_torch or module == PREPARE or (module == WRITER and os.getpid() == _Server.client_of_writers)
        # A test may have another program started in Python's place.
        if _Server.is_starting or sys.executable != PYTHON or not is_forked:
            outputs = {"stdout": stdout, "stderr": stderr}
            super().__init__(module, *arguments, pass_fds=pass_fds, environment=environment, **outputs)
            return
        server = _Server.of(WORKER_MODULE if has_torch else module)
        asked = _asked(module, arguments, Path.cwd(), {**os.environ, **(environment or {})}, pass_fds)
        self.channel, pid = server.fork(asked, _number(stdout, STDOUT), _number(stderr, STDERR))
        if pass_fds:
            with socket.socket(fileno=os.dup(self.channel.fileno())) as passing:
                socket.send_fds(passing, [b"."], list(pass_fds))
        self._process = cast("subprocess.Popen[bytes]", _Forked(server, pid))


class _Server:
    """A fork server that has imported `module`, and what became of those it forked."""

    is_starting = False
    """True while one is started, which is a child itself."""
    is_in_command = False
    """True in a forked command, which has imported all and starts by forking one."""
    client_of_writers = 0
    """The process that called `fork_writers`, and not one that was forked from it meanwhile."""

    @classmethod
    def of(cls, module: str) -> _Server:
        """Return this process's one for a module."""
        with _STARTS:
            if module not in _SERVERS:
                _SERVERS[module] = cls(module)
        return _SERVERS[module]

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

    def fork(self, asked: dict[str, Any], stdout: int, stderr: int) -> tuple[Channel, int]:
        """Return the channel to a new process, and its number."""
        with self._lock:
            self._server.take_on(stdout, stderr)
            key = str(len(self._pids))
            channel = self._server.fork(key, ForkEntry.of(become), {ASKED: json.dumps(asked)})
            while key not in self._pids:
                select.select([self._server], [], [])
                self._look()
            self._server.take_on(STDOUT, STDERR)  # a pipe ends with those that print to it
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
    """What `Child` and tests ask of a Popen, of a process that the server forked."""

    def __init__(self, server: _Server | None, pid: int):
        """`server`: None for a process of which nobody asks how it has ended."""
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._server is not None:
            self.returncode = self._server.exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if not wait_until(lambda: self.poll() is not None, math.inf if timeout is None else timeout, every_s=0.002):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and that is about to be told
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class WarmPart(_Forked):
    """`argosy WORDS` for a part of a run, as `engines.local.spawn` starts it; what it prints can be read here."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]):
        out, end = os.pipe()
        server, asked = _Server.of(WORKER_MODULE), _asked(COMMAND, words, Path.cwd(), {**os.environ, **environment})
        channel, pid = server.fork(asked, end, end)
        super().__init__(server, pid)
        channel.close()
        os.close(end)
        self.stdout = os.fdopen(out, "rb")


def spawn(words: Sequence[str], out: IO[bytes] | int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a part of a run, in place of the `spawn` of `launch.children`."""
    if words[:3] != [PYTHON, "-m", COMMAND] or out != subprocess.PIPE:
        return local.spawn(words, out, environment)
    return cast("subprocess.Popen[bytes]", WarmPart(words[3:], environment))


class WarmCommand(_Forked):
    """`argosy WORDS` in a folder, with environment variables: as subprocess.Popen[str] with two pipes."""

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]):
        server = _Server.of(WORKER_MODULE)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        channel, pid = server.fork(_asked(COMMAND, words, folder, variables), out_end, err_end)
        super().__init__(server, pid)
        channel.close()
        os.close(out_end)
        os.close(err_end)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._said: dict[IO[str], bytes] = {self.stdout: b"", self.stderr: b""}

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end. Return what it printed that was not read before."""
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while left := [stream for stream in self._said if not stream.closed]:
            ready, _, _ = select.select(left, [], [], None if math.isinf(end) else max(0.0, end - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            for stream in ready:
                more = os.read(stream.fileno(), 1 << 16)
                self._said[stream] += more
                if not more:
                    stream.close()
        self.wait(end - time.monotonic())
        out, err = (said.decode() for said in self._said.values())
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def _number(output: IO[bytes] | int | None, inherited: int) -> int:
    return inherited if output is None else output if isinstance(output, int) else output.fileno()


def _asked(
    module: str, words: Sequence[str], folder: Path, variables: Mapping[str, str], passed: Sequence[int] = ()
) -> dict[str, Any]:
    """Return what a forked process is to be. passed: numbers of the descriptors that it gets over its channel."""
    of_process = {"folder": str(folder), "variables": dict(variables), "passed": list(passed), "client": os.getpid()}
    return {"module": module, "words": list(words), **of_process}


def _fork_server_of_this_process() -> tuple[Channel, int]:
    """Fork a server of processes like this one, which has no threads yet. It ends with this process."""
    ours, theirs = socket.socketpair()
    parent, pid = os.getpid(), os.fork()
    if pid:
        theirs.close()
        return Channel(ours), pid
    try:
        ours.close()
        _STARTS.release()  # this is a copy of the thread that holds it
        os.getppid = real_parent
        os.environ |= {CHANNEL: str(theirs.detach()), PARENT: str(parent)}
        sys.argv = [fork_server.__name__, WORKER_MODULE]
        fork_server.main()
    finally:
        os._exit(0)


def fork_writers(from_here: bool) -> None:
    """Have the writers of this process's checkpoints forked. For processes that train many times.

    from_here: from a copy of this process, which has no threads yet and has imported what they need.
    """
    from argosy.checkpoint import save  # it imports torch, which a server of writers does without

    save.Child = WarmChild  # type: ignore[attr-defined]
    _Server.client_of_writers = os.getpid()
    if from_here:
        _Server.is_in_command = True
        _Server.of(WRITER)
        _Server.is_in_command = False


def imported() -> None:
    """Called in a server, which has imported this module by then: leave the folder of the test that started it."""
    if "torch" in sys.modules:
        from workers import make_the_tests_process_light

        make_the_tests_process_light()
    os.chdir("/")


def become() -> None:
    """Be the process that was asked for, with its environment, folder and words."""
    asked, channel = json.loads(os.environ[ASKED]), int(os.environ[CHANNEL])
    client = asked["client"]
    os.environ.clear()
    os.environ |= asked["variables"]
    os.getppid = lambda: client if process_state(client) not in ("", "Z") else 1  # as of one that the client started
    faults.arm(os.environ.get(faults.FAULTS_VARIABLE, ""))  # as on its import
    os.chdir(asked["folder"])
    os.setsid()
    sys.argv = [asked["module"], *asked["words"]]
    if asked["module"] == COMMAND:
        os.close(channel)
        _be_a_command()
    for number in asked["passed"]:
        channel = fcntl.fcntl(channel, fcntl.F_DUPFD, number + 1)  # it may have that number
        with socket.socket(fileno=os.dup(channel)) as passing:
            (descriptor,) = socket.recv_fds(passing, 1, 1)[1]
        os.dup2(descriptor, number)
    os.environ |= {CHANNEL: str(channel), PARENT: str(client)}
    ForkEntry(asked["module"]).resolve()()


def _be_a_command() -> None:
    if "PYTHONUNBUFFERED" in os.environ:
        cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a Python that was started
    _SERVERS.clear()
    _Server.is_in_command = True
    _Server.of(WORKER_MODULE)
    raise SystemExit(cli.main())
