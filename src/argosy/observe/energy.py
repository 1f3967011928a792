"""The energy of a node while it trains; and energy, carbon and money of a whole run beside what was predicted.

Energy is measured where hardware tells, else estimated and marked so. "nvml": what the GPUs of its ranks took, and its
CPUs if they tell as well. "rapl": what all its CPUs took, from the kernel's powercap tree (also on AMD's processors).
"estimate": the catalogue's power of a device with its share of the node, times what training draws of it
(`plan.cost.economy.DRAW`), times the time. The building (PUE) is in none of them.

Reading powercap needs the rights of root on most systems: the counters are so fine that they tell secrets of other
programs (CVE-2020-8694, "Platypus"). What is written down of them is whole joules, a few seconds apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from argosy.config.observe import EnergyConfig
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError
from argosy.observe.events import from_the_end
from argosy.plan.cost.economy import Goodput, power_per_device_w, price_per_device_h, whole_run
from argosy.plan.cost.estimate import Estimate
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import DetectedHardware, machine_at_hand

POWERCAP = Path("/sys/class/powercap")
ADDED_DOMAINS = ("package", "dram")
"""Domains that add up: a package holds its cores; memory stands beside it. `psys` would count both once more."""


@dataclass
class _Domain:
    counter: Path
    range_uj: int
    """After so many microjoules the counter begins at 0 again."""
    before_uj: int | None
    """None: it could not be read."""


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
                if (folder / "name").read_text().strip().partition("-")[0] not in ADDED_DOMAINS:
                    continue
                counter = folder / "energy_uj"
                domains.append(_Domain(counter, _number(folder / "max_energy_range_uj"), _number(counter)))
            except (OSError, ValueError):
                return None  # a part would pass for the whole
        return cls(domains) if domains else None

    def joules(self) -> float | None:
        """Return the energy since the last call; None if a counter cannot be read.

        Nor is it known of one that could not be read at the last call: that time was estimated, and would count twice.
        A counter that is smaller than before has begun again: once, if it is asked in time. At 300 W those of most
        packages do so every quarter of an hour.
        """
        total_uj, all_tell = 0, True
        for domain in self._domains:
            try:
                now_uj = _number(domain.counter)
            except (OSError, ValueError):
                now_uj = None
            before_uj, domain.before_uj = domain.before_uj, now_uj
            if now_uj is None or before_uj is None:
                all_tell = False
            else:
                total_uj += now_uj - before_uj + (domain.range_uj if now_uj < before_uj else 0)
        return total_uj / 1e6 if all_tell else None


def _number(path: Path) -> int:
    return int(path.read_text())


COUNTER_READ_S = 60.0
"""Counters are read at least so often, since they begin at 0 again."""


class GpuEnergy(Protocol):
    """The energy counters of a node's GPUs."""

    def joules(self, count: int) -> float | None:
        """Return the energy that the first `count` GPUs have taken since the last call; None if one does not tell."""


class EnergyMeter:
    """Adds up the energy of one node, over all lines and starts of a run."""

    def __init__(
        self,
        gpus: GpuEnergy | None,
        cpus: Rapl | None,
        watts_of_device: Callable[[], float | None],
        totals: tuple[float, float, float] = (0.0, 0.0, 0.0),
    ):
        """watts_of_device: the catalogue's power for a rank's device; None if it is unknown. totals: joules and
        device-seconds of the lines before, and how many of these were estimated."""
        self._gpus, self._cpus, self._watts_of_device = gpus, cpus, watts_of_device
        self._total_j, self._total_device_s, self._estimated_s = totals
        self._fresh_j, self._source = 0.0, "estimate"
        self._ranks, self._then_s = 0, time.monotonic()

    def poll(self, now_s: float) -> None:
        """Read the counters if that is due; `now_s` is of time.monotonic."""
        if now_s - self._then_s >= COUNTER_READ_S:
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
        if self._estimated_s:
            totals["total_estimated_s"] = round(self._estimated_s, 1)
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
            self._estimated_s += 0.0 if watts is None else past_s * self._ranks
            self._fresh_j += (watts or 0.0) * self._ranks * past_s


def totals_of(path: Path) -> tuple[float, float, float]:
    """Return joules and device-seconds of all lines that a node has written so far, and how many of these were
    estimated, from the last that tells."""
    energy = _last_line(path).get("energy", {})
    joules, device_s, estimated_s = (
        float(energy.get(key, 0)) for key in ("total_joules", "total_device_s", "total_estimated_s")
    )
    return joules, device_s, estimated_s


