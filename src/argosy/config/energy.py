"""The run file's table `observe.energy`: what energy is worth where the run is."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from argosy.config.section import Section


class EnergyConfig(Section):
    """What energy, carbon and devices cost where the run is; for its report, beside what was measured."""

    grid_kg_per_kwh: NonNegativeFloat | None = None
    """CO2 of a kWh of the electricity, kg; none: that of `launch.cluster`, or the world's average."""
    pue: Annotated[float, Field(ge=1)] | None = None
    """Power of the building over that of the computers; none: that of `launch.cluster`, or 1.2."""
    price_per_device_h: PositiveFloat | None = None
    """Price of an hour of one device (on CPUs: of a process); none: that of `launch.cluster`, or the catalogue's."""
    currency: str = "USD"
    """Currency of price_per_device_h."""
