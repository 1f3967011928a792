"""Replicas of two sites behind a thin link, summed at once and in tiers: seconds a step and bytes on the link.

    python benchmarks/tiers.py [--rate 100mbit] [--sites 2] [--each 2] [--steps 6] [--plans "exact;sum_inside=2"]

Each site is a network namespace with several processes, joined to the others by a throttled link (`thin_link.sites`);
needs root and iproute2. Inside a site processes speak over the namespace's own loopback. The plans are run by the same
processes, one after the other, with the same batch; with " in plain sight" behind it, a plan of ZeRO 1 or 2 waits for
updated values right after the update. Bytes are those that the interface of site 0 sent, headers and
acknowledgements included, beside the formula: what the ranks of the site send to another site.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from argosy.config.schema import RunConfig
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.plan.cost.traffic import traffic
from argosy.plan.plan import Plan
from argosy.training.state import TrainState
from argosy.training.step import Step
from thin_link_model import ROWS, configuration, rows
from thin_link_namespaces import LINK, check_that_this_machine_can, join_as_rank, run_ranks

PLANS = ";".join(
    f"{axes},sync={word}"
    for word in ("exact", "int8", "topk")
    for axes in ("dp_replicate={n}", "dp_replicate={n},sum_inside={each}")
)
PLANS += ";dp_replicate={sites},dp_shard={each},zero=1;dp_replicate={sites},dp_shard={each},zero=3"


PLAIN = " in plain sight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--each", type=int, default=2, help="processes of a site")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plans", default=PLANS, help="separated by ;")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    check_that_this_machine_can()
    sys.exit(run_ranks(options.sites, options.each, options.rate, sys.executable, __file__, *sys.argv[1:]))


def work(options: argparse.Namespace) -> None:
    """One process: all plans, one after the other."""
    size = options.sites * options.each
    world = join_as_rank(options.worker, size, options.each)
    lines = []
    for words in options.plans.format(n=size, each=options.each, sites=options.sites).split(";"):
        plan = Plan.parse(f"{words.removesuffix(PLAIN)},microbatch={ROWS},compile=false")
        run = configuration(world.size)
        one_step = stepping(plan, run, world, words.endswith(PLAIN))
        one_step()  # the first connects, and warms up
        one_step()
        dist.barrier()
        before, began = sent_bytes(), time.monotonic()
        for _ in range(options.steps):
            one_step()
        dist.barrier()
        step_s, sent = (time.monotonic() - began) / options.steps, (sent_bytes() - before) / options.steps
        predicted = on_the_link(plan, run, options.sites, options.each)
        lines.append({"plan": words, "step_s": step_s, "sent_mb": sent / 1e6, "predicted_mb": predicted / 1e6})
        if world.is_first:
            print(
                f"{words:45} {step_s * 1e3:7.0f} ms  {sent / 1e6:8.2f} MB  {sent / predicted - 1:+.1%} of the formula  "
                f"{lines[0]['sent_mb'] / lines[-1]['sent_mb']:5.2f} x fewer bytes  "
                f"{lines[0]['step_s'] / step_s:5.2f} x the speed",
                flush=True,
            )
    if world.is_first:
        print(json.dumps(lines))
    dist.destroy_process_group()


def stepping(plan: Plan, run: RunConfig, world: World, in_plain_sight: bool) -> Callable[[], None]:
    """`in_plain_sight`: wait for the values right after the update, not in the next forward."""
    step = Step(run, TrainState.begin(apply(plan, run, world), plan, run), world, StepClock(world.device))
    batch = [rows(world.rank, world.device)]

    def one_step() -> None:
        step.apply(step.update(step.exchange(step.forward_backward(batch)), 1e-3))
        if in_plain_sight:
            step.state.model.settle()

    return one_step


def on_the_link(plan: Plan, run: RunConfig, sites: int, each: int) -> float:
    """Bytes that a site sends to others in a step, by what its ranks send along each axis.

    What is gathered or reduced in a ring through all ranks leaves a site once, on the rank that is its last; of an
    all-to-all, each rank sends a part to each rank elsewhere; what goes across in tiers leaves the site as a whole.
    """
    total = 0.0
    for rank in range(each):
        for (axis, kind), size in traffic(plan, run, rank).items():
            if axis == "shard" and plan.dp_shard == sites * each:
                total += size / each
            if not axis.startswith("replicate") or "_" in axis:
                continue
            meets_all = not plan.sums_in_tiers and plan.replicas == sites * each
            if not meets_all:
                total += size
            elif kind == "all_to_all":
                total += size * (plan.replicas - each) / (plan.replicas - 1)
            else:
                total += size / each
    return total


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{LINK}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
