"""A probe: starts processes on the machine at hand, or joins those that are there, has all of them measure it together,
and describes it as a cluster to plan for.

What measurements do not tell of it is taken from the catalogue.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from argosy.accelerator import device_name, kind_of, memory_bytes, numbered, software
from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.launch.devices import find_devices
from argosy.launch.local_world import LocalWorld, failure_told, interrupted_by_signals
from argosy.observe.screen import Progress
from argosy.parallel.encoding import decode, encode
from argosy.parallel.world import World, join_world, leave_world
from argosy.plan.hardware.clusters import Cluster, NetworkTier, NodeGroup
from argosy.plan.hardware.devices import Device, Efficiencies, PeakFlops, find_device
from argosy.plan.hardware.local_machine import cores_here, device_named, host_memory_bytes
from argosy.plan.hardware.measurements import CollectiveRate, Measurements, Operation, four_digits
from argosy.plan.search.auto import Devices
from argosy.probe.collectives import PROBED_MESSAGE_BYTES, measure_collectives
from argosy.probe.compute import (
    DISK_FILE_BYTES,
    LONGEST_SLICE_S,
    matmuls_to_measure,
    measure_attention,
    measure_compression,
    measure_copy,
    measure_disk,
    measure_launch,
    measure_layer_host,
    measure_loader,
    measure_matmuls,
)
from argosy.processes.child import ForkEntry, channel_to_parent, end_with_parent


def catalogue_device(kind: str, name: str | None) -> Device:
    """Return the catalogue's entry of the device at hand: it has what no probe can measure (price, power, failures).

    kind: cpu or accelerator. name: its name in the catalogue, or a device's file; None asks the driver.
    Raises: UserError if the catalogue does not know what the driver says.
    """
    if name is not None or kind == "cpu":
        return find_device(name or "cpu")
    said = device_name(numbered())
    try:
        return find_device(device_named(said))
    except UserError as error:
        raise UserError(
            f"the driver calls the device {said!r}: {error} Say which it is with --device NAME or FILE.toml."
        ) from None


@dataclass(frozen=True)
class Machine:
    """The devices of a world, one for each process."""

    kind: str
    """cpu or accelerator."""
    hosts: tuple[str, ...]
    """The host of each process."""
    memory_bytes: float
    """Memory of one device; a CPU's memory is divided among the processes."""
    software: str
    """Versions that speed depends on."""

    @property
    def nodes(self) -> int:
        """The number of hosts."""
        return len(set(self.hosts))

    @property
    def devices_per_node(self) -> int:
        """The number of processes on the node that has fewest."""
        return min(self.hosts.count(host) for host in self.hosts)


def machine_of(world: World) -> Machine:
    """Return the machine that `world` runs on; all its processes call it."""
    hosts = world.gather(socket.gethostname(), str)
    kind = kind_of(world.device)
    if kind == "accelerator":
        memory = memory_bytes(world.device)
    else:
        memory = host_memory_bytes() / hosts.count(hosts[world.rank])
    return Machine(kind, tuple(hosts), memory, software(world.device))


LEAST_LATENCY_S = 1e-6
"""Least latency of a link. A line through few messages may begin at 0: a throttle lets the first bytes pass."""


def as_cluster(catalogue: Device, machine: Machine, measured: Measurements) -> Cluster:
    """Return the cluster of `machine`, whose device the catalogue calls `catalogue`."""
    nodes, local = machine.nodes, machine.devices_per_node
    device = _device(catalogue, machine, measured)
    return Cluster(
        name=f"{nodes}x{local} {catalogue.name} at {machine.hosts[0]}",
        groups=(NodeGroup(device=device, nodes=nodes, devices_per_node=local),),
        network=_network(measured, nodes * local) if nodes > 1 else (),
        storage_bytes_per_s=measured.disk_write_bytes_per_s,
        software=machine.software,
        measured=measured,
    )


