"""A design space, as a file says it: a device's figures, each one value or a list to sweep, and the work to do on it.

Everything is checked when it is read: a figure that no device can have, most often one in another unit, is refused with
file, line, key, value and remedy.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from argosy.config.load import build_file
from argosy.config.section import Section
from argosy.errors import UserError
from argosy.plan.cost.inference import BYTES_OF_WEIGHT, CACHES
from argosy.plan.hardware.clusters import settle_device
from argosy.plan.hardware.devices import (
    FIGURE_BOUNDS,
    MOST_BYTES_PER_S,
    Device,
    FigureBounds,
    check_figure,
    check_power,
    check_sent,
    find_device,
)
from argosy.plan.hardware.technology import RETICLE_MM2, logic_nodes, memory_generations

MOST_DESIGN_POINTS = 2_000_000


def _listed(value: Any) -> Any:
    if value == []:
        raise ValueError("the list is empty. Give at least one value, or leave the key out")
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Values = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_listed)]
Sizes = Annotated[tuple[PositiveInt, ...], BeforeValidator(_listed)]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]
RATES = ("bf16_flops_per_s", "fp8_flops_per_s", "fp4_flops_per_s")
VALUE_BOUNDS = {
    **dict.fromkeys(RATES, FIGURE_BOUNDS["flops_per_s"]),
    **{key: FIGURE_BOUNDS[key] for key in ("memory_bytes", "memory_bytes_per_s")},
    "link_bytes_per_s": FigureBounds(1e9, MOST_BYTES_PER_S, "bytes/s, one way (450 GB/s are 450e9)"),
    "nic_bytes_per_s": FigureBounds(1e8, MOST_BYTES_PER_S, "bytes/s, one way (400 Gb/s are 50e9)"),
    "link_latency_s": FigureBounds(1e-8, 1e-2, "seconds (2 microseconds are 2e-6)"),
    "power_w": FigureBounds(10.0, 2e5, "watts"),
    "die_area_mm2": FigureBounds(
        10.0, RETICLE_MM2, "mm2 of one die; a scanner exposes 26 x 33 mm, so more area takes more dies"
    ),
    "cache_bytes": FigureBounds(1e5, 1e12, "bytes (50 MB are 50e6)"),
}
"""Bounds of each key: those of any device, and of figures that only a space is checked for."""


class DeviceSpace(Section):
    """A device's figures, each one value or several; what is left out is the base's."""

    base: str
    """A device of the catalogue, or the path of a device's file."""
    node: Words = ()
    """Logic nodes, as N5 or A14: FLOP/s are then what dies of the base's design hold and their power drives."""
    die_area_mm2: Values = ()
    """Area of one compute die."""
    dies: Sizes = ()
    """Compute dies of a device."""
    cache_bytes: Values = ()
    """Last-level cache."""
    power_w: Values = ()
    """Power of the device: with a node, the most that it may draw."""
    bf16_flops_per_s: Values = ()
    """FLOP/s of dense bf16 matmuls, in place of a node."""
    fp8_flops_per_s: Values = ()
    """The same of fp8."""
    fp4_flops_per_s: Values = ()
    """The same of fp4."""
    memory: Words = ()
    """Memory generations, as HBM4: bandwidth and capacity of `stacks` of them."""
    stacks: Sizes = ()
    """Stacks of memory."""
    memory_bytes: Values = ()
    """Capacity, in place of that of a generation."""
    memory_bytes_per_s: Values = ()
    """Bandwidth, in place of that of a generation."""
    link_bytes_per_s: Values = ()
    """Bandwidth to the other devices of a node or domain, one way."""
    link_latency_s: Values = ()
    """Latency of a message between two of them."""
    devices_per_node: Sizes = ()
    """Devices that the fast link joins."""
    nic_bytes_per_s: Values = ()
    """Share in the network outside, one way, after oversubscription."""
    price_usd_per_h: Values = ()
    """Price of an hour, in place of the base's and what its silicon changes."""

    @field_validator("base")
    @classmethod
    def _is_a_device(cls, name: str) -> str:
        try:
            find_device(name)
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return name

    @field_validator("node", "memory")
    @classmethod
    def _known(cls, names: tuple[str, ...], info: Any) -> tuple[str, ...]:
        known = logic_nodes() if info.field_name == "node" else memory_generations()
        if wrong := [name for name in names if name not in known]:
            raise ValueError(f"{wrong[0]!r} is not known; there are {', '.join(known)}")
        return names

    @model_validator(mode="after")
    def _in_their_units(self) -> Self:
        for key, bounds in VALUE_BOUNDS.items():
            for value in getattr(self, key):
                check_figure(key, value, bounds)
        for key in ("link_bytes_per_s", "nic_bytes_per_s"):
            fastest = max(self.memory_bytes_per_s, default=self._most_bytes_per_s) or self.device.memory_bytes_per_s
            check_sent(key, max(getattr(self, key), default=0.0), fastest)
        asked, most = max(self.memory_bytes_per_s, default=0.0), self._most_bytes_per_s
        if self.memory and asked > most:
            raise ValueError(
                f"memory_bytes_per_s = {asked:g} is {100 * asked / most:.0f} % of what {max(self.stacks)} stacks of "
                f"{self.memory[-1]} give, {most:g} bytes/s. Give bytes/s, more stacks, or a faster memory"
            )
        return self

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        explicit = [key for key in RATES if getattr(self, key)]
        if self.node and explicit:
            raise ValueError(f"{explicit[0]} says what node does too. Leave one of them out")
        if self.bf16_flops_per_s and "bf16" not in self.device.formats:
            raise ValueError(
                f"bf16_flops_per_s = {self.bf16_flops_per_s[0]:g}: {self.device.name} has no bf16 matmuls. "
                'Leave it out, or give a base that has them, e.g. base = "a100"'
            )
        if bool(self.memory) != bool(self.stacks):
            key, other = ("memory", "stacks") if self.memory else ("stacks", "memory")
            raise ValueError(f"{key} needs {other}: how much memory of which generation. Add device.{other}")
        needs_node = [key for key in ("die_area_mm2", "dies") if getattr(self, key)]
        if needs_node and not self.node:
            raise ValueError(f'{needs_node[0]} says nothing without a logic node. Add e.g. device.node = "N5"')
        for rate in (value for key in explicit for value in getattr(self, key)):
            check_power(explicit[0], rate, min(self.power_w, default=self.device.power_w or 0.0))
        return self

    @property
    def device(self) -> Device:
        """The base."""
        return find_device(self.base)

    @property
    def _most_bytes_per_s(self) -> float:
        known = memory_generations()
        return max((known[name].bytes_per_s for name in self.memory), default=0.0) * max(self.stacks, default=0)

    @property
    def axes(self) -> dict[str, tuple[Any, ...]]:
        """Key -> values, of the figures that are given, in the order of the keys."""
        keys = [key for key in type(self).model_fields if key != "base"]
        return {key: getattr(self, key) for key in keys if getattr(self, key)}