class CataloguePower:
    """The catalogue's power of a rank's device, once the run has written down which devices it found."""

    def __init__(self, run: RunConfig, run_dir: Path):
        self._run, self._run_dir, self._since_s = run, run_dir, time.time()
        self._known: float | None = None

    def __call__(self) -> float | None:
        """Return watts, without the building's share; None as long as the devices are unknown, or their power."""
        if self._known is not None:
            return self._known
        events = from_the_end(self._run_dir / "events" / "rank-0.jsonl")
        start = next((event for event in events if event.get("event") == "start"), {"time_s": 0.0})
        machine = machine_started_on(self._run, start.get("hardware"))
        watts = None if machine is None else watts_per_device(machine)
        if start["time_s"] >= self._since_s:  # else of the worlds before, which may have had other devices
            self._known = watts
        return watts


def watts_per_device(machine: Cluster) -> float | None:
    """Return the power of a device in training with its share of the node; None if the catalogue lacks it."""
    power = power_per_device_w(machine)
    return None if power is None else float(power.mid) / machine.pue


def machine_started_on(run: RunConfig, hardware: Any) -> Cluster | None:
    """Return the cluster that a run's money and power are counted for: launch.cluster, else the catalogue's devices,
    at the prices of the run file.

    hardware: of a `start` event. None: it is of another version, or the cluster's file is elsewhere.
    """
    try:
        machine = machine_at_hand(run, DetectedHardware(**hardware))
        return machine and priced(machine, run.observe.energy)
    except (ArgosyError, ValueError, TypeError, OSError):
        return None


JOULES_PER_KWH = 3.6e6
UNSEEN = 0.05
"""If more than this share of the time of the steps is in no line of a node, it is estimated. If more than this share
of a node's time was, so is the whole."""


class Costs(BaseModel):
    """Costs of a run, or of a token of it."""

    model_config = ConfigDict(frozen=True)

    kwh: float | None
    """Energy of the computers."""
    co2_kg: float | None
    """CO2 of that energy and of the building's share."""
    money: float | None
    """Price of the devices for as long as they were held; None if nobody knows it."""


class Energy(Costs):
    """The costs of a run, over all its starts, beside the predicted ones."""

    source: str
    """nvml: GPUs, and CPUs where they tell. rapl: CPUs and memory. estimate: at least in part by the catalogue."""
    currency: str
    pue: float
    grid_kg_per_kwh: float
    per_token: Costs
    predicted: Costs | None
    """The costs of the steps alone, by the predicted time of a step and the catalogue's power."""
    predicted_per_token: Costs | None

    def in_words(self) -> str:
        marked = " (an estimate)" if self.source == "estimate" else f" ({self.source})"
        words = f"energy: {_figures(self, self.currency, marked)}"
        if self.predicted is not None:
            words += f"; predicted {_figures(self.predicted, self.currency)}"
        return words


@dataclass(frozen=True)
class RunSoFar:
    """The figures of a run that its costs depend on."""

    tokens: int
    steps: float
    """Its steps, counted in steps with the whole batch."""
    device_s: float
    """Time of all its steps, times the ranks that each had."""
    devices: int
    """Ranks at its end."""
    money: float | None = None
    """Price of the devices for as long as they were held; None if nobody knows it."""


def energy_of_run(
    run_dir: Path, settings: EnergyConfig, machine: Cluster | None, so_far: RunSoFar, predicted_step_s: Estimate | None
) -> Energy | None:
    """Return what the run took; None if nothing was measured and the catalogue does not know its devices.

    machine: what the run's devices are by its description or the catalogue. predicted_step_s: None without a
    prediction.
    """
    machine = machine and priced(machine, settings)
    joules, device_s, sources = _told(run_dir)
    unseen_s = so_far.device_s - device_s
    if unseen_s > UNSEEN * so_far.device_s:  # it began before there were such lines, or was very short
        watts = None if machine is None else watts_per_device(machine)
        if watts is None:
            return None
        joules, device_s, sources = joules + watts * unseen_s, device_s + unseen_s, sources | {"estimate"}
    if not sources:
        return None
    defaults = Cluster.model_fields
    pue = machine.pue if machine else settings.pue or defaults["pue"].default
    grid = machine.grid_kg_per_kwh if machine else settings.grid_kg_per_kwh
    grid = defaults["grid_kg_per_kwh"].default if grid is None else grid
    kwh = joules / JOULES_PER_KWH
    made = Costs(kwh=kwh, co2_kg=kwh * pue * grid, money=so_far.money)
    predicted = _predicted(machine, so_far, predicted_step_s)
    return Energy(
        **_rounded(made).model_dump(),
        source="estimate" if "estimate" in sources else min(sources),
        currency=machine.currency if machine else settings.currency,
        pue=pue,
        grid_kg_per_kwh=grid,
        per_token=_rounded(made, so_far.tokens),
        predicted=predicted and _rounded(predicted),
        predicted_per_token=predicted and _rounded(predicted, so_far.tokens),
    )


