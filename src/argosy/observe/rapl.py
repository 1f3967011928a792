"""The energy of CPUs and their memory, as the kernel's powercap tree tells it (RAPL, also on AMD's processors).

Reading it needs the rights of root on most systems: the counters are so fine that they tell secrets of other programs
(CVE-2020-8694, "Platypus"). What is written down of them is whole joules, a few seconds apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
