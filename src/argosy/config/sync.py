"""The run file's table `sync`: details of how replicas agree; which way they take is a word of the plan, `sync`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from argosy.config.servers import ServerConfig
from argosy.config.sites import OuterConfig, SiteLaunch


class SyncConfig(OuterConfig, ServerConfig):
    """How replicas sum their gradients if the plan's word `sync` is not exact."""

    block: Annotated[int, Field(ge=16, le=65536, multiple_of=16)] = 256
    """int8, int4, sign: numbers that share one fp32 scale."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """int8, int4: round to the nearest level, or up or down at random so that the mean is exact."""
    error_feedback: bool = True
    """Add what was not sent to the next step's gradients; bf16 sends all but rounding and has none."""
    rank: PositiveInt = 4
    """powersgd: columns of the two thin matrices that each matrix is sent as."""
    warm_start: bool = True
    """powersgd: begin with the last step's matrices; without, with random ones."""
    density: Annotated[float, Field(gt=0.0, le=0.5)] = 0.01
    """topk: share of the numbers that is sent."""
    density_steps: NonNegativeInt = 0
    """topk: steps in which that share falls from a quarter to `density`, by the same factor in each."""
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """sign: what a replica sends is this much of its last momentum and for the rest its gradient; 0: the gradient."""
    min_elements: NonNegativeInt = 4096
    """Parameters with fewer numbers are summed exactly, as are norms, biases and routers of any size."""
    exact_steps: NonNegativeInt = 0
    """First steps of the run in which all sums are exact."""
    server_launch: tuple[SiteLaunch, ...] = ()
    """async: how `argosy launch` starts each parameter server, in the order of `servers`, in the words of sites.launch;
    a single table is for all of them."""
