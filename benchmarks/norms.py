"""What norms by layer cost: steps that measure them against steps that do not, in turns, in one process.

Processor time is compared: a neighbour on the machine does not count.

python benchmarks/norms.py
python benchmarks/norms.py --preset llama-20m
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from argosy.config.load import load
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.services.norms import LayerNorms
from argosy.training.state import TrainState
from argosy.training.step import Step


def main() -> None:
    """Print the time of both kinds of steps, and what measuring every 50th step adds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="llama-5m")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    options = parser.parse_args()
    overrides = {"model.preset": options.preset, "data.seq_len": options.seq_len, "train.global_batch": options.batch,
                 "model.vocab_size": 8192}  # fmt: skip
    run = load(None, {**overrides, "data.sources": {str(Path.cwd()): 1.0}})
    world, plan = World(), Plan(compile=False, microbatch=options.batch)
    state = TrainState.begin(apply(plan, run, world), plan, run)
    step, norms = Step(run, state, world, StepClock(world.device)), LayerNorms(run, state.model, world)
    rows = np.random.default_rng(0).integers(0, run.model.vocab_size, (options.batch, options.seq_len + 1), np.int32)
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * options.pairs + 2):
        is_due = number % 2 == 1
        began = time.process_time()
        batch = microbatches(rows, options.batch, 0, world.device)
        outcome = step.exchange(step.forward_backward(batch))
        step.apply(step.update(outcome, 1e-4), norms if is_due else None)
        took[is_due].append(time.process_time() - began)
    without, due = (statistics.median(took[kind][1:]) for kind in (False, True))
    added = statistics.median(a - b for a, b in zip(took[True][1:], took[False][1:], strict=True)) / without
    print(f"{options.preset}: a step {1e3 * without:.1f} ms, with norms {1e3 * due:.1f} ms (+{100 * added:.1f} %)")
    print(f"every 50th step: +{2 * added:.2f} % of a run")


if __name__ == "__main__":
    main()