def priced(machine: Cluster, settings: EnergyConfig) -> Cluster:
    """Return the machine with what the run file says of energy in place of what it has."""
    given = {
        key: value
        for key in ("pue", "grid_kg_per_kwh", "price_per_device_h")
        if (value := getattr(settings, key)) is not None
    }
    if "price_per_device_h" in given:
        given["currency"] = settings.currency
    return machine.model_copy(update=given)


def price_of(machine: Cluster | None, settings: EnergyConfig) -> tuple[float, str] | None:
    """Return the price of an hour of a device of the run, and its currency; None if nobody knows it."""
    if settings.price_per_device_h is not None:
        return settings.price_per_device_h, settings.currency
    known = machine and price_per_device_h(machine)
    return (float(known.mid), machine.currency) if machine and known else None


def _predicted(machine: Cluster | None, so_far: RunSoFar, step_s: Estimate | None) -> Costs | None:
    if machine is None or step_s is None:
        return None
    nothing = Estimate.exactly(0.0)
    whole = whole_run(
        machine,
        step_s,
        Goodput(nothing, nothing, nothing, 0.0, overhead=nothing, effective=Estimate.exactly(1.0)),
        tokens=so_far.tokens,
        tokens_per_step=so_far.tokens / so_far.steps,
        devices=so_far.devices,
    )
    return Costs(
        kwh=whole.energy_kwh and float(whole.energy_kwh.mid) / machine.pue,
        co2_kg=whole.co2_kg and float(whole.co2_kg.mid),
        money=whole.money and float(whole.money.mid),
    )


def _told(run_dir: Path) -> tuple[float, float, set[str]]:
    """Return joules, device-seconds and sources of all nodes.

    A node of the newest world is counted up to now, at its mean power: its last line is some seconds old.
    """
    last = [line for path in sorted((run_dir / "nodes").glob("*.jsonl")) if (line := _last_line(path))]
    newest = max((line.get("generation", 0) for line in last), default=0)
    joules, device_s = 0.0, 0.0
    sources: set[str] = set()
    for line in last:
        energy, ranks = line["energy"], len(line.get("ranks", ()))
        of_node_j, of_node_s = float(energy["total_joules"]), float(energy["total_device_s"])
        if line.get("generation") == newest and of_node_s:
            since_s = max(0.0, time.time() - float(line["time_s"])) * ranks
            of_node_j, of_node_s = of_node_j * (1 + since_s / of_node_s), of_node_s + since_s
        joules, device_s, sources = joules + of_node_j, device_s + of_node_s, sources | {str(energy["source"])}
        if float(energy.get("total_estimated_s", 0)) > UNSEEN * of_node_s:
            sources |= {"estimate"}
    return joules, device_s, sources


def _last_line(path: Path) -> dict[str, Any]:
    """Return the last line of a node with its totals; empty without one."""
    totals = {"total_joules", "total_device_s"}
    return next((line for line in from_the_end(path) if totals <= (line.get("energy") or {}).keys()), {})


def _rounded(costs: Costs, per: int = 1) -> Costs:
    """Return the costs in five figures: nothing here is known better."""
    each = {key: None if value is None else float(f"{value / per:.5g}") for key, value in costs.model_dump().items()}
    return Costs(**each)


def _figures(costs: Costs, currency: str, marked: str = "") -> str:
    words = []
    if costs.kwh is not None:
        words.append((f"{costs.kwh:.3g} kWh" if costs.kwh >= 0.1 else f"{1000 * costs.kwh:.3g} Wh") + marked)
    if costs.co2_kg is not None:
        words.append(f"{costs.co2_kg:.3g} kg CO2" if costs.co2_kg >= 0.1 else f"{1000 * costs.co2_kg:.3g} g CO2")
    if costs.money is not None:
        words.append(f"{costs.money:.2g} {currency}" if costs.money < 1 else f"{costs.money:,.2f} {currency}")
    return ", ".join(words)
