"""Tokens per second, MFU and memory of the training step alone (`argosy.training.step`): one model, one plan, one GPU.

    python benchmarks/gpu_step.py --preset llama3.2-1b --plan microbatch=8,precision=bf16 --seq-len 4096
    python benchmarks/gpu_step.py --preset llama3.1-8b --plan microbatch=1,precision=fp8 --rows 4 --state int8

The last line is one of JSON. Weights are random and tokens too: neither changes the arithmetic. The peers of the same
step are in `train_step.py`; data, checkpoints and the monitor are not measured here.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import tyro

from argosy.config.load import load
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.plan.workload import train_flops_per_token
from argosy.training.state import TrainState
from argosy.training.step import Step

NO_END = -1
"""No token: rows are one document each."""


@dataclass
class Options:
    preset: str = "llama3.2-1b"
    """The model, one of `argosy config presets`."""
    vocab_size: int = 128256
    """Tokens in the vocabulary; Llama 3's."""
    plan: str = "microbatch=8,precision=bf16"
    """The plan of one process."""
    seq_len: int = 4096
    """Tokens per row."""
    rows: int = 8
    """Rows per optimizer step, a multiple of the plan's microbatch."""
    state: Literal["fp32", "int8"] = "fp32"
    """Format of the optimizer's state."""
    steps: int = 10
    """Timed steps, after three that are not."""
    device: str = "cuda:0"
    peak_tflops: float = 989.0
    """Dense bf16 peak of the device, which MFU is a part of; 989 is an H100's and an H200's (NVIDIA's data sheets)."""


def main(options: Options) -> None:
    run = load(
        overrides={
            "model.preset": options.preset,
            "model.vocab_size": options.vocab_size,
            "data.seq_len": options.seq_len,
            "train.global_batch": options.rows,
            "optimizer.state": options.state,
        }
    )
    world = World(device=torch.device(options.device))
    plan = Plan.parse(options.plan)
    state = TrainState.begin(apply(plan, run, world), plan, run)
    clock = StepClock(world.device)
    step = Step(run, state, world, clock)
    shape = (options.rows, options.seq_len + 1)
    rows = torch.randint(1, run.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).numpy()
    seconds = list[float]()
    for _ in range(3 + options.steps):
        since = time.perf_counter()
        outcome = step.exchange(step.forward_backward(microbatches(rows, plan.microbatch, NO_END, world.device)))
        step.apply(step.update(outcome, 1e-4))
        clock.lap()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - since)
        print(f"step {len(seconds)}: {seconds[-1]:.3f} s", flush=True)
    timed = statistics.median(seconds[3:])
    rate = options.rows * options.seq_len / timed
    flops = train_flops_per_token(run.model, options.seq_len)
    mfu = rate * flops / options.peak_tflops / 1e12
    found = {"first_s": seconds[0], "median_s": timed, "tokens_per_s": rate, "mfu": mfu}
    if world.device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    print(json.dumps(asdict(options) | found), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
