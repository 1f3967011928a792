"""The catalogue of devices: the speed, power and price of each, with the source of each figure.

Each device has a TOML file in `config/presets/devices`; `argosy config device` writes one from a data sheet. Rates are
dense, with fp32 accumulation, and specified; `matmul_efficiency` is the share of them that a large matmul reaches.
`assumed` names figures that nobody has published: a prediction that rests on them deserves a wider interval.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from argosy.config.layers import Source, preset_names, preset_path, table_layer
from argosy.config.lines import read_toml
from argosy.config.load import build
from argosy.config.optimizer import Fraction
from argosy.config.section import Section
from argosy.errors import UserError, near_names
from argosy.files import expanded
from argosy.plan.hardware.technology import Keys, Silicon
from argosy.plan.plan import FP8, why_not_in_fp8

Format = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
"""Number format of a matmul's inputs."""
DEVICE_FORMATS: tuple[Format, ...] = get_args(Format)

LINK_EFFICIENCY = 0.8
"""Ring collectives over the specified link rate where nobody measured: H200 0.81, B200 0.76, A100 0.76, V100 0.90."""
NODE_POWER_RATIO = 1.8
"""A node's nameplate power over its devices' where none is given: DGX H100 1.82, DGX B200 1.79, DGX A100 2.03."""


class FigureBounds(NamedTuple):
    """The least and the most that a figure of a device may be, and what to give."""

    least: float
    most: float
    unit: str


MOST_BYTES_PER_S = 1.1e15
"""Bandwidths: at most 16 stacks of the fastest memory on any roadmap (HBM8, 64 TB/s each: KAIST TERALAB 2025)."""
FIGURE_BOUNDS = {
    "flops_per_s": FigureBounds(1e11, 1e18, "FLOP/s (989 TFLOP/s are 989e12)"),  # less: TFLOP/s; more: a cluster's
    "memory_bytes": FigureBounds(1e9, 1e14, "bytes (80 GiB are 85_899_345_920)"),
    "memory_bytes_per_s": FigureBounds(1e10, MOST_BYTES_PER_S, "bytes/s (3.35 TB/s are 3.35e12)"),
}
FLOPS_PER_JOULE = 1e14
"""More than ten times what B200 has in fp4: above are kilowatts that were taken for watts."""
MOST_OF_A_LINK = {"ring_busbw_bytes_per_s": 1.0, "nvls_busbw_bytes_per_s": 2.0}
"""Bus bandwidth over that of the link: a ring sends all of it; where the switch sums, half is sent by it."""


class PeakFlops(Section):
    """FLOP/s of dense matmuls, from the specification. A format is left out if the device lacks it or nobody says."""

    fp32: PositiveFloat | None = None
    """Single precision in full."""
    tf32: PositiveFloat | None = None
    """Single precision with inputs rounded to TF32."""
    fp16: PositiveFloat | None = None
    """Half precision."""
    bf16: PositiveFloat | None = None
    """bfloat16."""
    fp8: PositiveFloat | None = None
    """8-bit floats."""
    fp4: PositiveFloat | None = None
    """4-bit floats with block scales."""


class Efficiencies(Section):
    """Share of the specified rate that the best large matmul reaches, measured (or `assumed`)."""

    fp32: Fraction | None = None
    """Share of PeakFlops.fp32."""
    tf32: Fraction | None = None
    """Share of PeakFlops.tf32."""
    fp16: Fraction | None = None
    """Share of PeakFlops.fp16."""
    bf16: Fraction | None = None
    """Share of PeakFlops.bf16."""
    fp8: Fraction | None = None
    """Share of PeakFlops.fp8."""
    fp4: Fraction | None = None
    """Share of PeakFlops.fp4."""


