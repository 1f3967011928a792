"""A device that the catalogue lacks, from the figures of its data sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from argosy.errors import UserError
from argosy.plan.hardware.devices import Device, Efficiencies, PeakFlops, device_names

GIB = 2**30
USABLE = 0.92
"""Share of the nominal memory that torch sees where nobody says: L4, L40S and A10G, whose ECC takes a part."""
MATMUL_EFFICIENCY = 0.75
"""Share of the specified rate that large matmuls reach where nobody measured: the catalogue's measured ones have 0.51
to 0.95, and a median of 0.79."""
LINK_GB_S, NIC_GB_S = 32.0, 3.125
"""PCIe 4.0 x16, and a share of an eighth in an adapter of 200 Gb/s, where nobody says."""
MTBF_H = 29_538.0
"""Hours of one A100 between failures of a job in RSC-1 (Kokolis et al. 2024)."""


@dataclass(frozen=True)
class DataSheet:
    """The figures of a data sheet, in its units; what is None is assumed, and said to be."""

    tflops: Mapping[str, float]
    """Number format -> TFLOP/s of dense matmuls, fp32 accumulation."""
    memory_gb: float
    """Nominal memory, GiB (data sheets call it GB)."""
    memory_gb_s: float
    """Bandwidth of that memory, GB/s."""
    usable_gb: float | None = None
    """Memory that torch sees, GiB."""
    efficiency: float | None = None
    """Share of the first of `tflops` that large matmuls reach."""
    link_gb_s: float | None = None
    """Bandwidth to the other devices of a node, one direction, GB/s."""
    nic_gb_s: float | None = None
    """Share in the node's network bandwidth, one direction, GB/s."""
    devices_per_node: int = 8
    """Devices of a node."""
    power_w: float | None = None
    """Power, W."""

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
        usable_gb = self.usable_gb or USABLE * self.memory_gb
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
            mtbf_h=MTBF_H,
            assumed=(*known, "link_latency_s", "nic_latency_s", "mtbf_h"),
            source=f"its data sheet, as given to `argosy config device` on {date.today()}",
        )

    def _check(self) -> None:
        """Raise UserError for a figure that cannot be, by the name of its option."""
        if not self.tflops:
            raise UserError("no matmul rate is given. Give the dense one, e.g. --bf16-tflops 165.2.")
        figures = {f"{fmt}_tflops": rate for fmt, rate in self.tflops.items()}
        figures |= {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        for name, value in figures.items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"--{name.replace('_', '-')} {value}: must be a finite number above 0.")
        for name, most in (("usable_gb", self.memory_gb), ("efficiency", 1.0)):
            if figures.get(name, 0.0) > most:
                raise UserError(f"--{name.replace('_', '-')} {figures[name]}: must be at most {most:g}.")
