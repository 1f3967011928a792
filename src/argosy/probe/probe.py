"""A probe: measures the machine at hand, all processes together, and describes it as a cluster to plan for."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.config.schema import RunConfig
from argosy.observe.progress import Progress
from argosy.parallel.world import World
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Device
from argosy.plan.hardware.measurements import Measurements
from argosy.probe.cluster import as_cluster
from argosy.probe.collectives import MESSAGES, measure_collectives
from argosy.probe.compression import measure_compression
from argosy.probe.compute import (
    matmuls_to_measure,
    measure_attention,
    measure_copy,
    measure_launch,
    measure_layer_host,
    measure_matmuls,
)
from argosy.probe.machine import machine_of
from argosy.probe.storage import FILE_BYTES, measure_disk, measure_loader
from argosy.probe.timing import LONGEST_SLICE_S

MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 16_384}
"""Tokens of the microbatches whose matmuls are measured: enough to keep a device at full speed."""
COMPUTE_SHARE, COLLECTIVES_SHARE, LOADER_SHARE = 0.4, 0.4, 0.02
"""Share of the probe's time; the rest is for starting, the disk, and what takes longer than it should."""


@dataclass(frozen=True)
class ProbeRequest:
    """What is to be measured."""

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


def measure(asked: ProbeRequest, world: World) -> Cluster:
    """Return the cluster that this world runs on; all its processes call it, and all get the same."""
    progress = Progress(enabled=world.is_first and not asked.quiet)
    began = time.monotonic()

    def say(stage: str) -> None:
        progress.say(f"{time.monotonic() - began:5.0f} s  {stage}")

    run, machine = asked.run, machine_of(world)
    tokens = max(1, MICROBATCH_TOKENS[world.device.type] // run.data.seq_len) * run.data.seq_len
    cases = matmuls_to_measure(run.model, tokens, machine.kind)
    slice_s = min(LONGEST_SLICE_S, COMPUTE_SHARE * asked.seconds / (len(cases) + 8))
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
        sizes, budget_s = MESSAGES[machine.kind], COLLECTIVES_SHARE * asked.seconds
        found["collectives"] = tuple(measure_collectives(world, machine.hosts, sizes, budget_s))
    say("disk and loader")
    disk = measure_disk(world, asked.folder, FILE_BYTES)
    found |= {"disk_write_bytes_per_s": disk.write_bytes_per_s, "disk_read_bytes_per_s": disk.read_bytes_per_s}
    found["loader_tokens_per_s"] = measure_loader(world, run, LOADER_SHARE * asked.seconds)
    say("done")
    return as_cluster(asked.device, machine, Measurements(**found))