def _device(catalogue: Device, machine: Machine, measured: Measurements) -> Device:
    """One device as measured.

    A GPU keeps its specification, and measurements are shares of it. The catalogue can only guess at a CPU, so the best
    matmuls replace its guesses.
    """
    best: dict[str, float] = {}
    for rate in measured.matmuls:
        if rate.kind == "square":
            best[rate.number_format] = max(rate.flops_per_s, best.get(rate.number_format, 0.0))
    local = machine.devices_per_node
    # What the driver keeps is no part of the memory that torch sees.
    found: dict[str, Any] = {"memory_bytes": machine.memory_bytes, "reserved_bytes": 0.0}
    found |= {"devices_per_node": local, "devices_per_host": local}
    if machine.kind == "cpu":
        found["peak_flops_per_s"] = PeakFlops(**best)
        found["matmul_efficiency"] = Efficiencies(**dict.fromkeys(best, 1.0))
        found["memory_bytes_per_s"] = measured.memory_copy_bytes_per_s
    else:
        known = catalogue.peak_flops_per_s.model_dump(exclude_none=True)
        shares = {fmt: min(1.0, rate / known[fmt]) for fmt, rate in best.items() if fmt in known}
        found["matmul_efficiency"] = catalogue.matmul_efficiency.model_copy(update=shares)
    if local > 1:
        found |= _link(measured, machine.kind)
    if machine.nodes > 1:
        tier = _network(measured, len(machine.hosts))[0]
        found |= {"nic_bytes_per_s": tier.bandwidth_bytes_per_s, "nic_latency_s": tier.latency_s}
    found |= {
        "name": f"{catalogue.name} at {machine.hosts[0]}",
        "aliases": (),
        "assumed": tuple(key for key in catalogue.assumed if key not in found),
        "source": f"argosy probe, {measured.date}; what it cannot measure: {catalogue.source}",
    }
    return catalogue.model_copy(update=found)


def _link(measured: Measurements, kind: str) -> dict[str, Any]:
    """Return the link in a node: a ring's bandwidth from the largest all-reduce, latency from the smallest message."""
    reduces, sends = (_rows(measured, operation, "node") for operation in ("all_reduce", "send"))
    ranks, rate = reduces[-1].ranks, reduces[-1].bytes_per_s or 0.0
    found = {
        "ring_busbw_bytes_per_s": four_digits(2 * (ranks - 1) / ranks * rate),
        "link_latency_s": max(LEAST_LATENCY_S, sends[0].latency_s),
    }
    # A GPU's link has a specification; that of CPU processes is what gloo makes of the memory.
    return found if kind == "accelerator" else found | {"link_bytes_per_s": sends[-1].bytes_per_s}


def _network(measured: Measurements, devices: int) -> tuple[NetworkTier]:
    """Return the link between nodes, shared by all their devices."""
    sends = _rows(measured, "send", "network")
    rate, latency_s = sends[-1].bytes_per_s or 0.0, max(LEAST_LATENCY_S, sends[0].latency_s)
    return (NetworkTier(name="network", devices=devices, bandwidth_bytes_per_s=rate, latency_s=latency_s),)


def _rows(measured: Measurements, operation: Operation, tier: str) -> list[CollectiveRate]:
    """Return the rows with most ranks, and among these with most groups at once, by message size."""
    rows = [row for row in measured.collectives if (row.operation, row.tier) == (operation, tier)]
    ranks, groups = max((row.ranks, row.groups) for row in rows)
    return [row for row in rows if (row.ranks, row.groups) == (ranks, groups)]


PROBED_TOKENS = {"cpu": 4096, "accelerator": 16_384}
"""Tokens of the microbatches whose matmuls are measured: enough to keep a device at full speed."""
COMPUTE_SHARE, COLLECTIVES_SHARE, LOADER_SHARE = 0.4, 0.4, 0.02
"""Share of the probe's time; the rest is for starting, the disk, and what takes longer than it should."""


@dataclass(frozen=True)
class ProbeRequest:
    """The measurements that are asked for."""

    run: RunConfig
    """The run whose model's shapes, sequence length and data (if they are prepared) are measured."""
    device: Device
    """The catalogue's entry, for what cannot be measured."""
    folder: Path
    """A folder on the disk that is measured."""
    seconds: float
    """Total time, roughly."""
    quiet: bool = False
    """Print nothing on the way."""


