"""nodes/NODE.jsonl: what the ranks of one node did, summed up from their heartbeats by one process of the node, and its
machine's instruments.

A line comes every `observe.ranks_every_s` at most. In large worlds lines come so rarely that all nodes together write
about `BYTES_PER_DAY`, whatever the number of ranks: means lose nothing by that, since the counters go on.

GPUs: utilisation, memory, temperature, power, clock and energy, as NVML tells them. Without NVIDIA's library or the
package `nvidia-ml-py` (the extra `devices`) nothing is known; AMD's devices are left out. The device itself is not
touched: NVML asks the driver. The machine: load, memory, disk and network, as psutil tells (the same extra).
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.config.schema import RunConfig
from argosy.errors import ArgosyWarning
from argosy.observe.counters import Counters
from argosy.observe.energy import CataloguePower, EnergyMeter, Rapl, totals_of
from argosy.observe.events import JsonLines
from argosy.observe.heartbeat import HeartbeatReading, thinned

VISIBLE = "CUDA_VISIBLE_DEVICES"


class NvmlDevices:
    """The GPUs that this node's processes see, in CUDA's order: the i-th process has the i-th."""

    def __init__(self, nvml: Any, handles: Sequence[Any]):
        """`nvml` is the module `pynvml`, initialised."""
        self._nvml, self._handles = nvml, handles
        self._before_mj: dict[int, int | None] = {}

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
        """Return what the GPUs of a node show, given its ranks of the world, ascending, without what is not told."""
        found = []
        for rank, handle in zip(ranks, self._handles, strict=False):
            shown = {"ranks": [rank], **{key: self._ask(ask, handle) for key, ask in self._questions().items()}}
            found.append({key: value for key, value in shown.items() if value is not None})
        return found

    def joules(self, count: int) -> float | None:
        """Return the energy that the first `count` GPUs have taken since the last call; None if one does not tell.

        Nor does one that was silent at the last call: that time was estimated, and would count twice. A counter that
        was reset, as a driver does it when it is loaded, counts from 0.
        """
        total, all_tell = 0.0, True
        for number, handle in enumerate(self._handles[:count]):
            now = self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            before, self._before_mj[number] = self._before_mj.get(number), now
            if now is None or before is None:
                all_tell = False
            else:
                total += (now - before if now >= before else now) / 1e3
        return total if all_tell else None

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
        """Return the keys of a line, given this node's ranks of the world, ascending, of which some may have ended."""
        line: dict[str, Any] = {}
        if self._gpus is not None and (devices := self._gpus.look(ranks)):
            line["devices"] = devices
        if self._host is not None:
            with suppress(Exception):  # a disk that is gone, a counter that the kernel lacks
                line["host"] = self._host.look()
        if self._energy is not None:
            line |= self._energy.look(ranks)
        return line


NO_INSTRUMENTS = Instruments(None, None, None)
"""Instruments of lines that only tell of ranks."""


BYTES_PER_DAY = 1e9
"""Most bytes that all nodes of a run together write in a day."""
DAY_S = 86_400.0
MOST_OWN = 16
"""A line has own seconds of at most so many steps: of every second, fourth, ... where there are more."""

Readings = Callable[[], Iterable[HeartbeatReading]]
"""Gives what the node's workers show now."""


