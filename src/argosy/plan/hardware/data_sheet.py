"""A device that the catalogue lacks, from the figures of its data sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import date

from argosy.errors import UserError
from argosy.plan.hardware.devices import DEVICE_FORMATS, GIB, Device, Efficiencies, PeakFlops, device_names

USABLE_MEMORY = 0.92
"""Share of the nominal memory that torch sees where nobody says: L4, L40S and A10G, whose ECC takes a part."""
MATMUL_EFFICIENCY = 0.75
"""Share of the specified rate that large matmuls reach where nobody measured: the catalogue has 0.51 to 0.95."""
LINK_GB_S, NIC_GB_S = 32.0, 3.125
"""PCIe 4.0 x16, and a share of an eighth in an adapter of 200 Gb/s, where nobody says."""


@dataclass(frozen=True)
class DataSheet:
    """The figures of a data sheet, in its units; what is None is assumed, and said to be. They are options of `argosy
    config device`. TFLOP/s are dense, with fp32 accumulation."""

    memory_gb: float
    """Memory, GB."""
    memory_gb_s: float
    """Memory bandwidth, GB/s."""
    bf16_tflops: float | None = None
    """Matmuls in bf16."""
    fp16_tflops: float | None = None
    """Matmuls in fp16."""
    tf32_tflops: float | None = None
    """Matmuls in tf32."""
    fp32_tflops: float | None = None
    """Arithmetic in fp32."""
    fp8_tflops: float | None = None
    """Matmuls in fp8."""
    fp4_tflops: float | None = None
    """Matmuls in fp4."""
    usable_gb: float | None = None
    """Memory that torch sees; default: 92 % of it."""
    efficiency: float | None = None
    """Share of the first rate that large matmuls reach; default: 0.75, and wider intervals."""
    link_gb_s: float | None = None
    """To the other devices of a node, one direction; default: PCIe 4.0 x16, 32, and wider intervals."""
    nic_gb_s: float | None = None
    """A device's share in the network, one direction; default: 3.125, 200 Gb/s for 8."""
    devices_per_node: int = 8
    """Devices of a node."""
    power_w: float | None = None
    """Power, W; without it, energy is not predicted."""
    compute_capability: float | None = None
    """NVIDIA's, such as 8.9; without it, no plan in fp8 is predicted."""

    @property
    def tflops(self) -> dict[str, float]:
        """Number format -> TFLOP/s, of those that are given."""
        rates = {fmt: getattr(self, f"{fmt}_tflops") for fmt in ("bf16", "fp16", *DEVICE_FORMATS)}
        return {fmt: rate for fmt, rate in rates.items() if rate is not None}

    def device(self, name: str) -> Device:
        """Return the device. Raises: UserError if `name` is in the catalogue, or a figure cannot be."""
        if name.lower() in device_names():
            raise UserError(f"{name}: the catalogue has it already, e.g. --cluster 8x{name}. Choose another name.")
        self._check()
        assumed = {
            "reserved_bytes": self.usable_gb,
            "matmul_efficiency": self.efficiency,
            "link_bytes_per_s": self.link_gb_s,
            "nic_bytes_per_s": self.nic_gb_s,
        }
        known = [key for key, value in assumed.items() if value is None]
        usable_gb = self.usable_gb or USABLE_MEMORY * self.memory_gb
        link_gb_s = self.link_gb_s or LINK_GB_S
        return Device(
            name=name,
            vendor="as its data sheet says",
            peak_flops_per_s=PeakFlops(**{fmt: value * 1e12 for fmt, value in self.tflops.items()}),
            matmul_efficiency=Efficiencies(**{next(iter(self.tflops)): self.efficiency or MATMUL_EFFICIENCY}),
            memory_bytes=self.memory_gb * GIB,
            reserved_bytes=round((self.memory_gb - usable_gb) * GIB),
            memory_bytes_per_s=self.memory_gb_s * 1e9,
            link_topology="PCIe 4.0 x16, assumed" if self.link_gb_s is None else "as its data sheet says",
            link_bytes_per_s=link_gb_s * 1e9,
            link_latency_s=5e-6,
            devices_per_node=self.devices_per_node,
            devices_per_host=self.devices_per_node,
            nic_bytes_per_s=(self.nic_gb_s or min(NIC_GB_S, link_gb_s)) * 1e9,
            nic_latency_s=8e-6,
            power_w=self.power_w,
            compute_capability=self.compute_capability,
            assumed=(*known, "link_latency_s", "nic_latency_s"),
            source=f"its data sheet, as given to `argosy config device` on {date.today()}",
        )

    def _check(self) -> None:
        """Raise UserError for a figure that cannot be, by the name of its option."""
        if not self.tflops:
            raise UserError("no matmul rate is given. Give the dense one, e.g. --bf16-tflops 165.2.")
        figures = {f.name: getattr(self, f.name) for f in fields(DataSheet) if getattr(self, f.name) is not None}
        for name, value in figures.items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"--{name.replace('_', '-')} {value}: must be a finite number above 0.")
        for name, most in (("usable_gb", self.memory_gb), ("efficiency", 1.0)):
            if figures.get(name, 0.0) > most:
                raise UserError(f"--{name.replace('_', '-')} {figures[name]}: must be at most {most:g}.")
