"""Logic nodes and memory generations with their published scaling: what a device of another technology could be.

The figures, each with its source, are in `technology.toml`. They are makers' statements about their own processes (chip
density at TSMC's mix of 50 % logic, 30 % SRAM and 20 % analog; power at one speed) and roadmaps of research institutes:
they say what was announced, not what a given design reaches.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, PositiveFloat, PositiveInt

from argosy.config.section import Section

TECHNOLOGY = Path(__file__).parent / "technology.toml"
RETICLE_MM2 = 858.0
"""The largest die that a lithography scanner exposes: 26 x 33 mm."""
WAFER_MM = 300.0
DEFECTS_PER_CM2 = 0.1
"""Defects that kill a die: TSMC's figure for N5 and N7 in volume (AnandTech 2020, recalled)."""
CLUSTERING = 3.0
"""Clustering of defects, in the negative binomial model of yield (Stapper 1983); 2 to 3 is usual."""

Keys = Annotated[tuple[str, ...], BeforeValidator(lambda keys: tuple(keys) if isinstance(keys, list) else keys)]


class LogicNode(Section):
    """A process for logic, relative to an earlier one."""

    name: str
    """Its maker's name."""
    nm: PositiveFloat
    """Nanometres that the name stands for: no length of anything."""
    of: str = ""
    """The node that the ratios are to."""
    density: PositiveFloat = 1.0
    """Devices on an area, over those of `of`."""
    power: PositiveFloat = 1.0
    """Power for the same work at the same speed, over that of `of`."""
    wafer_usd: PositiveFloat | None = None
    """Price of a processed wafer of 300 mm; none: nobody published one."""
    assumed: Keys = ()
    """Keys whose values nobody published."""
    source: str
    """Sources of the figures."""


class MemoryGeneration(Section):
    """One generation of device memory: a stack, or a chip where nothing is stacked."""

    name: str
    """Its standard."""
    gib: PositiveFloat
    """Capacity, GiB."""
    bytes_per_s: PositiveFloat
    """Bandwidth of its pins."""
    pj_per_bit: PositiveFloat
    """Energy of a bit that is read or written, pJ."""
    assumed: Keys = ()
    """Keys whose values nobody published."""
    source: str
    """Sources of the figures."""


class Silicon(Section):
    """A device's silicon, as its maker published it."""

    node: str
    """Logic node, as in `technology.toml`."""
    die_area_mm2: PositiveFloat | None = None
    """Area of one compute die; none: nobody published it."""
    dies: PositiveInt = 1
    """Compute dies of a device."""
    cache_bytes: PositiveFloat | None = None
    """Last-level cache of the device."""
    memory: str
    """Memory generation, as in `technology.toml`."""
    stacks: PositiveInt
    """Stacks, or chips, of it."""


@cache
def logic_nodes() -> dict[str, LogicNode]:
    """Return name -> node, the oldest first."""
    return {row["name"]: LogicNode(**row) for row in tomllib.loads(TECHNOLOGY.read_text())["logic"]}


@cache
def memory_generations() -> dict[str, MemoryGeneration]:
    """Return name -> generation, the slowest first."""
    return {row["name"]: MemoryGeneration(**row) for row in tomllib.loads(TECHNOLOGY.read_text())["memory"]}


@cache
def scaling(name: str) -> tuple[float, float]:
    """Return a node's density and power over those of the oldest: products of the ratios on the way there."""
    node = logic_nodes()[name]
    if not node.of:
        return 1.0, 1.0
    density, power = scaling(node.of)
    return density * node.density, power * node.power


def good_dies(area_mm2: float) -> float:
    """Return the dies of an area that a wafer yields.

    Dies on the wafer: pi r^2 / A - 2 pi r / sqrt(2 A), the usual estimate for those cut by the edge; of these
    (1 + A D / alpha)^-alpha work (Stapper 1983).
    """
    radius = WAFER_MM / 2
    whole = math.pi * radius**2 / area_mm2 - math.pi * 2 * radius / math.sqrt(2 * area_mm2)
    works = (1 + area_mm2 / 100 * DEFECTS_PER_CM2 / CLUSTERING) ** -CLUSTERING
    return max(0.0, whole) * works