class NodeMetrics:
    """Writes the lines of one node."""

    def __init__(self, path: Path, every_s: float, instruments: Instruments = NO_INSTRUMENTS):
        """`path`: of the node's lines (`lines_of_node`); `instruments` are asked for each line."""
        self._lines = JsonLines(path)
        self._every_s, self._instruments = every_s, instruments
        self._due_s = time.monotonic() + every_s
        self._before: dict[tuple[int, int], Counters] = {}
        self._wrote: dict[tuple[int, int], int] = {}
        self._own_until = -1
        self._generation = 0
        self._of_world: set[int] = set()
        self._ended: list[HeartbeatReading] = []

    @classmethod
    def of_run(cls, run: RunConfig, run_dir: Path, node: str) -> NodeMetrics:
        """Return the lines of a node of a run, with all that its machine can measure."""
        path = lines_of_node(run_dir, node)
        return cls(path, run.observe.ranks_every_s, Instruments.find(run, run_dir, path))

    def tend(self, readings: Readings, world_size: int) -> None:
        """Write a line on what `readings` gives, if one is due. Call it every second, or more often."""
        if time.monotonic() >= self._due_s:
            self.write(readings, world_size)
        else:
            self._instruments.poll(time.monotonic())

    def ended(self, reading: HeartbeatReading) -> None:
        """Keep what a worker showed last, which is gone: the next line of its world counts it."""
        self._ended.append(reading)

    def write(self, readings: Readings, world_size: int) -> None:
        """Write a line on these workers, of which those of the newest world count; none without any.

        world_size: ranks of that world on all nodes, by which the next line is put off. Whatever goes wrong (a full
        disk, say) costs the line and a warning, not the run.
        """
        began_s = time.monotonic()
        self._due_s = began_s + self._every_s
        try:
            line = self.line(readings())
            if line is not None:
                size, nodes = self._lines.write(line), world_size / len(line["ranks"])
                self._due_s = began_s + max(self._every_s, size * nodes * DAY_S / BYTES_PER_DAY)
        except Exception as problem:
            warnings.warn(f"{self._lines.path}: a line is lost ({problem})", ArgosyWarning, stacklevel=2)

    def line(self, readings: Iterable[HeartbeatReading]) -> dict[str, Any] | None:
        """Return the line on what was done since the last one; None while no worker is in a world."""
        known = [*readings, *self._ended]
        generation = max((reading.generation for reading in known), default=0)
        self._ended = [reading for reading in self._ended if reading.generation == generation]
        now = sorted((r for r in known if r.generation == generation > 0 and r.rank >= 0), key=lambda r: r.rank)
        if not now:
            return None
        if generation != self._generation:
            self._generation, self._before, self._wrote, self._own_until = generation, {}, {}, -1
            self._of_world = set()
        self._of_world |= {reading.rank for reading in now}
        return {
            "time_s": round(time.time(), 3),
            "generation": generation,
            "ranks": [reading.rank for reading in now],
            **self._steps(now),
            "memory_bytes": [reading.counted.memory_bytes or reading.peak_memory_bytes for reading in now],
            **self._checkpoints(now),
            **self._instruments.measure(sorted(self._of_world)),
        }

    def _steps(self, now: Sequence[HeartbeatReading]) -> dict[str, Any]:
        """Return what steps were made of; nothing until each of the ranks has ended one since."""
        done = [r.counted.since(self._before.get(_key(r), Counters())) for r in now]
        if any(each.steps <= 0 for each in done):
            return {}
        self._before = {_key(reading): reading.counted for reading in now}
        categories = sorted({name for each in done for name in each.seconds} - {"step"})
        channels = sorted(
            {(axis, tier) for each in done for axis, tiers in each.communication.items() for tier in tiers}
        )
        communication: dict[str, dict[str, Any]] = {}
        for axis, tier in channels:
            both = [(each.communication.get(axis, {}).get(tier, (0.0, 0)), each.steps) for each in done]
            communication.setdefault(axis, {})[tier] = {
                "seconds": [round(waited_s / steps, 6) for (waited_s, _), steps in both],
                "bytes": [round(sent / steps) for (_, sent), steps in both],
            }
        return {
            "steps": [min(each.first_step for each in done), max(each.last_step for each in done)],
            "step_s": [_mean(each, "step") for each in done],
            "seconds": {name: [_mean(each, name) for each in done] for name in categories},
            **self._own(now),
            **({"communication": communication} if communication else {}),
        }

    def _own(self, now: Sequence[HeartbeatReading]) -> dict[str, Any]:
        """Return the own seconds of all ranks in steps that all have ended, the same steps on all nodes, and from which
        of them on each rank ran how many microbatches; without that it is one."""
        common = set.intersection(*(set(reading.busy_s) for reading in now))
        fresh = sorted(step for step in common if step > self._own_until)
        if fresh:
            self._own_until = fresh[-1]
        fresh = thinned(fresh, MOST_OWN)
        microbatches: list[tuple[int, list[int]]] = []
        for step in fresh:
            many = [reading.microbatches.get(step, 1) for reading in now]
            if many != (microbatches[-1][1] if microbatches else [1] * len(now)):
                microbatches.append((step, many))
        own = [(step, [round(reading.busy_s[step], 6) for reading in now]) for step in fresh]
        return {"own": own, **({"microbatches": microbatches} if microbatches else {})}

    def _checkpoints(self, now: Sequence[HeartbeatReading]) -> dict[str, int]:
        wrote = {_key(reading): reading.counted.checkpoint_bytes for reading in now}
        fresh = sum(written - self._wrote.get(key, 0) for key, written in wrote.items())
        self._wrote = wrote
        return {"checkpoint_bytes": fresh} if fresh else {}


def lines_of_node(run_dir: Path, node: str) -> Path:
    """Return the file in which `node` of a run writes its lines."""
    return run_dir / "nodes" / f"{node}.jsonl"


def _key(reading: HeartbeatReading) -> tuple[int, int]:
    return reading.rank, reading.pid


def _mean(counted: Counters, category: str) -> float:
    return round(counted.seconds.get(category, 0.0) / counted.steps, 6)
