"""Keys of the run file's table `sync` for parameter servers: asynchronous training, plan.sync = "async"."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from argosy.config.address import Address
from argosy.config.section import Section

SERVER = re.compile(r"^server-([1-9][0-9]{0,3})$")
"""Names of parameter servers, as `server_name` gives them."""
MOST_LOCAL_STEPS = 500
"""What a worker says of its steps is one message."""


class ServerConfig(Section):
    """The parameter servers of a run, and how old the weights may be that a gradient was computed with."""

    servers: tuple[Address, ...] = ()
    """async: HOST:PORT of each parameter server; empty: `shards` of them on this machine, if one command starts all."""
    shards: Annotated[int, Field(ge=1, le=1000)] = 1
    """async: servers over which parameters and optimizer state are dealt out, if `servers` names none."""
    max_staleness: NonNegativeInt = 16
    """async: the most updates that others may make between the weights that a gradient was computed with and its own
    update; a worker waits for its next samples while they could become more. 0: workers take turns."""
    staleness_rate: Literal["inverse", "constant"] = "inverse"
    """async: the learning rate of a gradient of staleness s > 1: divided by s, or as it is; with local_steps, the outer
    learning rate: divided by s + 1, or as it is."""
    local_steps: Annotated[int, Field(ge=1, le=MOST_LOCAL_STEPS)] = 1
    """async: steps that a worker makes alone, with the run's optimizer, between two pushes; it pushes how far its
    weights have come then, and the servers make outer steps. 1: it pushes gradients, and servers have the optimizer."""

    @property
    def server_count(self) -> int:
        """The number of parameter servers."""
        return len(self.servers) or self.shards


def server_name(number: int) -> str:
    """Return the name of parameter server `number`, from 0, where `--site` says which part of the run is meant."""
    return f"server-{number + 1}"


def server_number(site: str) -> int | None:
    """Return the number, from 0, of the parameter server that is called `site`; None if it is the name of no server."""
    found = SERVER.match(site)
    return int(found.group(1)) - 1 if found else None
