"""Measurements of a node beside its ranks: its GPUs, the machine, and the energy that both take.

GPUs: utilisation, memory, temperature, power, clock and energy, as NVML tells them. Without NVIDIA's library or the
package `nvidia-ml-py` (the extra `devices`) nothing is known; AMD's devices are left out. The device itself is not
touched: NVML asks the driver. The machine: load, memory, disk and network, as psutil tells (the same extra).

Energy is measured where hardware tells, else estimated and marked so. "nvml": what the GPUs of its ranks took, and its
CPUs if they tell as well. "rapl": what all its CPUs took, from the kernel's powercap tree (also on AMD's processors).
"estimate": the catalogue's power of a device with its share of the node, times what training draws of it
(`plan.cost.economy.DRAW`), times the time. The building (PUE) is in none of them.

Reading powercap needs the rights of root on most systems: the counters are so fine that they tell secrets of other
programs (CVE-2020-8694, "Platypus"). What is written down of them is whole joules, a few seconds apart.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from argosy.config.schema import RunConfig
from argosy.observe.events import from_the_end
from argosy.plan.cost.economy import power_per_device_w
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import DetectedHardware, machine_at_hand

POWERCAP = Path("/sys/class/powercap")
WHOLE = ("package", "dram")
"""Domains that add up: a package holds its cores; memory stands beside it. `psys` would count both once more."""


@dataclass
class _Domain:
    counter: Path
    range_uj: int
    """After so many microjoules the counter begins at 0 again."""
    before_uj: int


class Rapl:
    """The energy counters of all packages of this machine."""

    def __init__(self, domains: list[_Domain]):
        self._domains = domains

    @classmethod
    def open(cls, root: Path = POWERCAP) -> Rapl | None:
        """Return the counters; None if there are none, or they must not be read."""
        domains = []
        for folder in sorted(root.glob("intel-rapl:*")):  # not intel-rapl-mmio: the same packages once more
            try:
                if (folder / "name").read_text().strip().partition("-")[0] not in WHOLE:
                    continue
                counter = folder / "energy_uj"
                domains.append(_Domain(counter, _number(folder / "max_energy_range_uj"), _number(counter)))
            except (OSError, ValueError):
                return None  # a part would pass for the whole
        return cls(domains) if domains else None

    def joules(self) -> float | None:
        """Return the energy since the last call; None if a counter can be read no longer.

        A counter that is smaller than before has begun again: once, if it is asked in time. At 300 W those of most
        packages do so every quarter of an hour.
        """
        total_uj = 0
        for domain in self._domains:
            try:
                now_uj = _number(domain.counter)
            except (OSError, ValueError):
                return None
            total_uj += now_uj - domain.before_uj + (domain.range_uj if now_uj < domain.before_uj else 0)
            domain.before_uj = now_uj
        return total_uj / 1e6


def _number(path: Path) -> int:
    return int(path.read_text())


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


VISIBLE = "CUDA_VISIBLE_DEVICES"


class NvmlDevices:
    """The GPUs that this node's processes see, in CUDA's order: the i-th process has the i-th."""

    def __init__(self, nvml: Any, handles: Sequence[Any]):
        """`nvml` is the module `pynvml`, initialised."""
        self._nvml, self._handles = nvml, handles
        self._before_mj: dict[int, int] = {}

    @classmethod
    def open(cls, nvml: Any = None) -> NvmlDevices | None:
        """Return the GPUs; None if there are none, or nobody knows of them."""
        try:
            nvml = nvml or importlib.import_module("pynvml")  # nvidia-ml-py
            nvml.nvmlInit()
            handles = _handles(nvml)
        except Exception:  # no package, no library, no driver, no permission
            return None
        found = cls(nvml, handles)
        found.joules(len(handles))  # from here on
        return found if handles else None

    def look(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return what each GPU of these ranks, ascending, shows now; what it does not tell is left out."""
        found = []
        for rank, handle in zip(ranks, self._handles, strict=False):
            shown = {"ranks": [rank], **{key: self._ask(ask, handle) for key, ask in self._questions().items()}}
            found.append({key: value for key, value in shown.items() if value is not None})
        return found

    def joules(self, count: int) -> float | None:
        """Return the energy that the first `count` GPUs have taken since the last call; None if one does not tell.

        A counter that was reset, as a driver does it when it is loaded, counts from 0.
        """
        total = 0.0
        for number, handle in enumerate(self._handles[:count]):
            now = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            if now is None:
                return None
            before = self._before_mj.get(number, now)
            self._before_mj[number] = now
            total += (now - before if now >= before else now) / 1e3
        return total

    def _questions(self) -> dict[str, Callable[[Any], Any]]:
        nvml = self._nvml
        return {
            "name": lambda gpu: _text(nvml.nvmlDeviceGetName(gpu)),
            "utilisation": lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "memory_bytes": lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "temperature_c": lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "clock_mhz": lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        }

    def _ask(self, ask: Callable[[Any], Any], handle: Any) -> Any:
        with suppress(self._nvml.NVMLError):  # not supported, or the GPU is lost
            return ask(handle)
        return None


def _handles(nvml: Any) -> list[Any]:
    """Return the handles of the visible GPUs, which CUDA_VISIBLE_DEVICES names by number or UUID, in its order."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


class HostMeter:
    """Reads the machine's counters; rates are since the reading before."""

    def __init__(self, psutil: Any, folder: Path):
        """`folder`: whose disk is looked at."""
        self._psutil, self._folder = psutil, folder
        self._psutil.cpu_percent(interval=None)  # the first call has nothing to compare with
        self._before = self._network()

    @classmethod
    def open(cls, folder: Path) -> HostMeter | None:
        """Return the meter; None without psutil."""
        try:
            import psutil
        except ImportError:
            return None
        return cls(psutil, folder)

    def look(self) -> dict[str, float]:
        """Return shares from 0 to 1, bytes and bytes a second; load: the mean over a minute of processes that run."""
        psutil, memory = self._psutil, self._psutil.virtual_memory()
        (then_s, sent, received), self._before = self._before, self._network()
        now_s, sent_now, received_now = self._before
        past_s = max(1e-3, now_s - then_s)
        return {
            "cpu": round(psutil.cpu_percent(interval=None) / 100, 4),
            "memory_used_bytes": memory.total - memory.available,
            "memory_bytes": memory.total,
            "disk_free_bytes": psutil.disk_usage(str(self._folder)).free,
            "network_sent_bytes_per_s": round(max(0, sent_now - sent) / past_s),
            "network_received_bytes_per_s": round(max(0, received_now - received) / past_s),
            "load": round(psutil.getloadavg()[0], 2),
        }

    def _network(self) -> tuple[float, int, int]:
        counters = self._psutil.net_io_counters()  # None where there is no network
        sent, received = (counters.bytes_sent, counters.bytes_recv) if counters else (0, 0)
        return time.monotonic(), sent, received


class Instruments:
    """The instruments of this machine. Measurements that it lacks are left out of the lines."""

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
