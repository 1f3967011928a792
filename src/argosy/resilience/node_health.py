"""Node health: the result of a node health check, and the client's side of the process that runs it.

The check itself (`resilience.node_check`) needs torch and every core of the machine, and may die of the fault that it
is looking for: it runs in a process of its own.
"""

from __future__ import annotations

import os
import signal
import time
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter

from argosy.processes.child import ChannelClosed, ForkEntry
from argosy.processes.fork_server import ForkServer

NODE_CHECK = ForkEntry("argosy.resilience.node_check")
"""Entry of the node health check, by name, as it imports torch."""
CHECK_VARIABLE = "ARGOSY_NODE_CHECK"
"""Environment variable of the checking process: the request, as JSON."""
CHECK_PATIENCE_S = 60.0
"""Time that a check may take beyond its own: devices have to be opened, and the machine may be busy."""
BROKEN_MACHINE_SIGNALS = {signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
"""A check that dies of one of these has met a fault of the machine: the program is the same everywhere."""
SLOW_NODE = 2.0
"""A node is slow if the others are this many times as fast. A check measures for a fraction of a second on machines
that do other things as well: smaller differences mean nothing."""


@dataclass(frozen=True)
class NodeCheckRequest:
    """The tests of a node health check."""

    seconds: float
    number_format: str
    """The plan's precision."""
    gpus: int
    """Number of the node's GPUs, at most."""

    @classmethod
    def read(cls) -> Self:
        """Return the request to this process."""
        return TypeAdapter(cls).validate_json(os.environ[CHECK_VARIABLE])


@dataclass(frozen=True)
class WrongResult:
    """A device computed or stored a wrong value."""

    device: str
    """The device, such as "core 3" or "cuda:0"."""
    test: str
    """The test that failed, such as "fp32 product" or "memory"."""
    problem: str
    """The first wrong value, the right one, and where it was."""
    times: int = 1
    """Number of wrong results."""
    of: int = 1
    """Number of all results."""

    def __str__(self) -> str:
        return f"{self.device}, {self.test}: {self.problem} ({self.times} of {self.of} times)"


@dataclass(frozen=True)
class Health:
    """The result of a node health check."""

    wrong: tuple[WrongResult, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    """Rates of the slowest core or GPU, which a step waits for: "cuda bf16 product" in FLOP/s, "core memory" in bytes
    read and written per second, ..."""
    seconds: float = 0.0
    """Duration."""
    unknown: str = ""
    """Why it could not be checked; empty if it was."""


class NodeCheck:
    """A process that checks this node. The fork server tells the client of its start and end."""

    def __init__(self, fork_server: ForkServer, request: NodeCheckRequest, environment: Mapping[str, str]):
        """`environment` is added to the process's own."""
        self._request = request
        text = TypeAdapter(NodeCheckRequest).dump_json(request).decode()
        # At once, though the compiler's import may still take a second of one core: the best of many tries counts.
        self._channel = fork_server.fork("node_check", NODE_CHECK, {**environment, CHECK_VARIABLE: text}, at_once=True)
        self._began_s = time.monotonic()
        self._is_late = False
        self.pid = 0
        """0 until it is forked."""

    def end_if_late(self) -> None:
        """Kill it if it takes too long."""
        if (
            self.pid
            and not self._is_late
            and time.monotonic() - self._began_s > self._request.seconds + CHECK_PATIENCE_S
        ):
            self._is_late = True
            self.kill()

    def kill(self) -> None:
        """Kill it, whatever it has found."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def ended(self, exit_code: int) -> Health:
        """Return what it has found, now that it has ended; dying in the attempt may be a finding too."""
        said = self._said()
        self._channel.close()
        took_s = round(time.monotonic() - self._began_s, 3)
        if said is not None:
            return TypeAdapter(Health).validate_python(said)
        if self._is_late:
            return Health((WrongResult("node", "node_check", f"not ended after {took_s:.0f} s"),), seconds=took_s)
        if -exit_code in BROKEN_MACHINE_SIGNALS:
            problem = f"died of {signal.Signals(-exit_code).name}"
            return Health((WrongResult("node", "node_check", problem),), seconds=took_s)
        return Health(seconds=took_s, unknown=f"the node health check ended with exit code {exit_code}")

    def _said(self) -> Mapping[str, Any] | None:
        try:
            messages = self._channel.take()
        except ChannelClosed:
            return None
        return next((message["health"] for message in messages if message["kind"] == "node_checked"), None)


class NodeRates:
    """The rates of all nodes, sorted, so that a node that comes is compared without a look at each other one."""

    def __init__(self) -> None:
        self._rates: dict[str, Mapping[str, float]] = {}
        self._sorted: dict[str, list[tuple[float, str]]] = {}
        """Measured quantity -> rate and node, ascending."""

    def put(self, node: str, rates: Mapping[str, float]) -> None:
        """Take in a node's rates (as in `Health`), in place of those that it had."""
        self.remove(node)
        self._rates[node] = rates
        for what, rate in rates.items():
            insort(self._sorted.setdefault(what, []), (rate, node))

    def remove(self, node: str) -> None:
        for what, rate in self._rates.pop(node, {}).items():
            rates = self._sorted[what]
            del rates[bisect_left(rates, (rate, node))]

    def slow(self) -> dict[str, str]:
        """Return node -> why, for nodes that are much slower than the median of the others."""
        found: dict[str, list[str]] = {}
        for what, rates in self._sorted.items():
            for at, (rate, node) in enumerate(rates):
                usual = _median_without(rates, at)
                if usual <= SLOW_NODE * rate:
                    break  # so it is for all that are faster
                found.setdefault(node, []).append(f"{what} at {rate:.3g}/s, the others {usual:.3g}/s")
        return {node: "; ".join(why) for node, why in found.items()}


def _median_without(rates: Sequence[tuple[float, str]], at: int) -> float:
    """Return the median of ascending rates without the one at index `at`; 0 if there is no other."""
    others = len(rates) - 1
    if not others:
        return 0.0
    low, high = ((i if i < at else i + 1) for i in ((others - 1) // 2, others // 2))
    return (rates[low][0] + rates[high][0]) / 2
