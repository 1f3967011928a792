"""The catalogue of devices: what one accelerator can do, draws and costs, with where each figure is from.

One TOML file a device in `config/presets/devices`; a path to a file of the same keys adds one. Rates are those of the
specification, dense; how much of them a large matmul gets is `matmul_efficiency`. What nobody has published stands in
`assumed`: a prediction that rests on it deserves a wider interval.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from argosy.config.catalog import near_names, preset_names, preset_path
from argosy.config.layers import Source, table_layer
from argosy.config.lines import read_toml
from argosy.config.load import build
from argosy.config.schema import Fraction, Section
from argosy.errors import UserError

Format = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]
"""Number format of a matmul's inputs."""
FORMATS: tuple[Format, ...] = get_args(Format)

LINK_EFFICIENCY = 0.8
"""Ring collectives over the specified link rate where nobody measured: H200 0.81, B200 0.76, A100 0.76, V100 0.90."""
NODE_POWER_RATIO = 1.8
"""A node's nameplate over that of its devices where none is given: DGX H100 1.82, DGX B200 1.79, DGX A100 2.03."""

Names = Annotated[tuple[str, ...], BeforeValidator(lambda names: tuple(names) if isinstance(names, list) else names)]


class PeakFlops(Section):
    """FLOP/s of dense matmuls, by the specification; what is left out the device cannot do, or nobody says."""

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
    """What the best large matmul reaches of the specified rate, measured (or `assumed`)."""

    fp32: Fraction | None = None
    """Of PeakFlops.fp32."""
    tf32: Fraction | None = None
    """Of PeakFlops.tf32."""
    fp16: Fraction | None = None
    """Of PeakFlops.fp16."""
    bf16: Fraction | None = None
    """Of PeakFlops.bf16."""
    fp8: Fraction | None = None
    """Of PeakFlops.fp8."""
    fp4: Fraction | None = None
    """Of PeakFlops.fp4."""


