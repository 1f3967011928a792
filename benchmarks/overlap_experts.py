"""Experts on two processes behind a thin link: a step with tokens that travel whole, and in halves under computing; or,
with shared experts, a step that computes these after the others, as Argosy did, and one that does it meanwhile.

    python benchmarks/overlap_experts.py [--rates 100mbit,200mbit,400mbit] [--steps 12] [--shared]

Each process is a network namespace with a throttled link (`thin_link_namespaces`); needs root and iproute2. Both plans
are laid out in the same processes and take turns step by step, so that what else the machine does hits both alike.
Printed: medians of forward, backward and the sums of gradients, seconds, and the median and the quartiles of the ratios
of neighbouring steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median, quantiles
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from argosy.config.schema import RunConfig
from argosy.models.experts import Experts
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.state import TrainState
from argosy.training.step import Step
from thin_link_namespaces import check_that_this_machine_can, join_as_rank, run_ranks

RANKS, ROWS, TOKENS, MICROBATCHES = 2, 4, 256, 2
MODEL: dict[str, Any] = {
    "layers": 3, "width": 256, "heads": 4, "kv_heads": 2, "head_width": 64, "vocab_size": 1024, "family": "mixtral",
    "moe": {"experts": 8, "experts_per_token": 2, "expert_ffn_width": 512, "balance": "aux"},
}  # fmt: skip
SHARED = {"shared_experts": 1, "shared_gate": True, "shared_ffn_width": 1024}
PAIRS = {False: ("whole", "halves"), True: ("after", "meanwhile")}
"""What is compared without shared experts, and with them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,200mbit,400mbit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    check_that_this_machine_can()
    for rate in options.rates.split(","):
        words = ("--rates", rate, "--steps", str(options.steps), *["--shared"] * options.shared)
        if run_ranks(RANKS, 1, rate, sys.executable, __file__, *words):
            sys.exit(1)


def work(options: argparse.Namespace) -> None:
    """One process: both plans in turns."""
    world = join_as_rank(options.worker, RANKS, 1)
    pair = PAIRS[options.shared]
    steps = {name: stepping(world, name, options.shared) for name in pair}
    seconds: dict[str, list[float]] = {name: [] for name in pair}
    for number in range(options.steps + 2):  # the first two connect, and warm up
        for name in (*pair, *reversed(pair)):
            dist.barrier()
            began = time.monotonic()
            steps[name]()
            dist.barrier()
            if number > 1:
                seconds[name].append(time.monotonic() - began)
    ratios = [plain / hidden for plain, hidden in zip(*seconds.values(), strict=True)]
    if world.is_first:
        low, _, high = quantiles(ratios, n=4)
        found = {name: round(median(values), 3) for name, values in seconds.items()}
        print(json.dumps({"link": options.rates, **found, "ratio": round(median(ratios), 3),
                          "quartiles": [round(low, 3), round(high, 3)], "pairs": len(ratios)}), flush=True)  # fmt: skip
    dist.destroy_process_group()


def stepping(world: World, name: str, shared: bool) -> Callable[[], None]:
    """Return forward, backward and the sums of gradients of a step."""
    more = ",overlap_experts=true" if name == "halves" else ""
    model = MODEL | ({"family": "qwen2_moe", "moe": MODEL["moe"] | SHARED} if shared else {})
    plan = Plan.parse(f"dp_shard={RANKS},ep={RANKS},zero=1,microbatch={ROWS},compile=false{more}")
    run = RunConfig.model_validate(
        {
            "model": model,
            "data": {"seq_len": TOKENS},
            "train": {"steps": 10, "global_batch": RANKS * ROWS * MICROBATCHES},
        }
    )
    step = Step(run, TrainState.begin(apply(plan, run, world), plan, run), world, StepClock(world.device))
    generator = torch.Generator().manual_seed(world.rank)
    tokens = torch.randint(1, MODEL["vocab_size"], (ROWS * MICROBATCHES, TOKENS + 1), generator=generator)
    batch = list(microbatches(tokens.int().numpy(), ROWS, 0, world.device))

    def one_step() -> None:
        with mock.patch.object(Experts, "tokens_travel", False) if name == "after" else nullcontext():
            step.forward_backward(batch)
        step.state.model.zero_gradients()

    return one_step


if __name__ == "__main__":
    main()
