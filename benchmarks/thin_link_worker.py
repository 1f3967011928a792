"""One site's process of `thin_link.py`, for ways that sum in every step: Argosy's words and the hooks of PyTorch's DDP.

It writes a line of JSON for each way: seconds a step, bytes that the site's interface sent, and what was predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from argosy.config.schema import RunConfig
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.plan.cost.traffic import traffic
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.measurements import Measurements
from argosy.plan.plan import Plan
from argosy.probe.collectives import measure_collectives
from argosy.probe.compute import (
    matmuls_to_measure,
    measure_compression,
    measure_copy,
    measure_layer_host,
    measure_matmuls,
)
from argosy.probe.probe import as_cluster, machine_of
from argosy.training.state import TrainState
from argosy.training.step import Step
from thin_link_model import ROWS, configuration, rows
from thin_link_namespaces import join_as_rank, sent_here

MESSAGES = [2**20, 2**21, 2**22, 2**23]
"""As large as buckets are: the first 128 KiB pass the throttle at once."""
PROBE_S, SLICE_S = 20.0, 0.1


@dataclass
class Way:
    """A step to repeat, the bytes that are predicted for it, and the seconds of its parts so far."""

    step: Callable[[], None]
    predicted_bytes: int
    lap: Callable[[], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of each site")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ways", required=True, help="NAME=KIND:WORDS;...")
    parser.add_argument("--cluster", type=Path, default=None, help="where the probe of this link is written")
    options = parser.parse_args()
    world = join_as_rank(options.rank, options.size, options.ranks)
    if options.cluster:
        probe(world, options.cluster)
    for way in options.ways.split(";"):
        name, _, rest = way.partition("=")
        kind, _, words = rest.partition(":")
        line = measured(
            world, by_hook(world, words) if kind == "hook" else by_sync(world, words, options.ranks), options.steps
        )
        if world.is_first:
            print(json.dumps({"way": name, **line}), flush=True)
    dist.destroy_process_group()


def measured(world: World, way: Way, steps: int) -> dict[str, Any]:
    """Return the median step, the bytes of a step, and the seconds of its parts."""
    way.step()  # the first connects, and warms up
    way.step()
    way.lap()
    dist.barrier()
    before, took = sent_here(), []
    for _ in range(steps):
        began = time.monotonic()
        way.step()
        took.append(time.monotonic() - began)
    dist.barrier()
    sent, seconds = sent_here().since(before, steps), way.lap()
    return {
        "step_s": statistics.mean(took),
        "sent_bytes": sent.whole,
        "payload_bytes": sent.payload,
        "predicted_bytes": way.predicted_bytes,
        "seconds": {name: value / steps for name, value in seconds.items()},
    }


def probe(world: World, path: Path) -> None:
    """Measure this machine and this link with the parts of `argosy probe`, and write the cluster."""
    run, machine = configuration(world.size), machine_of(world)
    cases = matmuls_to_measure(run.model, ROWS * run.data.seq_len, machine.kind)
    found = Measurements(
        matmuls=tuple(measure_matmuls(world, cases, SLICE_S)),
        memory_copy_bytes_per_s=measure_copy(world, SLICE_S),
        layer_host_s=measure_layer_host(world, SLICE_S),
        compression=tuple(measure_compression(world, 5 * SLICE_S)),
        collectives=tuple(measure_collectives(world, machine.hosts, MESSAGES, PROBE_S)),
        disk_write_bytes_per_s=1e9,
    )
    if world.is_first:
        as_cluster(find_device("cpu"), machine, found).save(path)


def by_sync(world: World, words: str, ranks: int) -> Way:
    share = ROWS // ranks
    plan = Plan.parse(f"dp_replicate={world.size},microbatch={share},compile=false,precision=fp32,{words}")
    run = configuration(world.size // ranks)
    clock = StepClock(world.device)
    step = Step(run, TrainState.begin(apply(plan, run, world), plan, run), world, clock)
    batch = [rows(world.rank, world.device, share)]

    def one_step() -> None:
        step.apply(step.update(step.exchange(step.forward_backward(batch)), 1e-3))

    # Of several ranks of a site, only some of the bytes cross its link.
    crossing = sum(traffic(plan, run, world.rank).values()) if ranks == 1 else 0
    return Way(one_step, crossing, lambda: dict(clock.lap()))


def by_hook(world: World, hook: str) -> Way:
    run: RunConfig = configuration(world.size)
    model = Decoder(run.model)
    materialize(model, run.model, world.device, run.seed)
    # PyTorch's PowerSGD sends from callbacks: with several buckets, the order on gloo's ranks differs, and it fails.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000 if hook == "powersgd" else None)
    if hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, batch = torch.optim.AdamW(ddp.parameters(), fused=True), rows(world.rank, world.device)

    def one_step() -> None:
        loss = ddp(batch.tokens_BT, batch.targets_BT, batch.positions_BT, batch.documents)
        (loss / batch.targets_BT.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Way(one_step, 0, dict)


if __name__ == "__main__":
    main()
