"""The energy of a node while its ranks run: measured where hardware tells, estimated and marked so elsewhere.

"nvml": what the GPUs of its ranks took, and its CPUs if they tell as well. "rapl": what all its CPUs took. "estimate":
the catalogue's power of a device with its share of the node, times what training draws of it
(`plan.cost.economy.DRAW`), times the time. The building (PUE) is in none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from argosy.config.schema import RunConfig
from argosy.observe.devices import NvmlDevices
from argosy.observe.events import from_the_end
from argosy.observe.rapl import Rapl
from argosy.plan.cost.economy import power_per_device_w
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import DetectedHardware, machine_at_hand

Source = Literal["nvml", "rapl", "estimate"]
POLL_S = 60.0
"""Counters are read at least so often, since they begin at 0 again."""


class EnergyMeter:
    """Adds up the energy of one node, over all lines and starts of a run."""

    def __init__(
        self,
        gpus: NvmlDevices | None,
        cpus: Rapl | None,
        watts_of_device: Callable[[], float | None],
        totals: tuple[float, float] = (0.0, 0.0),
    ):
        """watts_of_device: the catalogue's power for a rank's device; None if it is unknown. totals: joules and
        device-seconds of the lines before."""
        self._gpus, self._cpus, self._watts_of_device = gpus, cpus, watts_of_device
        self._total_j, self._total_device_s = totals
        self._fresh_j, self._source = 0.0, "estimate"
        self._ranks, self._then_s = 0, time.monotonic()

    def poll(self, now_s: float) -> None:
        """Read the counters if that is due; `now_s` is of time.monotonic."""
        if now_s - self._then_s >= POLL_S:
            self._read(now_s)

    def look(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the line's `energy` since the line before, in whole joules; {} if nobody knows it."""
        self._ranks = self._ranks or len(ranks)  # the first window is that of the ranks that it ends with
        self._read(time.monotonic())
        self._ranks = len(ranks)
        if self._source == "":
            return {}
        joules = int(self._fresh_j)
        self._fresh_j -= joules
        self._total_j += joules
        totals = {"total_joules": round(self._total_j), "total_device_s": round(self._total_device_s, 1)}
        return {"energy": {"joules": joules, "source": self._source, **totals}}

    def _read(self, now_s: float) -> None:
        past_s, self._then_s = now_s - self._then_s, now_s
        self._total_device_s += past_s * self._ranks
        gpus_j = None if self._gpus is None else self._gpus.joules(self._ranks)
        cpus_j = None if self._cpus is None else self._cpus.joules()
        if gpus_j is not None:
            self._source = "nvml"
            self._fresh_j += gpus_j + (cpus_j or 0.0)
        elif self._gpus is None and cpus_j is not None:
            self._source = "rapl"
            self._fresh_j += cpus_j
        else:
            watts = self._watts_of_device()
            self._source = "" if watts is None else "estimate"
            self._fresh_j += (watts or 0.0) * self._ranks * past_s


def totals_of(path: Path) -> tuple[float, float]:
    """Return joules and device-seconds of all lines that a node has written so far, from the last that tells."""
    for line in from_the_end(path):
        if isinstance(energy := line.get("energy"), dict):
            return float(energy.get("total_joules", 0)), float(energy.get("total_device_s", 0))
    return 0.0, 0.0


class CataloguePower:
    """The catalogue's power of a rank's device, once the run has written down which devices it found."""

    def __init__(self, run: RunConfig, run_dir: Path):
        self._run, self._run_dir = run, run_dir
        self._known: float | None = None

    def __call__(self) -> float | None:
        """Return watts, without the building's share; None as long as the devices are unknown, or their power."""
        if self._known is None:
            machine = _machine(self._run, self._run_dir)
            self._known = None if machine is None else watts_per_device(machine)
        return self._known


def watts_per_device(machine: Cluster) -> float | None:
    """Return the power of a device in training with its share of the node; None if the catalogue lacks it."""
    power = power_per_device_w(machine)
    return None if power is None else float(power.mid) / machine.pue


def _machine(run: RunConfig, run_dir: Path) -> Cluster | None:
    for event in from_the_end(run_dir / "events" / "rank-0.jsonl"):
        if event.get("event") == "start":
            try:
                return machine_at_hand(run, DetectedHardware(**event["hardware"]))
            except Exception:  # a line of another version, or a description of the machine that is gone
                return None
    return None
