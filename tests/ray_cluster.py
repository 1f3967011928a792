"""A real cluster of Ray on this machine: a head and more nodes, each a raylet of its own with all that it starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from argosy.chaos.campaign import descendants
from ports import free_port

WHERE_FROM = "needs Ray: pip install 'argosy[ray]'"
READY_S = 90.0


def is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None


@dataclass
class Cluster:
    """Nodes n1 (the head), n2, ... with some CPUs each."""

    folder: Path
    """Its name is short: Ray makes sockets in it."""
    port: int = field(default_factory=free_port)
    dashboard_port: int = field(default_factory=free_port)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(self, name: str, cpus: int = 2) -> None:
        """Start a node, the first one as the head."""
        where = ["--address", self.address]
        if not self.nodes:
            where = ["--head", "--port", str(self.port), "--dashboard-port", str(self.dashboard_port),
                     "--temp-dir", str(self.folder)]  # fmt: skip
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *where,
                 "--node-name", name, "--num-cpus", str(cpus), "--num-gpus", "0",
                 "--object-store-memory", "80000000"]  # fmt: skip
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            self.nodes[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=self.folder
            )
        end = time.monotonic() + READY_S
        while "Ray runtime started" not in log.read_text():
            assert self.nodes[name].poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def lose(self, name: str) -> None:
        """End a node at once, with all that runs on it."""
        process = self.nodes.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@contextmanager
def cluster(*names: str, cpus: int = 2) -> Iterator[Cluster]:
    """Start one with these nodes; at the end, end it with all that it has started."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    running = Cluster(folder)
    try:
        for name in names:
            running.add(name, cpus)
        yield running
    finally:
        for name in list(running.nodes):
            running.lose(name)
        for path in Path("/proc").glob("[0-9]*"):  # what Ray has started beside its own processes
            with suppress(OSError):
                if str(folder).encode() in (path / "cmdline").read_bytes():
                    os.kill(int(path.name), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