def measure(request: ProbeRequest, world: World) -> Cluster:
    """Return the cluster that this world runs on; all its processes call it, and all get the same."""
    progress = Progress(enabled=world.is_first and not request.quiet)
    began = time.monotonic()

    def say(stage: str) -> None:
        progress.say(f"{time.monotonic() - began:5.0f} s  {stage}")

    run, machine = request.run, machine_of(world)
    tokens = max(1, PROBED_TOKENS[kind_of(world.device)] // run.data.seq_len) * run.data.seq_len
    cases = matmuls_to_measure(run.model, tokens, machine.kind)
    slice_s = min(LONGEST_SLICE_S, COMPUTE_SHARE * request.seconds / (len(cases) + 8))
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "host": machine.hosts[0]}
    say(f"{len(cases)} matmuls of {run.model.preset or run.model.family} on {world.size} x {machine.kind}")
    found["matmuls"] = tuple(measure_matmuls(world, cases, slice_s))
    say("attention, memory, host")
    found["attention"] = tuple(measure_attention(world, run.model, run.data.seq_len, slice_s))
    found["memory_copy_bytes_per_s"] = measure_copy(world, slice_s)
    found["launch_s"] = measure_launch(world, slice_s)
    found["layer_host_s"] = measure_layer_host(world, slice_s)
    say("compression of sums")
    found["compression"] = tuple(measure_compression(world, slice_s))
    if world.size > 1:
        say("collectives")
        sizes, budget_s = PROBED_MESSAGE_BYTES[machine.kind], COLLECTIVES_SHARE * request.seconds
        found["collectives"] = tuple(measure_collectives(world, machine.hosts, sizes, budget_s))
    say("disk and loader")
    disk = measure_disk(world, request.folder, DISK_FILE_BYTES)
    found |= {"disk_write_bytes_per_s": disk.write_bytes_per_s, "disk_read_bytes_per_s": disk.read_bytes_per_s}
    found["loader_tokens_per_s"] = measure_loader(world, run, LOADER_SHARE * request.seconds)
    say("done")
    return as_cluster(request.device, machine, Measurements(**found))


PROBE_MEMBER = ForkEntry("argosy.probe.probe")
"""A process that measures."""
MOST_CPU_PROCESSES = 8
"""Processes if the user gives no number: ranks beyond the first few share the machine in the same way."""


def find_probed(launch: LaunchConfig) -> Devices:
    """Return the devices to measure: those of the world that the environment names; else as many as `launch` says, or
    each GPU, or a process for each core. Raises: UserError, as `find_devices`.
    """
    if "WORLD_SIZE" in os.environ:
        return find_devices(launch, processes=int(os.environ["WORLD_SIZE"]))
    found = find_devices(launch)
    if found.kind != "cpu" or launch.processes:
        return found
    return replace(found, count=min(cores_here(), MOST_CPU_PROCESSES))


def probe_here(request: ProbeRequest, processes: int) -> Cluster:
    """Measure this machine with this many processes, which are started for it and end with it.

    Raises: RunFailed if one of them dies; Interrupted after SIGTERM or SIGINT.
    """
    with interrupted_by_signals(), closing(LocalWorld(PROBE_MEMBER, processes, "the probe")) as world:
        world.send("measure", data=[encode(request, ProbeRequest)])
        _, message = world.receive()  # of the first to finish; they all find the same
        return Cluster.model_validate_json(message["cluster"])


def main() -> None:
    """Run in each process that `probe_here` starts: measure, send the result, and end with the process that asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the process that asked decides
    client = channel_to_parent()
    request: ProbeRequest = decode(client.receive()["data"][0], ProbeRequest, "the probe")
    end_with_parent(client)
    with failure_told(client):
        cluster = measure(request, join_world(request.run.launch))
    client.send("measured", cluster=cluster.model_dump_json())
    leave_world()


def probe_joined(request: ProbeRequest) -> tuple[Cluster, World]:
    """Measure in the world that RANK, WORLD_SIZE, ... describe; every process gets the cluster, and its own world."""
    world = join_world(request.run.launch)
    try:
        return measure(request, world), world
    finally:
        leave_world()
