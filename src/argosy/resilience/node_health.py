"""What an examination of a node says of it, and the process that is forked to find it out.

The examination itself (`resilience.node_check`) needs torch and every core of the machine, and may die of what it is
looking for: it runs in a process of its own, of which this is the asker's side.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Self

from pydantic import TypeAdapter

from argosy.processes.channel import Gone
from argosy.processes.child import Entry
from argosy.processes.fork_server import ForkServer

NODE_CHECK = Entry("argosy.resilience.node_check")
"""By name, as it imports torch."""
ASKED = "ARGOSY_EXAMINATION"
"""Environment variable: what is asked of the process that examines, as JSON."""
PATIENCE_S = 60.0
"""What an examination may take beyond its time: devices have to be opened, and the machine may be busy."""
BROKEN = {signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
"""An examination that dies of these has met a fault of the machine: its own program is the same everywhere."""
SLOW = 2.0
"""A node is slow if others do the same so many times as fast. What an examination measures in a fraction of a second,
on machines that do other things as well, is no surer than that."""


@dataclass(frozen=True)
class NodeCheckRequest:
    """What is to be examined."""

    seconds: float
    number_format: str
    """In which the plan computes: fp32, bf16, fp16 or fp8."""
    gpus: int
    """How many of the node's, at most."""

    @classmethod
    def read(cls) -> Self:
        """What this process was asked for."""
        return TypeAdapter(cls).validate_json(os.environ[ASKED])


@dataclass(frozen=True)
class Wrong:
    """A device computed or kept something other than it should."""

    device: str
    """core 3, cuda:0."""
    test: str
    """What it did: fp32 product, memory."""
    problem: str
    """What the first wrong result had, where, and what it should have had."""
    times: int = 1
    """Results that were wrong."""
    of: int = 1
    """Results in all."""

    def __str__(self) -> str:
        return f"{self.device}, {self.test}: {self.problem} ({self.times} of {self.of} times)"


@dataclass(frozen=True)
class Health:
    """What was found of a node."""

    wrong: tuple[Wrong, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    """How fast the slowest core or GPU is, as a step waits for it: "cuda bf16 product" in FLOP/s, "core memory" in
    bytes read and written per second, ..."""
    seconds: float = 0.0
    """How long it took."""
    unknown: str = ""
    """Why it could not be examined; empty if it was."""

    def to_record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """The health whose `to_record` this is."""
        return cls(**{**record, "wrong": tuple(Wrong(**wrong) for wrong in record["wrong"])})


class NodeCheck:
    """A process that examines this node. Its asker hears of its birth and end from the fork server."""

    def __init__(self, fork_server: ForkServer, asked: NodeCheckRequest, environment: Mapping[str, str]):
        """`environment` is added to the process's own. Raises: Gone if the fork server is."""
        self._asked = asked
        text = TypeAdapter(NodeCheckRequest).dump_json(asked).decode()
        self._channel = fork_server.fork("node_check", NODE_CHECK, {**environment, ASKED: text})
        self._began_s = time.monotonic()
        self._is_late = False
        self.pid = 0
        """0 until it is born."""

    def hurry(self) -> None:
        """End it if it takes too long."""
        if self.pid and not self._is_late and time.monotonic() - self._began_s > self._asked.seconds + PATIENCE_S:
            self._is_late = True
            self.kill()

    def kill(self) -> None:
        """End it, whatever it has found."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def ended(self, exit_code: int) -> Health:
        """What it has found, now that it has ended; dying in the attempt is a finding too."""
        said = self._said()
        self._channel.close()
        took_s = round(time.monotonic() - self._began_s, 3)
        if said is not None:
            return Health.from_record(said)
        if self._is_late:
            return Health((Wrong("node", "node_check", f"not ended after {took_s:.0f} s"),), seconds=took_s)
        if -exit_code in BROKEN:
            problem = f"died of {signal.Signals(-exit_code).name}"
            return Health((Wrong("node", "node_check", problem),), seconds=took_s)
        return Health(seconds=took_s, unknown=f"the examination ended with exit code {exit_code}")

    def _said(self) -> Mapping[str, Any] | None:
        try:
            messages = self._channel.take()
        except Gone:
            return None
        return next((message["health"] for message in messages if message["kind"] == "node_checked"), None)


def slow_nodes(rates: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Node -> in what it is much slower than the median of the others, of those that are; `rates` as in `Health`."""
    found = {}
    for node, own in rates.items():
        others = [theirs for other, theirs in rates.items() if other != node]
        slow = [
            f"{what} at {rate:.3g}/s, the others {usual:.3g}/s"
            for what, rate in own.items()
            if (usual := _median(theirs[what] for theirs in others if what in theirs)) > SLOW * rate
        ]
        if slow:
            found[node] = "; ".join(slow)
    return found


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return median(known) if known else 0.0