class TrainSpace(Section):
    """The training to do on each device."""

    model: str
    """A model preset."""
    devices: PositiveInt
    """Devices that train together."""
    global_batch: PositiveInt
    """Sequences in a step."""
    seq_len: PositiveInt
    """Tokens of a sequence."""
    tokens: PositiveFloat
    """Tokens to train on."""
    precision: Annotated[tuple[Literal["bf16", "fp8", "fp4"], ...], BeforeValidator(_listed)] = ("bf16",)
    """Number formats of matmuls to choose from; those that a device lacks are left out, for 16 bits if it has none."""


class ServeSpace(Section):
    """The serving to do on each device."""

    model: str
    """A model preset."""
    prompt: PositiveInt = 2048
    """Tokens of a prompt."""
    output: PositiveInt = 512
    """Tokens of an answer."""
    tp: Sizes = (1, 2, 4, 8)
    """Devices of a replica to choose from."""
    sequences: Sizes = (1, 4, 16, 64, 256)
    """Requests of a replica at a time to choose from."""
    weights: Words = ("bf16",)
    """Number formats of weights to choose from."""
    kv_cache: str = "16"
    """Bits of the cache's numbers: 16 or fp8."""
    engine: str = ""
    """Engine and release; none: the mean of all."""
    tpot_ms: PositiveFloat | None = None
    """Most milliseconds between two tokens of a request."""
    ttft_ms: PositiveFloat | None = None
    """Most milliseconds to its first."""
    objective: Literal["throughput", "latency"] = "throughput"
    """The objective by which the way to serve is chosen, within those limits."""

    @model_validator(mode="after")
    def _known_formats(self) -> Self:
        for key, known in (("weights", BYTES_OF_WEIGHT), ("kv_cache", CACHES)):
            given = getattr(self, key)
            for word in given if isinstance(given, tuple) else (given,):
                if word not in known:
                    raise ValueError(f"{key} = {word!r} is not known. Try {', '.join(known)}")
        return self