class Device(Section):
    """One accelerator, or one core of a CPU: what a rank runs on."""

    name: str
    """As the catalogue calls it."""
    aliases: Names = ()
    """Other names of it, in lower case."""
    vendor: str
    """Who makes it."""
    kind: Literal["accelerator", "cpu"] = "accelerator"
    """cpu: processes share its cores and memory, and what the host does takes its time from computing."""
    peak_flops_per_s: PeakFlops
    matmul_efficiency: Efficiencies
    memory_bytes: PositiveFloat
    """Device memory, nominal."""
    reserved_bytes: NonNegativeFloat = 0.0
    """What the driver keeps of it: memory_bytes less this is what PyTorch calls the total capacity."""
    memory_bytes_per_s: PositiveFloat
    """Bandwidth of that memory, by the specification."""
    link_topology: str
    """What joins the devices of a node."""
    link_bytes_per_s: PositiveFloat
    """Of one device to the others of its node, one direction, by the specification."""
    link_latency_s: PositiveFloat
    """Of a message between two devices of a node."""
    ring_busbw_bytes_per_s: PositiveFloat | None = None
    """Measured bus bandwidth of a large ring all-reduce in a whole node."""
    nvls_busbw_bytes_per_s: PositiveFloat | None = None
    """Measured bus bandwidth of a large all-reduce that the switch sums (NVLS, SHARP); none: it does not."""
    nvls_min_devices: PositiveInt | None = None
    """The switch sums for groups of so many devices or more."""
    nvls_min_bytes: PositiveFloat | None = None
    """The switch sums messages of this size or more."""
    devices_per_node: PositiveInt
    """Devices that the fast link joins: of a machine, or of an NVLink domain or torus of many machines."""
    devices_per_host: PositiveInt
    """Devices of one machine."""
    nic_bytes_per_s: PositiveFloat
    """Typical share of one device in its machine's network, one direction."""
    nic_latency_s: PositiveFloat
    """Of a message between two nodes."""
    host_link_bytes_per_s: PositiveFloat = 32e9
    """To its host's memory, one direction, by the specification; left out: PCIe 4.0 x16."""
    host_memory_bytes_per_s: PositiveFloat = 50e9
    """Share of one device in that memory's bandwidth; left out: 8 devices on 16 channels of DDR4-3200."""
    power_w: PositiveFloat | None = None
    """Specified power of the device."""
    node_power_w: PositiveFloat | None = None
    """Nameplate of a node over its devices; none: 1.8 times power_w."""
    price_usd_per_h: PositiveFloat | None = None
    """Typical price to rent one: the median where one is published, else the geometric mean of the range."""
    price_low_usd_per_h: PositiveFloat | None = None
    """Lower end of the range."""
    price_high_usd_per_h: PositiveFloat | None = None
    """Upper end of the range."""
    price_date: str = ""
    """When those prices held."""
    mtbf_h: PositiveFloat
    """Hours of one device between failures that stop a job, all causes (its share of node and network included)."""
    assumed: Names = ()
    """Keys whose values nobody published for this device."""
    source: str
    """Where the figures are from."""

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
            raise ValueError("peak_flops_per_s is empty; say at least one rate, e.g. bf16 = 989e12")
        if not self.matmul_efficiency.model_dump(exclude_none=True):
            raise ValueError("matmul_efficiency is empty; say at least one, e.g. bf16 = 0.8")
        return self

    @property
    def formats(self) -> tuple[Format, ...]:
        """Number formats that it has matmuls for."""
        return tuple(number_format for number_format in FORMATS if getattr(self.peak_flops_per_s, number_format))

    @property
    def usable_bytes(self) -> float:
        """Memory that programs can have."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def ring_bytes_per_s(self) -> float:
        """Bandwidth that a large ring collective gets from the node's link: measured, or 0.8 of the specified."""
        return self.ring_busbw_bytes_per_s or LINK_EFFICIENCY * self.link_bytes_per_s

    @property
    def nameplate_w(self) -> float | None:
        """Its share of a node's nameplate power; None if nobody published any power."""
        return self.node_power_w or (self.power_w and NODE_POWER_RATIO * self.power_w)

    def peak(self, number_format: Format) -> float:
        """Specified FLOP/s. Raises: UserError if it has no such matmuls."""
        rate: float | None = getattr(self.peak_flops_per_s, number_format)
        if rate is None:
            raise UserError(f"device {self.name} has no {number_format} matmuls. Try {' or '.join(self.formats)}.")
        return rate

    def efficiency(self, number_format: Format) -> float:
        """What a large matmul reaches of `peak`; where unknown, as in the nearest format that is known.

        Raises: UserError if it has no such matmuls.
        """
        self.peak(number_format)
        known: dict[str, float] = self.matmul_efficiency.model_dump(exclude_none=True)
        alike = (number_format, *_ALIKE[number_format])
        return next(known[other] for other in alike if other in known)

    def matmul_flops_per_s(self, number_format: Format) -> float:
        """What a large matmul reaches, FLOP/s. Raises: UserError if it has no such matmuls."""
        return self.peak(number_format) * self.efficiency(number_format)

    @property
    def best_flops_per_s(self) -> float:
        """What a large matmul reaches in 16 bits, or in fp32 (or what it has) where there are no 16-bit ones."""
        order: tuple[Format, ...] = ("bf16", "fp16", "fp32", *self.formats)
        return self.matmul_flops_per_s(next(fmt for fmt in order if fmt in self.formats))

    @classmethod
    def load(cls, path: Path) -> Self:
        """The device of a file. Raises: UserError that names every wrong key, with its line."""
        table, lines = read_toml(path)
        return cls.of_table(table, Source(str(path), lines))

    @classmethod
    def of_table(cls, table: Mapping[str, Any], source: Source) -> Self:
        """The device that a table describes; `source` is who wrote it. Raises: UserError."""
        return build(cls, table_layer(table, cls, source))


_ALIKE: dict[Format, tuple[Format, ...]] = {
    "fp32": ("tf32", "bf16", "fp16", "fp8", "fp4"),
    "tf32": ("bf16", "fp16", "fp32", "fp8", "fp4"),
    "fp16": ("bf16", "tf32", "fp8", "fp32", "fp4"),
    "bf16": ("fp16", "tf32", "fp8", "fp32", "fp4"),
    "fp8": ("fp4", "bf16", "fp16", "tf32", "fp32"),
    "fp4": ("fp8", "bf16", "fp16", "tf32", "fp32"),
}


def find_device(name: str) -> Device:
    """The device of that name or alias (in any case), or of the TOML file at that path.

    Raises: UserError if there is none, with the names that are near; it never falls back on another device.
    """
    if is_path(name):
        return Device.load(Path(name).expanduser())
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    names = device_names()
    if plain not in names:
        choices = sorted(names) if get_close_matches(plain, names) else preset_names("devices")
        raise UserError(
            f"no device is called {name!r}; {near_names(plain, choices)} Or give the path of a device's .toml file."
        )
    return _preset(names[plain])


def is_path(name: str) -> bool:
    """Whether a user who writes `name` means a file."""
    return name.endswith(".toml") or "/" in name


@cache
def device_names() -> dict[str, str]:
    """Every name and alias of the catalogue -> the name of its preset."""
    names = {name: name for name in preset_names("devices")}
    for preset in list(names):
        table = tomllib.loads(preset_path("devices", preset).read_text())
        names |= dict.fromkeys(table.get("aliases", ()), preset)
    return names


@cache
def _preset(name: str) -> Device:
    return Device.load(preset_path("devices", name))
