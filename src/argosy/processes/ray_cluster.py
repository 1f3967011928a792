"""A cluster of Ray, as its drivers see it: connecting, its nodes, places on them, and processes of its actors.

A process that an actor of Ray owns ends when the actor does, and runs again where Ray starts the actor again. The
kernel kills its command when the thread that started it has ended, however that came (Linux).
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from argosy.errors import UserError, counted, missing_extra
from argosy.processes.child import is_tied
from argosy.processes.supervisor import RestartPolicy, Restarts

RAY_ADDRESS = "RAY_ADDRESS"
"""Environment variable: where the cluster is, if it is not said. Ray sets it for its jobs."""
RAY_LOOK_S = 1.0
RAY_ANSWER_S = 10.0
NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a node's name does not have for us."""


def need_ray(what_for: str) -> Any:
    """Return the module `ray`. Raises: UserError if it is not installed."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of what it will do one day
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "ray", what_for) from None
    return ray


def connect(what_for: str) -> str:
    """Connect this process, as a driver and in its main thread, to the cluster that RAY_ADDRESS names, else to the one
    that runs on this machine.

    Return the address of the cluster's dashboard; "" if it has none.

    Raises: UserError if there is none.
    """
    ray = need_ray(what_for)
    where = os.environ.get(RAY_ADDRESS) or "auto"
    if where.startswith(("http://", "https://")):
        raise UserError(
            f"{what_for}: {where} is the dashboard of a cluster, which only takes jobs. Give its head, such as "
            "head:6379, or its client server, ray://head:10001."
        )
    before = signal.getsignal(signal.SIGTERM)
    try:
        knock(where)
        context = ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as problem:
        raise no_cluster(what_for, "" if where == "auto" else where, problem) from None
    finally:
        signal.signal(signal.SIGTERM, before)  # Ray's own would end the process at once
    return str(context.dashboard_url or "")


def knock(address: str) -> None:
    """Raises: OSError if nobody listens at an address. Ray's client would wait for minutes."""
    url = urlsplit(address if "://" in address else f"//{address}")
    if url.hostname and (url.port or url.scheme in ("http", "https")):
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        socket.create_connection((url.hostname, port), timeout=RAY_ANSWER_S).close()


def no_cluster(what_for: str, address: str, problem: Exception) -> UserError:
    why = " ".join(str(problem).split()).rstrip(".")
    if not address:
        return UserError(
            f"{what_for}: there is no cluster of Ray on this machine ({why}). Give the command on one of its machines, "
            "or say where it is with --address."
        )
    return UserError(f"{what_for}: no cluster of Ray answers at {address} ({why}). Is it up, and is that its address?")


@dataclass(frozen=True)
class Share:
    """Resources asked of each of several nodes."""

    nodes: int
    cpus: int
    gpus: int

    @classmethod
    def of(cls, nodes: int, cpus: int, gpus: int) -> Share:
        """Return what is asked of each node of a cluster; cpus: 0 for all of the smallest of the `nodes` largest."""
        if not cpus:
            largest = sorted((_count(node, "CPU") for node in _alive() if _count(node, "GPU") >= gpus), reverse=True)
            cpus = max(1, (largest[:nodes] or [1])[-1])
        return cls(nodes, cpus, gpus)

    def __str__(self) -> str:
        gpus = f" and {counted(self.gpus, 'GPU')}" if self.gpus else ""
        return f"{counted(self.nodes, 'node')} with {counted(self.cpus, 'CPU')}{gpus}"

    @property
    def resources(self) -> dict[str, float]:
        """Ray's name for it."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    def lacks(self) -> str:
        """Say what the cluster lacks, if all of it were free; "" if nothing."""
        fitting = [node for node in _alive() if all(_count(node, kind) >= n for kind, n in self.resources.items())]
        if len(fitting) >= self.nodes:
            return ""
        there = ", ".join(
            f"{_name(node)}: {counted(_count(node, 'CPU'), 'CPU')}, {counted(_count(node, 'GPU'), 'GPU')}"
            for node in _alive()
        )
        return f"it has {len(fitting)} of {self} ({there})"


def reserve(share: Share, patience_s: float, say: Callable[[str], None], is_wanted: Callable[[], bool]) -> Any:
    """Return a placement group with a bundle on each of several nodes; wait for it while others use them.

    patience_s: how long a cluster that is too small is given to grow, where it has an autoscaler.
    say: is told what is waited for. is_wanted: False ends the waiting, and None is returned.
    Raises: UserError if the cluster stays too small.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([share.resources] * share.nodes, strategy="STRICT_SPREAD")
    began_s, said = time.monotonic(), ""
    while not group.wait(RAY_LOOK_S):
        lacks = share.lacks()
        if not is_wanted():
            remove_placement_group(group)
            return None
        if lacks and time.monotonic() - began_s > patience_s:
            remove_placement_group(group)
            raise UserError(
                f"the cluster of Ray is too small, and has not grown in {patience_s:.0f} s: {lacks}. Ask for less with "
                "--nodes, --cpus-per-node or --gpus-per-node, or add nodes."
            )
        why = lacks or f"{share} are not free: others use them"
        if why != said:
            say(why)
            said = why
    return group


def node_and_address() -> tuple[str, str]:
    """Return the name of the node of Ray that this process is on, and the address at which others reach it.

    The name is Ray's, else the host's; where several nodes have it, the beginning of Ray's number is added.
    """
    import ray

    nodes, number = _alive(), ray.get_runtime_context().get_node_id()
    mine = next(node for node in nodes if node["NodeID"] == number)
    is_alone = [_name(node) for node in nodes].count(_name(mine)) == 1
    return _name(mine) if is_alone else f"{_name(mine)}-{number[:6]}", mine["NodeManagerAddress"]


def _name(node: dict[str, Any]) -> str:
    """Return a node's name; if none was given to it, Ray's is its address."""
    is_given = node["NodeName"] != node["NodeManagerAddress"]
    return NO_NAME.sub("-", str(node["NodeName" if is_given else "NodeManagerHostname"]))


def _alive() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _count(node: dict[str, Any], kind: str) -> int:
    return int(node["Resources"].get(kind, 0))


def tied(words: Sequence[str]) -> list[str]:
    """Return the command that becomes `words`. Start it in a thread that waits for it."""
    return [sys.executable, "-m", "argosy.processes.ray_cluster", str(os.getpid()), *words]


def main() -> None:
    """`python -m argosy.processes.ray_cluster PARENT COMMAND ...`."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT in its workers
    if not is_tied(int(sys.argv[1]), signal.SIGKILL):
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


KILL_RESTARTS = RestartPolicy(most_failures=5)
"""Restarts of a process that was killed; one that ended otherwise is not started again."""
RAY_POLL_S = 0.1
RAY_NEWS_WAIT_S = 10.0
"""Longest wait of a question for news."""
RAY_LOG_BYTES = 1 << 16
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
        """Return what is new; wait for that up to `RAY_NEWS_WAIT_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._exit_code is not None, RAY_NEWS_WAIT_S)
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
                self._take(ours, RAY_POLL_S)
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
        text = os.read(descriptor, RAY_LOG_BYTES) if readable else b""
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


if __name__ == "__main__":
    main()