class CostSpace(Section):
    """Prices that turn silicon and power into money and energy."""

    pue: Annotated[float, Field(ge=1)] = 1.2
    """Power of the building over power of the computers."""
    wafer_usd: dict[str, PositiveFloat] = {}
    """Node -> price of a wafer, for nodes whose price nobody published."""
    memory_usd_per_gib: PositiveFloat | None = None
    """Price of memory; none: what changes of it changes no price."""
    markup: PositiveFloat = 4.0
    """Price of silicon over its cost: NVIDIA's gross margin in fiscal 2025 was 75 %."""
    lifetime_h: PositiveFloat = 35_040.0
    """Hours that pay for a device; assumed: four years."""


class SpeedupSpace(Section):
    """Two devices of the catalogue to compare: what of the speed-up comes from where."""

    before: str
    """The device before."""
    after: str
    """The device after."""
    before_batch: PositiveInt | None = None
    """Global batch on the one before; none: train.global_batch."""
    after_batch: PositiveInt | None = None
    """Global batch on the one after; none: train.global_batch."""

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if self.before == self.after:
            raise ValueError(f"after = {self.after!r} is the device before. Name another one")
        return self


class DesignSpace(Section):
    """A space of devices and the work that they are compared by."""

    name: str = "design"
    """Name, for people."""
    device: DeviceSpace
    train: TrainSpace | None = None
    serve: ServeSpace | None = None
    costs: CostSpace = CostSpace()
    speedup: SpeedupSpace | None = None
    along: Words = ()
    """Figures to show bottlenecks along, as node or memory; none: all that have several values."""

    @model_validator(mode="after")
    def _has_work(self) -> Self:
        if self.train is None and self.serve is None:
            raise ValueError("device has no work to do. Add [train], [serve] or both")
        if self.speedup is not None and self.serve is not None:
            stored = [word for word in self.serve.weights if f"{word}_flops_per_s" not in RATES]
            if stored:
                raise ValueError(
                    f"serve.weights = {stored[0]!r}: a speed-up is told for matmuls in bf16, fp8 and fp4. Give these"
                )
        axes = self.device.axes
        if (points := math.prod(map(len, axes.values()))) > MOST_DESIGN_POINTS:
            raise ValueError(f"device has {points:,} points, more than {MOST_DESIGN_POINTS:,}. Give fewer values")
        if wrong := [key for key in self.along if len(axes.get(key, ())) < 2]:
            swept = [key for key, values in axes.items() if len(values) > 1]
            raise ValueError(f"along = {wrong[0]!r}: is not swept. Try {', '.join(swept) or 'a list of values'}")
        base = self.device.device
        known = base.silicon
        if self.device.node and (known is None or known.die_area_mm2 is None or base.power_w is None):
            raise ValueError(
                f"device.node needs a base whose die area, node and power are published, and {base.name} has no "
                '[silicon] with die_area_mm2. Try base = "h100", "a100" or "h200", or give bf16_flops_per_s'
            )
        if self.device.node and not self.device.price_usd_per_h:
            nodes, given = logic_nodes(), self.costs.wafer_usd
            without = [name for name in self.device.node if nodes[name].wafer_usd is None and name not in given]
            if without:
                raise ValueError(
                    f"costs.wafer_usd lacks {without[0]}: nobody published the price of a wafer. Add costs.wafer_usd."
                    f"{without[0]}, as you estimate it, or device.price_usd_per_h"
                )
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a space from a file. Raises: UserError that names every wrong key, with its line."""
        folder = path.absolute().parent

        def settle(table: dict[str, Any]) -> None:
            for section, key in (("device", "base"), ("speedup", "before"), ("speedup", "after")):
                settle_device(table.get(section), key, folder)

        return build_file(cls, path, settle)
