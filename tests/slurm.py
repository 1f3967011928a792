"""A real SLURM on this machine: a controller and several nodes, each a slurmd of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
WHERE_FROM = "needs SLURM, and root to start it: apt-get install slurmctld slurmd slurm-client munge"
READY_S = 30.0


def is_installed() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


@dataclass(frozen=True)
class Slurm:
    """Nodes n1, n2, ... of a partition "main"."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Add this to the environment of SLURM's commands."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words: str) -> str:
        """Return what a command of SLURM prints."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True, timeout=READY_S)
        return done.stdout

    def lose(self, node: str) -> None:
        """End a node's slurmd and all that it has started at once, as if it had no power. It does not come back."""
        mine = [pid for pid, said in _environments() if {f"SLURMD_NODENAME={node}", self._conf} <= said]
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in mine}
        steps = [pid for pid in parents if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")]
        slurmd = int((self.folder / f"slurmd-{node}.pid").read_text())
        # Stopped first, or the others would tell of the first to go; and killed from the leaves on: the kernel lets a
        # process that is stopped go on (SIGHUP, SIGCONT) if its group has lost its parent.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (*sorted(mine, reverse=True), *steps, slurmd):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    @property
    def _conf(self) -> str:
        return f"SLURM_CONF={self.environment['SLURM_CONF']}"


def _environments() -> Iterator[tuple[int, set[str]]]:
    """Each process of this machine, and the variables that it was started with."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), set((folder / "environ").read_bytes().decode(errors="replace").split("\0"))


@contextmanager
def slurm(folder: Path, nodes: int, topology: str = "") -> Iterator[Slurm]:
    """Start it with so many nodes, joined as `topology.conf` says; at the end, end it with all that it has started."""
    running = Slurm(folder)
    _configure(folder, nodes, topology)
    socket_of_munge = folder / "munge.socket"
    daemons = [_start(folder, "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
                      f"--socket={socket_of_munge}", f"--pid-file={folder}/munged.pid",
                      f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed")]  # fmt: skip
    try:
        _wait(socket_of_munge.exists)
        daemons.append(_start(folder, "slurmctld", "-D", "-f", running.environment["SLURM_CONF"]))
        daemons += [
            _start(folder, "slurmd", "-D", "-f", running.environment["SLURM_CONF"], "-N", f"n{number}")
            for number in range(1, nodes + 1)
        ]
        _wait(lambda: running.ask("sinfo", "-h", "-N", "-o", "%t").split() == ["idle"] * nodes)
        yield running
    finally:
        with suppress(subprocess.SubprocessError):
            running.ask("scancel", "-u", "root", "--signal=KILL", "--full")
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(READY_S)


def _configure(folder: Path, nodes: int, topology: str) -> None:
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=tests",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={free_port()}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "SlurmUser=root",
        "SlurmdUser=root",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdTimeout=15",
    ]
    for number in range(1, nodes + 1):
        (folder / f"spool-n{number}").mkdir()
        lines.append(f"NodeName=n{number} NodeAddr=127.0.0.1 NodeHostname={host} Port={free_port()} CPUs=2")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    if topology:
        (folder / "topology.conf").write_text(topology)
        lines.append("TopologyPlugin=topology/tree")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _start(folder: Path, program: str, *options: str) -> subprocess.Popen[bytes]:
    with (folder / f"{program}.log").open("ab") as log:
        return subprocess.Popen([program, *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _wait(is_so: object) -> None:
    end = time.monotonic() + READY_S
    while True:
        with suppress(subprocess.SubprocessError):
            if is_so():  # type: ignore[operator]
                return
        assert time.monotonic() < end, "SLURM does not start"
        time.sleep(0.1)
