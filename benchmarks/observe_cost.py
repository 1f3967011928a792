"""What it costs to see every rank: training steps with and without it, in turns; a node's lines; a world of any size.

    python benchmarks/observe_cost.py [--plan tp=2,microbatch=4] [--pairs 100] [--compile]
    python benchmarks/observe_cost.py --ranks 16384

step    two steps at a time of the same model in the same processes: one counts collectives by axis and tier and shows
        its counters in a heartbeat's page, as a run does; the other does neither. Which comes first changes from pair
        to pair. The figure is the median of the pairs' differences over the median step, of the slowest rank
call    what counting one collective takes of the processor, in a group of one, and an entry in the heartbeat's page
line    what an agent does for a line on eight ranks: read their pages, ask its instruments, write
world   the lines of all nodes of a world of --ranks, by one process: their size, how often they come, its memory
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from argosy.config.schema import RunConfig
from argosy.models.microbatch import microbatches
from argosy.observe import node_metrics
from argosy.observe.clock import StepClock
from argosy.observe.collectives import CommunicationMeter
from argosy.observe.counters import Counters
from argosy.observe.heartbeat import UNREAD, Heartbeat, HeartbeatReading, read_heartbeat
from argosy.observe.node_metrics import Instruments, NodeMetrics, lines_of_node
from argosy.parallel.apply import apply
from argosy.parallel.world import World, join_world, leave_world, node_of_each_rank
from argosy.plan.plan import Plan
from argosy.training.state import TrainState
from argosy.training.step import Step

MODEL = {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4, "head_width": 32, "ffn_width": 768, "vocab_size": 4096}
SEQ_LEN, BATCH, WARMUP = 256, 8, 4
RANKS_OF_NODE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="tp=2,microbatch=4")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ranks", type=int, default=0)
    options = parser.parse_args()
    if options.ranks:
        print(json.dumps(world_of(options.ranks), indent=1))
        return
    plan = Plan.parse(options.plan).model_copy(update={"compile": options.compile})
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        found = manager.dict()
        processes = [
            context.Process(target=rank_of, args=(rank, plan, options.pairs, found)) for rank in range(plan.world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ranks = [found[rank] for rank in range(plan.world_size)]
    print(json.dumps({"plan": str(plan), "step": worst(ranks), "call": call(), "line": line_of_node()}, indent=1))


# ---- step ---------------------------------------------------------------------------------------------------------


def rank_of(rank: int, plan: Plan, pairs: int, found: Any) -> None:
    """Be one rank: make pairs of steps, and leave their times in `found`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(plan.world_size), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": os.environ.get("MASTER_PORT", "29517"), "LOCAL_WORLD_SIZE": str(plan.world_size)}
    run = RunConfig.model_validate(
        {
            "name": "observe-cost",
            "model": MODEL,
            "data": {"sources": {"none": 1.0}, "seq_len": SEQ_LEN},
            "train": {"steps": 10**6, "global_batch": BATCH},
            "launch": {"device": "cpu", "threads": 1},
        }
    )
    world = join_world(run.launch)
    state = TrainState.begin(apply(plan, run, world), plan, run)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        heartbeat = Heartbeat(Path(folder))
        heartbeat.join(1, rank, dict)
        nodes = node_of_each_rank(world)
        meter = CommunicationMeter(state.model.meshes.axis_of_groups(), nodes.__getitem__, world.device)
        seen = Side(
            Step(run, state, world, clock := StepClock(world.device, heartbeat, meter)), clock, heartbeat, meter
        )
        unseen = Side(Step(run, state, world, clock := StepClock(world.device)), clock, UNREAD, None)
        rows = np.random.default_rng(0).integers(1, 4096, (BATCH // plan.dp, SEQ_LEN + 1)).astype(np.int32)
        batch = microbatches(rows, plan.microbatch, 0, world.device)
        times = []
        for number in range(WARMUP + pairs):
            order = (seen, unseen) if number % 2 else (unseen, seen)
            took = {side: side.step(world, batch, number) for side in order}
            times.append((took[seen], took[unseen]))
        heartbeat.close()
    leave_world()
    found[rank] = times[WARMUP:]


def call(times: int = 3000, rounds: int = 7) -> dict[str, float]:
    """Return microseconds of processor time: the least of several rounds, with the meter less without."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        meter, x = CommunicationMeter({}, lambda rank: rank, torch.device("cpu")), torch.ones(64)
        seen, unseen = [], []
        for _ in range(rounds):
            unseen.append(cpu_us(lambda: dist.all_reduce(x), times))
            with meter:
                seen.append(cpu_us(lambda: dist.all_reduce(x), times))
            meter.lap()
        dist.destroy_process_group()
    UNREAD.begin(0)
    took_us = cpu_us(lambda: UNREAD.took(0.9, SECONDS, COMMUNICATION, 10**9), times)
    return {"collective_us": round(min(seen) - min(unseen), 2), "page_us": round(took_us, 2)}


def cpu_us(function: Callable[[], object], times: int) -> float:
    began_s = time.thread_time()
    for _ in range(times):
        function()
    return 1e6 * (time.thread_time() - began_s) / times


class Side:
    """A step that is seen, or one that is not."""

    def __init__(self, step: Step, clock: StepClock, heartbeat: Heartbeat, meter: CommunicationMeter | None):
        self._step, self._clock, self._heartbeat, self._meter = step, clock, heartbeat, meter

    def step(self, world: World, batch: Any, number: int) -> tuple[float, float]:
        """Return the wall time and this thread's processor time of a step."""
        if self._meter is not None:
            self._meter.open()
        world.barrier()
        self._clock.lap()
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        self._heartbeat.begin(number)
        outcome = self._step.exchange(self._step.forward_backward(batch))
        self._step.apply(self._step.update(outcome, learning_rate=1e-4))
        self._clock.lap()
        took = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        if self._meter is not None:
            self._meter.close()
        return took


def worst(ranks: list[list[tuple[tuple[float, float], tuple[float, float]]]]) -> dict[str, Any]:
    """Return the figures of the rank whose steps take longest more."""
    return max((figures(pairs) for pairs in ranks), key=lambda each: each["more_cpu_ms"])


def figures(pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> dict[str, Any]:
    step_s = statistics.median(unseen[0] for _, unseen in pairs)
    wall = [seen[0] - unseen[0] for seen, unseen in pairs]
    cpu = [seen[1] - unseen[1] for seen, unseen in pairs]
    return {
        "pairs": len(pairs),
        "step_ms": round(1e3 * step_s, 2),
        "more_wall_ms": round(1e3 * statistics.median(wall), 3),
        "more_wall_share": round(statistics.median(wall) / step_s, 5),
        "wall_standard_error_share": round(1.25 * statistics.stdev(wall) / len(wall) ** 0.5 / step_s, 5),
        "more_cpu_ms": round(1e3 * statistics.median(cpu), 3),
        "more_cpu_share": round(statistics.median(cpu) / step_s, 5),
    }


# ---- line ---------------------------------------------------------------------------------------------------------


def line_of_node(lines: int = 200) -> dict[str, float]:
    """Return what the agent of a node of eight ranks spends for a line."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run = RunConfig.model_validate({"name": "x", "model": MODEL, "data": {"sources": {"none": 1.0}}})
        run_dir, pages = Path(folder) / "run", []
        for rank in range(RANKS_OF_NODE):
            scratch = Path(folder) / str(rank)
            scratch.mkdir()
            run_dir.mkdir(exist_ok=True)
            pages.append(Heartbeat(scratch))
            pages[-1].join(1, rank, dict)
        path = lines_of_node(run_dir, "node")
        metrics = NodeMetrics(path, 5.0, Instruments.find(run, run_dir, path))
        cpu_s = 0.0
        for step in range(lines):
            for page in pages:
                page.begin(step)
                page.took(0.9, SECONDS, COMMUNICATION, 10**9)
            began_s = time.thread_time()
            metrics.write(lambda: [read for page in pages if (read := read_heartbeat(page.path))], RANKS_OF_NODE)
            cpu_s += time.thread_time() - began_s
        for page in pages:
            page.close()
        return {"cpu_ms": round(1e3 * cpu_s / lines, 3), "bytes": round(path.stat().st_size / lines)}


# ---- world --------------------------------------------------------------------------------------------------------

SECONDS = {"data": 0.01, "forward": 0.3, "backward": 0.6, "communication": 0.05, "optimizer": 0.03, "other": 0.01,
           "step": 1.0}  # fmt: skip
COMMUNICATION = {
    "tp": {"node": [0.1, 10**9]},
    "shard": {"network": [0.05, 10**9]},
    "pp": {"network": [0.02, 10**8]},
    "world": {"network": [0.001, 1000]},
}
STEP_S = 1.0


def world_of(ranks: int, rounds: int = 3) -> dict[str, float]:
    """Return what the lines of all nodes of a world come to, each node as its agent has it, by one process."""
    now_s = time.monotonic()
    node_metrics.time.monotonic = lambda: now_s  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        nodes = [NodeMetrics(lines_of_node(run_dir, f"n{n}"), 5.0) for n in range(-(-ranks // RANKS_OF_NODE))]
        every_s, cpu_s, step = 0.0, 0.0, 0
        for number in range(rounds):
            step += max(1, round(every_s / STEP_S)) if number else 64
            for node, metrics in enumerate(nodes):
                readings = [fake(node * RANKS_OF_NODE + local, step) for local in range(RANKS_OF_NODE)]
                began_s = time.thread_time()
                metrics.write(readings.copy, ranks)
                cpu_s += time.thread_time() - began_s
            every_s = nodes[0]._due_s - now_s
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
        size = sum(path.stat().st_size for path in (run_dir / "nodes").iterdir()) / rounds
        return {
            "ranks": ranks,
            "nodes": len(nodes),
            "bytes_of_a_line": round(size / len(nodes)),
            "seconds_between_lines": round(every_s, 1),
            "gb_a_day": round(size * 86_400 / every_s / 1e9, 3),
            "cpu_ms_of_a_line": round(1e3 * cpu_s / rounds / len(nodes), 3),
            "kb_of_a_node": round(grown_kb / len(nodes), 1),
        }


def fake(rank: int, steps: int) -> HeartbeatReading:
    """Return what a rank shows after so many steps."""
    noise = 1 + 1e-3 * (rank % 97)
    counted = Counters(
        steps=steps,
        first_step=0,
        last_step=steps - 1,
        memory_bytes=10**9 + rank,
        seconds={name: steps * noise * each for name, each in SECONDS.items()},
        communication={
            axis: {tier: [steps * noise * each[0], steps * each[1]] for tier, each in tiers.items()}
            for axis, tiers in COMMUNICATION.items()
        },
    )
    own = dict.fromkeys(range(max(0, steps - 64), steps), 0.94 * noise)
    empty = HeartbeatReading(rank, 1, rank, steps, "forward", 0, own, 0, 10**9, {})
    return replace(empty, counted=counted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
