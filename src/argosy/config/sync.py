"""The run file's tables `[[sites]]` and `sync`: who trains together over thin links, and how they and replicas agree.

Sites are runs of their own. Which way they, or replicas, agree is a word of the plan, `sync`; details are here, those
of parameter servers (plan.sync = "async") as well."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from argosy.config.launch import Address, LaunchOptions, OptionalAddress
from argosy.config.section import PositiveSeconds, Section

SERVER_NAME = re.compile(r"^server-([1-9][0-9]{0,3})$")
"""Names of parameter servers, as `server_name` gives them."""
MOST_LOCAL_STEPS = 500
"""A worker's record of its steps is one message."""


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
        return len(self.servers) or self.shards


def server_name(number: int) -> str:
    """Return the name of parameter server `number`, from 0, where `--site` says which part of the run is meant."""
    return f"server-{number + 1}"


def server_number(site: str) -> int | None:
    """Return the number, from 0, of the parameter server that is called `site`; None if it is the name of no server."""
    found = SERVER_NAME.match(site)
    return int(found.group(1)) - 1 if found else None


SITE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
Wire = Literal["fp32", "bf16", "int8", "int4"]


class SiteLaunch(Section, LaunchOptions):
    """The start of the site by `argosy launch`: where, and with which of that command's options."""

    login: Annotated[str, Field(pattern=r"^$|^[A-Za-z0-9_][A-Za-z0-9_.@-]*$")] = ""
    """A machine of the site, by a name that ssh takes: the command is given there; empty: it is given here."""
    login_options: tuple[str, ...] = ()
    """Options of ssh to that machine, e.g. "-p2222"."""
    folder: str = ""
    """The folder on that machine in which the command is given; the run's folder is made in it."""
    argosy: str = "argosy"
    """The program on that machine, by its path if it is not found by its name."""

    @model_validator(mode="after")
    def _a_login_has_a_folder(self) -> Self:
        if self.login and not self.folder.startswith("/"):
            raise ValueError(
                f'launch.folder = "{self.folder}": with login = "{self.login}" it has to be the path, from /, of '
                "the folder on that machine in which the command is given"
            )
        return self


class SiteConfig(Section):
    """One site: its name, where the others reach it, and what it does otherwise than the run."""

    name: Annotated[str, Field(pattern=SITE_NAME, max_length=64)]
    """Name of the site; its folder is sites/NAME in the run's folder."""
    address: OptionalAddress = ""
    """HOST:PORT at which the other sites reach it; empty: a free port of this machine, if one command starts all."""
    batch: NonNegativeInt = 0
    """Its sequences of each step; 0: an even share of what the other sites leave of train.global_batch."""
    plan: str = ""
    """Its plan, if it is not the run's."""
    processes: NonNegativeInt = 0
    """Its processes on each machine, if not launch.processes."""
    launch: SiteLaunch | None = None
    """Options with which `argosy launch` starts it; none: those of the command itself."""


class OuterConfig(Section):
    """Rounds of sites under plan.sync = "local" or "diloco"."""

    every_steps: PositiveInt = 50
    """local, diloco: steps (H) that each site trains alone between two sums of what they changed."""
    from_step: NonNegativeInt = 0
    """local, diloco: first steps of the run in which the sites sum gradients, exactly, and hold the same weights."""
    fragments: PositiveInt = 1
    """local, diloco: parts in which the model's layers are agreed on, one after the other, each once in every_steps."""
    overlap_steps: NonNegativeInt = 0
    """local, diloco: steps (tau) that a site trains on while what it changed travels."""
    mixing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """local, diloco: share (alpha) of a site's own weights in those that it goes on with after an outer step; 0: it
    takes the agreed ones."""
    outer_lr: PositiveFloat = 0.7
    """diloco, async with local_steps: learning rate of the outer step, which is Nesterov's SGD on the mean change."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """diloco, async with local_steps: momentum of the outer step."""
    wire: Wire = "fp32"
    """local, diloco: number format in which changes travel between sites; int8 and int4 have a scale a 256 numbers.
    async: that of gradients, with error feedback; weights travel as fp32."""
    patience_s: PositiveSeconds = 120.0
    """local, diloco: once as many sites as the quorum are ready, the others are waited for this long; then the round
    goes on without them. async: a worker that others wait for is waited for this long; then its samples are dealt to
    another."""
    quorum: NonNegativeInt = 0
    """local, diloco: sites that a round needs at least; 0: more than half of them."""
    tls: bool = True
    """local, diloco, async: encrypt what sites, servers and workers send, with keys from the run's secret."""


def check_fragments(sync: OuterConfig, layers: int) -> None:
    """Refuse turns that do not come out even. Raises: ValueError."""
    h, fragments = sync.every_steps, sync.fragments
    if fragments > layers:
        raise ValueError(f"sync.fragments = {fragments}, and the model has {layers} layers; try {layers} or less")
    if h % fragments:
        near = max(1, round(h / fragments)) * fragments
        raise ValueError(
            f"sync.every_steps = {h} is no multiple of sync.fragments = {fragments}: fragments take turns, at even "
            f"distances; try every_steps = {near}"
        )
    if sync.overlap_steps >= h // fragments:
        raise ValueError(
            f"sync.overlap_steps = {sync.overlap_steps} is not below sync.every_steps / sync.fragments = "
            f"{h // fragments}: a fragment has to be there before the next one is sent; try {h // fragments - 1}"
        )


def check_sites(sites: Sequence[SiteConfig], site: str, quorum: int) -> None:
    """Refuse sites that cannot be told apart. Raises: ValueError."""
    names = [one.name for one in sites]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f'sites: the name "{twice}" is given twice; give each site its own')
    if len(sites) == 1:
        raise ValueError("sites has one entry; give two or more, or none")
    addresses = [one.address for one in sites if one.address]
    if twice := next((address for address in addresses if addresses.count(address) > 1), None):
        raise ValueError(f'sites: the address "{twice}" is given twice; give each site its own')
    if server := next((name for name in names if SERVER_NAME.match(name)), None):
        raise ValueError(f'sites: the name "{server}" is that of a parameter server; give the site another')
    if site and site not in names and not (names and SERVER_NAME.match(site)):
        there = f"the sites are {', '.join(names)}" if names else "the run has no [[sites]]"
        raise ValueError(f'site = "{site}": there is no such site; {there}')
    if quorum > max(1, len(sites)):
        remedy = f"try {len(sites)} or less" if sites else "leave it out, as the run has no [[sites]]"
        raise ValueError(f"sync.quorum = {quorum} is more than there are sites; {remedy}")


def batches_of(sites: Sequence[SiteConfig], global_batch: int) -> list[int]:
    """Return the sequences of each site in a step. Raises: ValueError if they cannot make up `global_batch`."""
    given, others = sum(one.batch for one in sites), sum(not one.batch for one in sites)
    left = global_batch - given
    if (others and (left < others or left % others)) or (not others and left):
        fixed = ", ".join(f"{one.batch} of {one.name}" for one in sites if one.batch)
        what = f", with sites.batch = {fixed}" if fixed else ""
        raise ValueError(
            f"train.global_batch = {global_batch} cannot be shared by {len(sites)} sites{what}; "
            f"try train.global_batch = {given + max(1, round(left / others)) * others if others else given}"
        )
    return [one.batch or left // others for one in sites]


class SyncConfig(OuterConfig, ServerConfig):
    """The sums of replicas, and rounds of sites, if the plan's word `sync` is not exact."""

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
