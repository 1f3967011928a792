"""The devices of a design space as columns: what each is made of, and the rates that the planner's formulas take.

With a logic node, a device is the base's design on other silicon: as many units as fit the dies' area beside the cache,
and no more than the power drives that memory leaves,

    FLOP/s = base x min(density x area, (power - memory's power) / (base's power - memory's) / power of the node)

with density and power of the node relative to the base's (`plan.hardware.technology`), memory's power the energy of a
bit times its bandwidth. What fits by area and needs less than the power draws less.

A cache of C bytes bounds the traffic of a matmul from below: multiplying with operands of e bytes reads at least one
byte for each sqrt(C/e)/e FLOPs, however it is blocked (Hong and Kung 1981), so that memory of B bytes/s feeds no more
than B sqrt(C/e)/e FLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.errors import UserError
from argosy.plan.cost.rates import Rates
from argosy.plan.design.space import DesignSpace
from argosy.plan.hardware.devices import DEVICE_FORMATS, GIB, Device, Format
from argosy.plan.hardware.technology import good_dies, logic_nodes, memory_generations, scaling

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
NETWORK = ("link_bytes_per_s", "link_latency_s", "devices_per_node", "nic_bytes_per_s", "price_usd_per_h")
"""The last keys of `DeviceSpace`, which no chip follows from; what is impossible is so on every network."""
BYTES: dict[Format, float] = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of an operand of a matmul, with its scales."""
IN_16_BITS: tuple[Format, ...] = ("bf16", "fp16", "fp32")
WIDER: dict[str, tuple[Format, ...]] = {
    "bf16": IN_16_BITS,
    "fp8": ("fp8", *IN_16_BITS),
    "fp4": ("fp4", "fp8", *IN_16_BITS),
}
"""Wanted number format -> formats to compute in, of which a device takes the first that it has."""
SRAM_CELL_UM2 = 0.021
"""An SRAM cell in N5 and N3E (TSMC, ISSCC 2020 and IEDM 2022, recalled): the least area of a cache."""
MEMORY_DRAWS_ALL = "memory alone draws the power that the device may"
OF_AREA = "the cache alone takes the area of the dies"


@dataclass(frozen=True)
class PointBlock:
    """Points that follow each other: every network of some chips.

    Figures of chips as a column and of networks as a row broadcast to (chips, networks). So what follows from chips
    alone is computed once for all networks.
    """

    rows: slice
    chips: Rows
    """A point of each chip: (chips, 1)."""
    networks: Rows
    """A point of each network: (1, networks)."""

    def flat(self, values: Any) -> Floats:
        """Return values that broadcast to (chips, networks) as those of `rows`."""
        return np.broadcast_to(values, (len(self.chips), self.networks.size)).reshape(-1)


