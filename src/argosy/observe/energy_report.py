"""The energy, carbon and money of a whole run, measured (or estimated) beside what was predicted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from argosy.config.observe import EnergyConfig
from argosy.observe.events import from_the_end
from argosy.observe.instruments import watts_per_device
from argosy.plan.cost.economy import price_per_device_h, whole_run
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.goodput import Goodput
from argosy.plan.hardware.clusters import Cluster

JOULES_PER_KWH = 3.6e6
UNSEEN = 0.05
"""If more than this share of the time of the steps is in no line of a node, it is estimated."""


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
    steps_s: float
    """Time of all its steps."""
    devices: int
    """Ranks at its end."""


def energy_of_run(
    run_dir: Path, settings: EnergyConfig, machine: Cluster | None, so_far: RunSoFar, predicted_step_s: Estimate | None
) -> Energy | None:
    """Return what the run took; None if nothing was measured and the catalogue does not know its devices.

    machine: what the run's devices are by its description or the catalogue. predicted_step_s: None without a
    prediction.
    """
    machine = machine and _as_set(machine, settings)
    joules, device_s, sources = _told(run_dir)
    unseen_s = so_far.steps_s * so_far.devices - device_s
    if unseen_s > UNSEEN * so_far.steps_s * so_far.devices:  # it began before there were such lines, or was very short
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
    price = _price(machine, settings)
    kwh = joules / JOULES_PER_KWH
    made = Costs(kwh=kwh, co2_kg=kwh * pue * grid, money=None if price is None else price * device_s / 3600)
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


def _as_set(machine: Cluster, settings: EnergyConfig) -> Cluster:
    """Return the machine with what the run file says of energy in place of what it has."""
    given = {
        key: value
        for key in ("pue", "grid_kg_per_kwh", "price_per_device_h")
        if (value := getattr(settings, key)) is not None
    }
    if "price_per_device_h" in given:
        given["currency"] = settings.currency
    return machine.model_copy(update=given)


def _price(machine: Cluster | None, settings: EnergyConfig) -> float | None:
    known = machine and price_per_device_h(machine)
    return float(known.mid) if known else settings.price_per_device_h


def _predicted(machine: Cluster | None, so_far: RunSoFar, step_s: Estimate | None) -> Costs | None:
    if machine is None or step_s is None:
        return None
    nothing = Estimate.exactly(0.0)
    whole = whole_run(
        machine,
        step_s,
        Goodput(nothing, nothing, 0.0, 0.0, overhead=nothing, effective=Estimate.exactly(1.0)),
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
    last = list(_last_lines(run_dir))
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
    return joules, device_s, sources


def _last_lines(run_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((run_dir / "nodes").glob("*.jsonl")):
        for line in from_the_end(path):
            if {"total_joules", "total_device_s"} <= (line.get("energy") or {}).keys():
                yield line
                break


def _rounded(costs: Costs, per: int = 1) -> Costs:
    """Return the costs in five figures: nothing here is known better."""
    each = {key: None if value is None else float(f"{value / per:.5g}") for key, value in _plain(costs).items()}
    return Costs(**each)


def _plain(costs: Costs) -> dict[str, float | None]:
    return {"kwh": costs.kwh, "co2_kg": costs.co2_kg, "money": costs.money}


def _figures(costs: Costs, currency: str, marked: str = "") -> str:
    words = [] if costs.kwh is None else [f"{costs.kwh:.3g} kWh{marked}"]
    if costs.co2_kg is not None:
        words.append(f"{costs.co2_kg:.3g} kg CO2" if costs.co2_kg >= 0.1 else f"{1000 * costs.co2_kg:.3g} g CO2")
    if costs.money is not None:
        words.append(f"{costs.money:.2g} {currency}" if costs.money < 1 else f"{costs.money:,.2f} {currency}")
    return ", ".join(words)
