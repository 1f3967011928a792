"""The run file's table `sync`: details of how replicas agree; which way they take is a word of the plan, `sync`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from argosy.config.section import Section


class SyncConfig(Section):
    """How replicas sum their gradients if the plan's word `sync` is not exact."""

    block: Annotated[int, Field(ge=16, le=65536, multiple_of=16)] = 256
    """int8, int4, sign: numbers that share one fp32 scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """int8, int4: round to the nearest level, or up or down at random so that the mean is exact."""
    error_feedback: bool = True
    """Add what was not sent to the next step's gradients; bf16 sends all but rounding and has none."""
    min_elements: NonNegativeInt = 4096
    """Parameters with fewer numbers are summed exactly, as are norms, biases and routers of any size."""
    exact_steps: NonNegativeInt = 0
    """First steps of the run in which all sums are exact."""