class Device(Section):
    """One accelerator, or one core of a CPU: what a rank runs on."""

    name: str
    """Name in the catalogue."""
    aliases: Keys = ()
    """Other names, in lower case."""
    vendor: str
    """Maker."""
    kind: Literal["accelerator", "cpu"] = "accelerator"
    """accelerator, or cpu: processes share its cores and memory, and the host's work takes time from computing."""
    peak_flops_per_s: PeakFlops
    matmul_efficiency: Efficiencies
    compute_capability: PositiveFloat | None = None
    """NVIDIA's number of what its kernels can use (9.0: Hopper); none: another maker's, or nobody said."""
    memory_bytes: PositiveFloat
    """Device memory, nominal."""
    reserved_bytes: NonNegativeFloat = 0.0
    """Memory that the driver keeps: memory_bytes less this is what PyTorch calls the total capacity."""
    memory_bytes_per_s: PositiveFloat
    """Bandwidth of that memory, from the specification."""
    link_topology: str
    """Name of the link that joins the devices of a node."""
    link_bytes_per_s: PositiveFloat
    """Bandwidth from one device to the others of its node, one direction, from the specification."""
    link_latency_s: PositiveFloat
    """Latency of a message between two devices of a node."""
    ring_busbw_bytes_per_s: PositiveFloat | None = None
    """Measured bus bandwidth of a large ring all-reduce in a whole node."""
    nvls_busbw_bytes_per_s: PositiveFloat | None = None
    """Measured bus bandwidth of a large all-reduce that the switch sums (NVLS, SHARP); none: it does not sum."""
    nvls_min_devices: PositiveInt | None = None
    """The switch sums for groups of at least so many devices."""
    nvls_min_bytes: PositiveFloat | None = None
    """The switch sums messages of at least this size."""
    devices_per_node: PositiveInt
    """Devices that the fast link joins: those of a machine, or of an NVLink domain or torus of many machines."""
    devices_per_host: PositiveInt
    """Devices of one machine."""
    nic_bytes_per_s: PositiveFloat
    """Typical share of one device in its machine's network bandwidth, one direction."""
    nic_latency_s: PositiveFloat
    """Latency of a message between two nodes."""
    host_link_bytes_per_s: PositiveFloat = 32e9
    """Bandwidth to the host's memory, one direction, from the specification; default: PCIe 4.0 x16."""
    host_memory_bytes_per_s: PositiveFloat = 50e9
    """Share of one device in the bandwidth of the host's memory; default: 8 devices on 16 channels of DDR4-3200."""
    host_memory_bytes: PositiveFloat | None = None
    """Share of one device in the host's memory, for state that is offloaded; none: nobody said, and all is taken to
    fit."""
    power_w: PositiveFloat | None = None
    """Specified power of the device."""
    node_power_w: PositiveFloat | None = None
    """Nameplate power of a node divided by its devices; none: 1.8 times power_w."""
    price_usd_per_h: PositiveFloat | None = None
    """Typical price to rent one: the median if one is published, else the geometric mean of the range."""
    price_low_usd_per_h: PositiveFloat | None = None
    """Lower end of the range."""
    price_high_usd_per_h: PositiveFloat | None = None
    """Upper end of the range."""
    price_date: str = ""
    """Date of those prices."""
    silicon: Silicon | None = None
    """The device's silicon, for designs that start from it; none: its maker published too little."""
    mtbf_h: PositiveFloat | None = None
    """Hours of one device between failures that stop a job, from any cause (its share of node and network included), as
    you know it; none: the catalogue of failures (`plan.cost.reliability`)."""
    never_run: bool = False
    """True if no run on it, ours or published, has ever been compared with predictions for it."""
    assumed: Keys = ()
    """Keys whose values nobody published for this device."""
    source: str
    """Sources of the figures."""

    @model_validator(mode="after")
    def _prices_in_order(self) -> Self:
        prices = (self.price_low_usd_per_h, self.price_usd_per_h, self.price_high_usd_per_h)
        given = [price for price in prices if price is not None]
        if len(given) not in (0, 3) or given != sorted(given):
            raise ValueError(
                "price_usd_per_h needs all three: price_low_usd_per_h <= price_usd_per_h <= price_high_usd_per_h"
            )
        return self

    @model_validator(mode="after")
    def _has_rates(self) -> Self:
        if not self.formats:
            raise ValueError("peak_flops_per_s is empty; give at least one rate, e.g. bf16 = 989e12")
        if not self.matmul_efficiency.model_dump(exclude_none=True):
            raise ValueError("matmul_efficiency is empty; give at least one, e.g. bf16 = 0.8")
        return self

    @model_validator(mode="after")
    def _is_physical(self) -> Self:
        """Refuse what no device can be: mostly figures in another unit."""
        if self.kind == "cpu":
            return self
        for key, rate in ((f"peak_flops_per_s.{fmt}", self.peak(fmt)) for fmt in self.formats):
            check_figure(key, rate, FIGURE_BOUNDS["flops_per_s"])
            check_power(key, rate, self.power_w)
        for key in ("memory_bytes", "memory_bytes_per_s"):
            check_figure(key, getattr(self, key), FIGURE_BOUNDS[key])
        for key in ("link_bytes_per_s", "nic_bytes_per_s"):
            check_sent(key, getattr(self, key), self.memory_bytes_per_s)
        for key in ("ring_busbw_bytes_per_s", "nvls_busbw_bytes_per_s"):
            measured = getattr(self, key)
            if measured and measured > MOST_OF_A_LINK[key] * self.link_bytes_per_s:
                raise ValueError(
                    f"{key} = {measured:g} is {100 * measured / self.link_bytes_per_s:.0f} % of link_bytes_per_s = "
                    f"{self.link_bytes_per_s:g}, over its {100 * MOST_OF_A_LINK[key]:.0f} %. Give bytes/s, one way"
                )
        return self

    @property
    def formats(self) -> tuple[Format, ...]:
        """Number formats that the device has matmuls for."""
        return tuple(number_format for number_format in DEVICE_FORMATS if getattr(self.peak_flops_per_s, number_format))

    @property
    def caveats(self) -> tuple[str, ...]:
        """The basis of predictions for the device, in words."""
        unproven = f"Nobody has compared a run on {self.name} with predictions for it: they rest on its data sheet."
        missing = f"These figures of {self.name} are assumed, as nobody has published them: {', '.join(self.assumed)}."
        return (*([unproven] if self.never_run else []), *([missing] if self.assumed else []))

    @property
    def usable_bytes(self) -> float:
        """Memory that is left for programs."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth that a large ring collective gets from the node's link: measured, or 0.8 of the specified one."""
        return self.ring_busbw_bytes_per_s or LINK_EFFICIENCY * self.link_bytes_per_s

    @property
    def nameplate_w(self) -> float | None:
        """The device's share of a node's nameplate power; None if nobody published a power."""
        return self.node_power_w or (self.power_w and NODE_POWER_RATIO * self.power_w)

    def peak(self, number_format: Format) -> float:
        """Return the specified FLOP/s. Raises: UserError if the device has no such matmuls."""
        rate: float | None = getattr(self.peak_flops_per_s, number_format)
        if rate is None:
            raise UserError(f"device {self.name} has no {number_format} matmuls. Try {' or '.join(self.formats)}.")
        return rate

    def efficiency(self, number_format: Format) -> float:
        """Return the share of `peak` that a large matmul reaches; if unknown, that of the nearest format that is known.

        Raises: UserError if the device has no such matmuls.
        """
        self.peak(number_format)
        known: dict[str, float] = self.matmul_efficiency.model_dump(exclude_none=True)
        alike = (number_format, *_ALIKE[number_format])
        return next(known[other] for other in alike if other in known)

    def matmul_flops_per_s(self, number_format: Format) -> float:
        """Return the FLOP/s that a large matmul reaches. Raises: UserError if the device has no such matmuls."""
        return self.peak(number_format) * self.efficiency(number_format)

    @property
    def best_flops_per_s(self) -> float:
        """FLOP/s that a large matmul reaches in 16 bits, or else in fp32, or else in the device's formats."""
        order: tuple[Format, ...] = ("bf16", "fp16", "fp32", *self.formats)
        return self.matmul_flops_per_s(next(fmt for fmt in order if fmt in self.formats))

    def why_not_in(self, precision: str, has_experts: bool) -> str | None:
        """Explain why it cannot train in a plan's precision; return None if it can, as fp32 always."""
        others = " or ".join(known for known in ("bf16", "fp16", "fp32") if known in self.formats)
        if precision in FP8:
            able = divmod(round(10 * (self.compute_capability or 0)), 10)
            of_amd = self.vendor == "AMD" and "fp8" in self.formats
            who = self.name if any(able) or of_amd else f"{self.name}, whose description has no compute_capability"
            if (why := why_not_in_fp8(precision, able, of_amd, has_experts, who, others)) is not None:
                return why
        matmuls = "fp8" if precision in FP8 else precision
        if matmuls == "fp32" or matmuls in self.formats:
            return None
        return f"plan.precision = {precision}: {self.name} has no {matmuls} matmuls. Try precision={others}."

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a device from a file. Raises: UserError that names every wrong key, with its line."""
        table, lines = read_toml(path)
        return cls.of_table(table, Source(str(path), lines))

    @classmethod
    def of_table(cls, table: Mapping[str, Any], source: Source) -> Self:
        """Make a device from a table; `source` names its origin in errors. Raises: UserError."""
        return build(cls, table_layer(table, cls, source))


def check_figure(key: str, value: float, bounds: FigureBounds) -> None:
    """Raise ValueError if a figure lies outside of its bounds."""
    if not bounds.least <= value <= bounds.most:
        raise ValueError(f"{key} = {value:g} lies outside of {bounds.least:g} to {bounds.most:g}. Give {bounds.unit}")


def check_power(key: str, flops_per_s: float, power_w: float | None) -> None:
    """Raise ValueError if a device does more FLOPs for a joule than any; no power: nobody said."""
    if power_w and flops_per_s / power_w > FLOPS_PER_JOULE:
        raise ValueError(
            f"{key} = {flops_per_s:g} at power_w = {power_w:g} are {flops_per_s / power_w:g} FLOPs for a joule, and no "
            f"device has {FLOPS_PER_JOULE:g}. Give FLOP/s and watts"
        )


def check_sent(key: str, sent: float, memory_bytes_per_s: float) -> None:
    """Raise ValueError if a device sends more bytes a second than its memory gives."""
    if sent > memory_bytes_per_s:
        raise ValueError(
            f"{key} = {sent:g} is {100 * sent / memory_bytes_per_s:.0f} % of the memory's {memory_bytes_per_s:g} "
            "bytes/s, which all that it sends comes from. Give bytes/s, not bits/s, one way"
        )


_ALIKE: dict[Format, tuple[Format, ...]] = {
    "fp32": ("tf32", "bf16", "fp16", "fp8", "fp4"),
    "tf32": ("bf16", "fp16", "fp32", "fp8", "fp4"),
    "fp16": ("bf16", "tf32", "fp8", "fp32", "fp4"),
    "bf16": ("fp16", "tf32", "fp8", "fp32", "fp4"),
    "fp8": ("fp4", "bf16", "fp16", "tf32", "fp32"),
    "fp4": ("fp8", "bf16", "fp16", "tf32", "fp32"),
}


def find_device(name: str) -> Device:
    """Return the device with this name or alias (in any case, with or without hyphens), or read it from this file.

    Raises: UserError with similar names if there is none; another device is never taken instead.
    """
    if is_path(name):
        return Device.load(expanded(name))
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    likely_first = sorted(preset_names("devices"), key=lambda preset: not preset.startswith(plain[:3]))
    found = next(
        (p for p in likely_first if plain.replace("-", "") in {n.replace("-", "") for n in _names_of(p)}), None
    )
    if found is None:
        names = device_names()
        choices = sorted(names) if get_close_matches(plain, names) else preset_names("devices")
        raise UserError(
            f"no device is called {name!r}; {near_names(plain, choices)} Or write its data sheet's figures to a file "
            "with `argosy config device`, and give the path of that."
        )
    return _preset(found)


def is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


def device_names() -> dict[str, str]:
    """Return every name and alias of the catalogue -> the name of its preset."""
    return {name: preset for preset in preset_names("devices") for name in _names_of(preset)}


@cache
def _names_of(preset: str) -> tuple[str, ...]:
    return (preset, *tomllib.loads(preset_path("devices", preset).read_text()).get("aliases", ()))


@cache
def _preset(name: str) -> Device:
    return Device.load(preset_path("devices", name))


GIB = 2**30
