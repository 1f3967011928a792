"""A real etcd of three machines, which are processes here."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ports import free_port

PROGRAM = "etcd"
WHERE_FROM = "etcd is not installed here (Debian: apt-get install etcd-server)"
START_S = 30.0


def is_installed() -> bool:
    return shutil.which(PROGRAM) is not None


class Etcd:
    """Three etcd processes on loopback, whose data are in a folder."""

    def __init__(self, folder: Path, options: Sequence[str] = (), scheme: str = "http"):
        self._folder, self._options, self._scheme = folder, options, scheme
        ports = [free_port() for _ in range(6)]
        self.ports, self._peers = ports[:3], ports[3:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * 3

    @property
    def url(self) -> str:
        """As launch.lease has it."""
        return f"etcd{'s' * (self._scheme == 'https')}://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def processes(self) -> list[int]:
        """Process ids of those that run."""
        return [process.pid for process in self._processes if process is not None]

    def start(self, *numbers: int) -> None:
        """Start these of them, and wait until they answer."""
        cluster = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))
        for n in numbers:
            client, peer = f"{self._scheme}://127.0.0.1:{self.ports[n]}", f"http://127.0.0.1:{self._peers[n]}"
            with (self._folder / f"etcd-{n}.log").open("ab") as log:
                self._processes[n] = subprocess.Popen(
                    [
                        *(PROGRAM, "--name", f"m{n}", "--data-dir", str(self._folder / f"etcd-{n}")),
                        *("--listen-client-urls", client, "--advertise-client-urls", client),
                        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                        *("--initial-cluster", cluster, "--initial-cluster-token", self._folder.name),
                        *("--logger", "zap", "--log-level", "error", *self._options),
                    ],
                    stdout=log,
                    stderr=log,
                )
        end = time.monotonic() + START_S
        for n in numbers:
            while not _listens(self.ports[n]):
                assert time.monotonic() < end, (self._folder / f"etcd-{n}.log").read_text()[-2000:]
                time.sleep(0.05)

    def kill(self, *numbers: int) -> None:
        """As if these machines lost their power."""
        for n in numbers:
            if (process := self._processes[n]) is not None:
                process.send_signal(signal.SIGKILL)
                process.wait()
                self._processes[n] = None


@contextmanager
def etcd(folder: Path, options: Sequence[str] = (), scheme: str = "http") -> Iterator[Etcd]:
    """Three of them, running."""
    made = Etcd(folder, options, scheme)
    with ExitStack() as ends:
        ends.callback(made.kill, 0, 1, 2)
        made.start(0, 1, 2)
        yield made


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
