"""Parts of a run that one command starts on this machine: each a command of its own, whose lines are passed on."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from argosy.engines.local import spawn
from argosy.errors import (
    STOP_SIGNALS,
    ArgosyError,
    Interrupted,
    Retryable,
    RunFailed,
    StorageError,
    UserError,
    error_of,
    signals_to,
)
from argosy.processes.child import TIED_TO
from argosy.sync.layout import SITES

ENDED_BY_SIGTERM = (128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes after the signal: of a part that has saved, and of one that had nothing to save yet."""
OTHERS_GONE_S = 20.0
"""Time that the parts that are left of a run have to write a report, or to wait for a worker that is started again."""


@contextmanager
def started(
    names: Sequence[str], run_file: Path, run_dir: Path, accept_changes: bool, servers: Sequence[str] = ()
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start `argosy train RUN_FILE --site NAME` for each of `servers` and `names`; what is left of them is killed after
    the block. If this process is killed, they save and end.

    Those of `names` share the cores: else each would start a thread for every core, and all would wait for each other.
    """
    children, cores = {}, sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(names))
    try:
        for name in (*servers, *names):
            words = [sys.executable, "-m", "argosy", "train", str(run_file), "--run-dir", str(run_dir)]
            words += ["--site", name, *(["--accept-changes"] if accept_changes else [])]
            children[name] = spawn(words, subprocess.PIPE, {"PYTHONUNBUFFERED": "1", TIED_TO: str(os.getpid())})
            if name in names:
                first = names.index(name) * share % len(cores)
                os.sched_setaffinity(children[name].pid, cores[first : first + share])
        yield children
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
            child.wait()


def supervise(
    children: dict[str, subprocess.Popen[bytes]], quiet: bool, servers: Collection[str] = (), quorum: int = 0
) -> dict[str, int]:
    """Pass on what the parts say, and signals to them, until all have ended. Returns their exit codes.

    servers: parts that need the others, and are needed. Once only one kind is left, it is asked to end after
    OTHERS_GONE_S; servers at once, if no worker could begin. quorum: once so many parts could not begin that fewer are
    left, these are asked to end at once. What ended because it was asked to counts as having ended well.
    """
    alone_s, asked, signals = math.inf, list[str](), list[int]()
    width = max(map(len, children))

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        for child in children.values():
            if child.poll() is None:
                child.send_signal(number)

    def end_of(name: str, is_last: bool) -> bytes:
        """Return what to say of a part that ends; nothing if it ends well."""
        code, others = children[name].wait(), ""
        if not code or (name in asked and code in ENDED_BY_SIGTERM):
            return b""
        if not (is_last or signals):
            is_short = _cannot_begin(children, quorum)
            others = "; too few are left to agree: they save and end" if is_short else "; the others go on"
        return f"argosy: {name} ended with exit code {code}{others}".encode()

    with signals_to(pass_on, *STOP_SIGNALS), selectors.DefaultSelector() as selector:
        for name, child in children.items():
            assert child.stdout is not None
            selector.register(child.stdout, selectors.EVENT_READ, name)
        unread = dict.fromkeys(children, b"")
        while selector.get_map():
            if servers and math.isinf(alone_s):
                alone_s = time.monotonic() + _alone_s(children, servers)
            if time.monotonic() > alone_s or _cannot_begin(children, quorum):
                alone_s, servers, quorum = math.inf, (), 0
                asked = [name for name, child in children.items() if child.poll() is None]
                pass_on(signal.SIGTERM, None)
            for key, _ in selector.select(1.0 if servers else None):
                name, data = key.data, os.read(key.fd, 1 << 16)
                *lines, unread[name] = (unread[name] + data).split(b"\n")
                if not data:
                    selector.unregister(key.fileobj)
                    lines += [unread[name], end_of(name, is_last=not selector.get_map())]
                for line in lines:
                    if line and not quiet:
                        print(f"{name:{width}} | {line.decode(errors='replace')}", flush=True)
    codes = {name: child.wait() for name, child in children.items()}
    return codes | {name: 0 for name in asked if codes[name] in ENDED_BY_SIGTERM}


def _cannot_begin(children: Mapping[str, subprocess.Popen[bytes]], quorum: int) -> bool:
    """Return True if so many parts were refused what they asked for that fewer than `quorum` are left.

    A part that dies otherwise may be started again; this one, not before somebody has changed what was typed.
    """
    return sum(child.poll() != UserError.exit_code for child in children.values()) < quorum


def _alone_s(children: Mapping[str, subprocess.Popen[bytes]], servers: Collection[str]) -> float:
    """Return how long what is left may go on; infinite while there are both servers and workers, or all is done."""
    codes = {name: child.poll() for name, child in children.items()}
    if all(codes[name] is not None for name in servers):
        return OTHERS_GONE_S
    workers = {code for name, code in codes.items() if name not in servers}
    if workers & {None, 0, *(128 + number for number in STOP_SIGNALS)}:
        return math.inf  # a worker ends well once the servers say that the run is over; servers have the signal too
    return 0.0 if workers == {UserError.exit_code} else OTHERS_GONE_S


def check_codes(codes: Mapping[str, int], saved: str, folder: Path) -> None:
    """Raise what the parts ended with that did not end well, given the exit code of each.

    saved: said if a signal has ended them. folder: that of the run. Raises: Interrupted; the error of these parts if
    they have one exit code, else RunFailed.
    """
    wrong = {name: code for name, code in codes.items() if code}
    for number in STOP_SIGNALS:
        if 128 + number in wrong.values():
            raise Interrupted(f"{saved}; the same command goes on", number)
    if wrong:
        words = ", ".join(f"{name} ended with exit code {code}" for name, code in wrong.items())
        kinds = {type(error_of(code, "")) for code in wrong.values()}
        error: type[ArgosyError] = kinds.pop() if len(kinds) == 1 else RunFailed
        again = " The same command goes on." if error in (RunFailed, StorageError, Retryable) else ""
        raise error(f"{words}. Their output is above, and in {folder / SITES}.{again}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
