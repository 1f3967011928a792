"""What a node's lines say beside its ranks: its devices, the machine, and the energy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.config.schema import RunConfig
from argosy.observe.devices import NvmlDevices
from argosy.observe.energy import CataloguePower, EnergyMeter, totals_of
from argosy.observe.host import HostMeter
from argosy.observe.rapl import Rapl


class Instruments:
    """What this machine has to measure with. What it lacks is left out of the lines."""

    def __init__(self, gpus: NvmlDevices | None, host: HostMeter | None, energy: EnergyMeter | None):
        self._gpus, self._host, self._energy = gpus, host, energy

    @classmethod
    def find(cls, run: RunConfig, run_dir: Path, lines: Path) -> Instruments:
        """Return those of this machine; `lines`: the node's file, whose totals go on."""
        gpus = None if run.launch.device == "cpu" else NvmlDevices.open()
        energy = EnergyMeter(gpus, Rapl.open(), CataloguePower(run, run_dir), totals_of(lines))
        return cls(gpus, HostMeter.open(run_dir), energy)

    def poll(self, now_s: float) -> None:
        """Read what must be read more often than lines are written; `now_s` is of time.monotonic."""
        if self._energy is not None:
            self._energy.poll(now_s)

    def measure(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return the keys of a line on these ranks of the node, ascending."""
        line: dict[str, Any] = {}
        if self._gpus is not None and (devices := self._gpus.look(ranks)):
            line["devices"] = devices
        if self._host is not None:
            with suppress(Exception):  # a disk that is gone, a counter that the kernel lacks
                line["host"] = self._host.look()
        if self._energy is not None:
            line |= self._energy.look(ranks)
        return line


NOTHING = Instruments(None, None, None)
"""For lines on ranks alone."""
