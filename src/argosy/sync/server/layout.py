"""What all processes of an asynchronous run know of it: who there is, and which server holds which parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod

from argosy.config.identity import lasting_values
from argosy.config.launch import host_and_port
from argosy.config.schema import RunConfig
from argosy.config.sync import server_number
from argosy.plan.parameters import parameter_table
from argosy.sync.sites.wire import Flat, WireFormat

OF_A_PART = ("site", "sites", "sync", "train.steps")
"""Keys that may differ between the parts of a run, or that servers check otherwise."""
AGAIN = "--again"
"""The word of the command that starts a server in place of one that died."""


def is_server(run: RunConfig) -> bool:
    """Return True if this part of the run is a parameter server."""
    return bool(run.sites) and server_number(run.site) is not None


class ServerLayout:
    """The servers and workers of a run."""

    def __init__(self, run: RunConfig):
        self.run = run

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of all workers."""
        return tuple(site.name for site in self.run.sites)

    @property
    def servers(self) -> int:
        """The number of servers."""
        return self.run.sync.server_count

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each server."""
        return tuple(map(host_and_port, self.run.sync.servers))

    @property
    def local_steps(self) -> int:
        """Steps that an update is made from: those of one item."""
        return self.run.sync.local_steps

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return self.run.train.steps // self.local_steps

    def step_of(self, version: int) -> int:
        """Return how many steps are done with a version of the weights."""
        return version * self.local_steps

    def version_of(self, step: int) -> int:
        """Return the version of the weights of a checkpoint of that step."""
        return step // self.local_steps

    @property
    def item_samples(self) -> int:
        """Samples of an item."""
        return self.local_steps * self.run.train.global_batch

    def samples(self, item: int) -> list[list[int]]:
        """Return the run's samples of an item, as lines have them: [[first, end]]."""
        return [[item * self.item_samples, (item + 1) * self.item_samples]]

    @cached_property
    def wire(self) -> WireFormat:
        """The number format in which gradients travel."""
        return WireFormat(self.run.sync.wire)

    @cached_property
    def flats(self) -> Sequence[Flat]:
        """The parameters of each server as one vector, under any plan of the workers."""
        shapes = {name: parameter.shape for name, parameter in parameter_table(self.run.model).items()}
        return dealt_out(shapes, self.servers)

    @property
    def model(self) -> str:
        """Sixteen hexadecimal digits that differ for another model, or another way to deal it out."""
        return hashlib.sha256(" ".join(flat.identity for flat in self.flats).encode()).hexdigest()[:16]

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits that differ for a run of other samples, optimizer or length."""
        lasting = {key: value for key, value in lasting_values(self.run).items() if not key.startswith(OF_A_PART)}
        sync = self.run.sync
        lasting |= {"steps": self.run.train.steps, "wire": sync.wire, "local_steps": sync.local_steps}
        return hashlib.sha256(json.dumps(lasting, sort_keys=True, default=str).encode()).hexdigest()[:16]


def dealt_out(shapes: Mapping[str, tuple[int, ...]], servers: int) -> list[Flat]:
    """Deal parameters out over servers, whole ones, so that any update rule can be a server's: the largest first, each
    to the server that has least (Graham's rule: no more than 4/3 of the least possible maximum).
    """
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(servers)]
    held = [0] * servers
    for name in sorted(shapes, key=lambda name: (-prod(shapes[name]), name)):
        least = held.index(min(held))
        parts[least][name] = shapes[name]
        held[least] += prod(shapes[name])
    return [Flat({name: shape for name, shape in shapes.items() if name in part}) for part in parts]
