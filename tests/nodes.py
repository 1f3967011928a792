"""A run on several nodes, all of them on this machine: each is an agent with a worker.

"The machine" of a node is its agent and all that it has started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from argosy.chaos.campaign import descendants
from matrix import Disturbed
from waiting import PATIENT_S


class Nodes:
    """The nodes of a run, by their names. The first one that is started has the coordinator."""

    def __init__(self, run: Disturbed):
        self.run = run
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str) -> None:
        """Give each of these nodes its command; the coordinator is there before the second one gets its own."""
        for name in names:
            self.processes[name] = self.run.launch("--launch.node", name)
            self.run.process = self.run.process or self.processes[name]
            self.run.wait_until(lambda: self.run.events("coordinator_started"))

    def watch(self, name: str) -> None:
        """From now on the end of this node's command is taken for the run's."""
        self.run.process = self.processes[name]

    def machine(self, name: str) -> list[int]:
        """Return the processes of the node."""
        pid = self.processes[name].pid
        return [pid, *descendants(pid)]

    def send(self, name: str, number: signal.Signals) -> None:
        for pid in self.machine(name):
            os.kill(pid, number)

    def lose(self, *names: str) -> float:
        """End these machines at once, and their memory with them. Returns when that was."""
        moment_s = time.time()
        for name in names:
            self.send(name, signal.SIGKILL)
        for name in names:
            lost = self.processes.pop(name)
            lost.communicate()
            for memory in Path("/dev/shm").glob(f"argosy-{lost.pid}-*"):
                shutil.rmtree(memory)
        return moment_s

    def sizes(self) -> list[int]:
        """Return the size of each world so far."""
        return [e["size"] for e in self.run.events("generation")]

    def end(self) -> None:
        """Wait for the run's end, and for that of all its commands."""
        self.run.end()
        for process in self.processes.values():
            process.communicate(timeout=PATIENT_S)
            assert process.returncode == 0

    def kill(self) -> None:
        """End what is left of the run."""
        for name, process in self.processes.items():
            if process.poll() is None:
                self.send(name, signal.SIGKILL)
            process.communicate()