@dataclass(frozen=True)
class Points:
    """Devices, as columns of one length."""

    base: Device
    axes: dict[str, tuple[Any, ...]]
    """Figure -> the values that were swept, in the order in which columns count through them (the last one fastest)."""
    flops_per_s: dict[Format, Floats]
    """Specified FLOP/s, by the formats that the devices have."""
    achieved: dict[Format, Floats]
    """Share of it that large matmuls reach."""
    memory_bytes: Floats
    memory_bytes_per_s: Floats
    link_bytes_per_s: Floats
    """Bandwidth of a link as specified; rings get the share of it that they get on the base."""
    link_latency_s: Floats
    node: Floats
    """Devices that the fast link joins."""
    nic_bytes_per_s: Floats
    power_w: Floats
    """Power that the device draws at full speed."""
    usd_per_h: Floats
    cache_bytes: Floats | None = None
    impossible: dict[str, int] = field(default_factory=dict)
    """Reason -> combinations that were left out for it."""
    chosen: NDArray[np.int64] = field(default_factory=lambda: np.arange(0))
    """Number of each point among all combinations."""

    def __len__(self) -> int:
        return len(self.power_w)

    @classmethod
    def of(cls, space: DesignSpace) -> Points:
        """Return the points of a space. Raises: UserError if no combination is a device."""
        return _Builder(space).points()

    @cached_property
    def places(self) -> dict[str, NDArray[np.int64]]:
        """Figure -> place of each point's value in `axes`."""
        shape = [len(values) for values in self.axes.values()] or [1]
        found = np.unravel_index(self.chosen, shape)
        return dict(zip(self.axes, found, strict=False))

    def values(self, row: int) -> dict[str, Any]:
        """Return figure -> value of a point, of the figures that are swept."""
        return {key: v[int(self.places[key][row])] for key, v in self.axes.items() if len(v) > 1}

    @cached_property
    def networks(self) -> int:
        """Points that follow each other with the same chips: those that differ in `NETWORK` alone."""
        return math.prod(len(self.axes[key]) for key in NETWORK if key in self.axes)

    def blocks(self, most: int) -> Iterator[PointBlock]:
        """Yield the points in blocks of about `most`."""
        n, networks = len(self), self.networks
        step = max(1, most // networks) * networks
        for start in range(0, n, step):
            stop = min(n, start + step)
            yield PointBlock(
                slice(start, stop), np.arange(start, stop, networks)[:, None], np.arange(networks)[None, :]
            )

    def rates(self, narrow: Format = "fp8", rows: Any = slice(None), networks: Any = None) -> Rates:
        """Return the points as the planner's rates; `narrow` is the format of its narrow matmuls, if they have it.

        networks: the points whose `NETWORK` to take; none: `rows`.
        """
        base = Rates.of_device(self.base, narrow)
        half = self.computed("bf16")
        small = self.computed(narrow)
        networks = rows if networks is None else networks
        ring = self.link_bytes_per_s[networks] * (self.base.ring_bytes_per_s / self.base.link_bytes_per_s)
        return replace(
            base,
            half=self.flops_per_s[half][rows],
            achieved_half=self.achieved[half][rows],
            narrow=self.flops_per_s[small][rows],
            achieved_narrow=self.achieved[small][rows],
            fp32=base.fp32 * self.flops_per_s[half][rows] / base.half,
            memory_bytes=self.memory_bytes[rows],
            memory_bytes_per_s=self.memory_bytes_per_s[rows],
            link_bytes_per_s=ring,
            link_latency_s=self.link_latency_s[networks],
            node=self.node[networks],
            nic_bytes_per_s=self.nic_bytes_per_s[networks],
        )

    def computed(self, wanted: str) -> Format:
        """Return the format in which the devices multiply what is wanted in one: the next wider one that they have."""
        return next((fmt for fmt in WIDER[wanted] if fmt in self.flops_per_s), next(iter(self.flops_per_s)))


class _Builder:
    """Makes the columns of one space."""

    def __init__(self, space: DesignSpace):
        self.space, self.base = space, space.device.device
        self.axes = space.device.axes
        shape = [len(values) for values in self.axes.values()]
        grids = np.indices(shape).reshape(len(shape), -1) if shape else np.zeros((0, 1), np.int64)
        self.places = dict(zip(self.axes, grids, strict=True))
        self.count = math.prod(shape)

    def given(self, key: str, usual: float) -> Floats:
        """Return a figure's column; `usual` where it is not given."""
        if key not in self.axes:
            return np.full(self.count, float(usual))
        return np.array(self.axes[key], float)[self.places[key]]

    def by_name(self, key: str, figure: dict[str, float], usual: float) -> Floats:
        """Return a figure of what a column names."""
        if key not in self.axes:
            return np.full(self.count, usual)
        return np.array([figure[name] for name in self.axes[key]])[self.places[key]]

    def points(self) -> Points:
        base, silicon = self.base, self.base.silicon
        memory = memory_generations()
        stacks = self.given("stacks", silicon.stacks if silicon else 1)
        rate = self.by_name("memory", {n: m.bytes_per_s for n, m in memory.items()}, base.memory_bytes_per_s)
        size = self.by_name("memory", {n: m.gib * GIB for n, m in memory.items()}, base.memory_bytes)
        by_stacks = stacks if "memory" in self.axes else np.ones(self.count)
        bandwidth = self.given("memory_bytes_per_s", 0.0) if "memory_bytes_per_s" in self.axes else rate * by_stacks
        capacity = self.given("memory_bytes", 0.0) if "memory_bytes" in self.axes else size * by_stacks
        cache = self.given("cache_bytes", (silicon and silicon.cache_bytes) or 0.0)
        scale, power, reasons = self._silicon(bandwidth, cache)
        flops: dict[Format, Floats] = {
            fmt: self._flops(fmt) * scale
            for fmt in DEVICE_FORMATS
            if fmt in base.formats or f"{fmt}_flops_per_s" in self.axes
        }
        achieved = {fmt: self._achieved(fmt, rates, bandwidth, cache) for fmt, rates in flops.items()}
        ok = np.ones(self.count, bool)
        impossible = {}
        for reason, wrong in reasons.items():
            if found := int((wrong & ok).sum()):
                impossible[reason] = found
            ok &= ~wrong
        if not ok.any():
            reason = max(impossible, key=lambda name: impossible[name])
            key = "power_w" if reason == MEMORY_DRAWS_ALL else "die_area_mm2"
            value = self.axes.get(key, ("the base's",))[-1]
            raise UserError(
                f"device.{key} = {value}: {reason}, in every one of the {self.count:,} combinations. Give a larger "
                f"{key}, or {'less or slower memory' if reason == MEMORY_DRAWS_ALL else 'a smaller cache'}."
            )
        return Points(
            base=base,
            axes=self.axes,
            flops_per_s={fmt: column[ok] for fmt, column in flops.items()},
            achieved={fmt: column[ok] for fmt, column in achieved.items()},
            memory_bytes=(capacity - base.reserved_bytes)[ok],
            memory_bytes_per_s=bandwidth[ok],
            link_bytes_per_s=self.given("link_bytes_per_s", base.link_bytes_per_s)[ok],
            link_latency_s=self.given("link_latency_s", base.link_latency_s)[ok],
            node=self.given("devices_per_node", base.devices_per_node)[ok],
            nic_bytes_per_s=self.given("nic_bytes_per_s", base.nic_bytes_per_s)[ok],
            power_w=power[ok],
            usd_per_h=self._usd_per_h(capacity)[ok],
            cache_bytes=cache[ok] if cache.any() else None,
            impossible=impossible,
            chosen=np.flatnonzero(ok),
        )

    def _flops(self, fmt: Format) -> Floats:
        peak = getattr(self.base.peak_flops_per_s, fmt)
        if fmt in ("fp16", "fp32", "tf32") and "bf16_flops_per_s" in self.axes and peak:
            return self.given("bf16_flops_per_s", 0.0) * (peak / self.base.peak("bf16"))
        return self.given(f"{fmt}_flops_per_s", peak or 0.0)

    def _achieved(self, fmt: Format, rates: Floats, bandwidth: Floats, cache: Floats) -> Floats:
        """Return the share of the specified rate that large matmuls reach, fed through the cache."""
        share = np.full(self.count, self.base.efficiency(fmt if fmt in self.base.formats else self.base.formats[-1]))
        fed = bandwidth * np.sqrt(cache / BYTES[fmt]) / BYTES[fmt]
        return np.where((cache > 0) & (fed < share * rates), fed / np.maximum(rates, 1.0), share)

    def _silicon(self, bandwidth: Floats, cache: Floats) -> tuple[Floats, Floats, dict[str, NDArray[np.bool_]]]:
        """Return FLOP/s over the base's, the power that is drawn, and where there can be no such device."""
        base, silicon = self.base, self.base.silicon
        usual = base.power_w or math.nan
        budget = self.given("power_w", usual)
        if "node" not in self.axes or silicon is None or silicon.die_area_mm2 is None:
            return np.ones(self.count), budget, {}
        nodes = logic_nodes()
        density_0, power_0 = scaling(silicon.node)
        density = self.by_name("node", {name: scaling(name)[0] / density_0 for name in nodes}, 1.0)
        energy = self.by_name("node", {name: scaling(name)[1] / power_0 for name in nodes}, 1.0)
        area = self.given("dies", silicon.dies) * self.given("die_area_mm2", silicon.die_area_mm2)
        own_area = silicon.dies * silicon.die_area_mm2 - _cells_mm2(np.array(silicon.cache_bytes or 0.0))
        logic = area - _cells_mm2(cache)
        pj = {name: one.pj_per_bit for name, one in memory_generations().items()}
        of_memory = bandwidth * 8e-12 * self.by_name("memory", pj, pj[silicon.memory])
        own_logic_w = usual - base.memory_bytes_per_s * 8e-12 * pj[silicon.memory]
        by_area = density * np.maximum(logic, 0.0) / own_area
        by_power = np.maximum(budget - of_memory, 0.0) / (own_logic_w * energy)
        scale = np.minimum(by_area, by_power)
        drawn = of_memory + scale * own_logic_w * energy
        return scale, drawn, {MEMORY_DRAWS_ALL: budget <= of_memory, OF_AREA: logic <= 0}

    def _usd_per_h(self, capacity: Floats) -> Floats:
        """Return the price of an hour: the base's, and what its silicon and memory change of it."""
        base, silicon, costs = self.base, self.base.silicon, self.space.costs
        own = base.price_usd_per_h if base.price_usd_per_h is not None else math.nan
        if "price_usd_per_h" in self.axes:
            return self.given("price_usd_per_h", own)
        more = np.zeros(self.count)
        if "node" in self.axes and silicon is not None and silicon.die_area_mm2 is not None:
            wafers = {name: node.wafer_usd or math.nan for name, node in logic_nodes().items()} | costs.wafer_usd
            dies, area = self.given("dies", silicon.dies), self.given("die_area_mm2", silicon.die_area_mm2)
            each = self.by_name("node", wafers, math.nan) / np.array([good_dies(float(mm2)) for mm2 in area])
            more = dies * each - silicon.dies * wafers[silicon.node] / good_dies(silicon.die_area_mm2)
        if costs.memory_usd_per_gib:
            more = more + costs.memory_usd_per_gib * (capacity - base.memory_bytes) / GIB
        return np.maximum(own + costs.markup * more / costs.lifetime_h, 0.0)


def _cells_mm2(cache_bytes: Floats) -> Floats:
    return np.asarray(8 * cache_bytes * SRAM_CELL_UM2 * 1e-6)
