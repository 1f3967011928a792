"""Run the real train step of any rank of any world without devices, and show what it allocates, computes and sends.

The step runs on tensors without memory, in a world without other ranks. Memory and bytes on the wire are exact, to the
byte, for the eager step: nothing is compiled (plan.compile has no effect). Experts get even loads. Times follow
from the rates and links of --cluster, and are a best case.

--model PRESET, --global-batch N and --seq-len N are short for --model.preset, --train.global-batch and --data.seq-len.
What the plan leaves open is chosen as for GPUs; without RUN, all other keys are those of the built-in demo.

--device cuda runs the step on tensors of a GPU that is not there, and tells what no CPU shows: tensors on the wrong
device (then it fails), each wait of the host for the device with its place in the code, and memory that two streams use
with no event between. There are then no figures of memory, FLOPs, bytes and time.

Examples:
  argosy simulate run.toml --plan "tp=2,dp_shard=4"     rank 0 of 8
  argosy simulate --model llama3-70b --plan "tp=8,pp=4,dp_shard=2" \\
      --global-batch 64 --seq-len 8192 --world-size 64
  argosy simulate run.toml --rank 5 --trace step.json   a timeline, for ui.perfetto.dev
  argosy simulate run.toml --all-stages --json          one rank of each pipeline stage, and the bubble between them
  argosy simulate run.toml --device cuda --json         where the host would wait for a GPU
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.documents import answer, write_file
from argosy.cli.options import TrustCode, parse_run
from argosy.config.launch import DeviceType
from argosy.errors import RunFailed, UserError
from argosy.extend.loading import check_approved

if TYPE_CHECKING:
    from argosy.config.schema import RunConfig
    from argosy.plan.plan import Plan
    from argosy.simulate.simulate import SimulatedRecord

SIMULATE_SHORT = {"--model": "--model.preset", "--global-batch": "--train.global-batch", "--seq-len": "--data.seq-len"}
"""Short options -> the keys of a run that they stand for."""
SIMULATE_IDLE_KEYS = (
    *("name", "model.weights", "data.prepare.input", "data.sources", "train.steps", "train.minutes", "train.epochs"),
    *("evaluate.every_steps", "checkpoint.every_steps", "launch.processes", "seed"),
)
"""Keys without effect on a simulated step."""


@dataclass(frozen=True)
class Options:
    world_size: int | None = None
    """Number of all ranks; none: as many as the plan is for."""
    rank: int = 0
    """Rank to simulate."""
    all_stages: bool = False
    """Also simulate the ranks at the same place in all other pipeline stages."""
    cluster: str | None = None
    """Cluster for the timeline and for what the plan leaves open: NxDEVICE, a file or a preset; none: H100s in nodes of
    8."""
    trace: Path | None = None
    """Write the timeline to this file, in the format of Chrome and Perfetto."""
    device: DeviceType = "cpu"
    """Device that the step is simulated on: cpu, for figures, or cuda, to tell where the host waits for a GPU, what is
    misplaced and which streams race."""
    trust_code: TrustCode = False
    json: bool = False
    """Print JSON, a rank a line."""


def main(argv: list[str]) -> None:
    options, run = parse_run(list(map(_in_full, argv)), "argosy simulate", Options, idle=SIMULATE_IDLE_KEYS)
    check_approved(run.extend.code, options.trust_code)
    if options.world_size is not None and options.world_size < 1:
        raise UserError(f"--world-size {options.world_size}: must be at least 1. Leave it out for that of the plan.")
    from argosy.plan.hardware.clusters import Cluster
    from argosy.plan.hardware.local_machine import cores_here
    from argosy.simulate.simulate import nodes_for, ranks_of_stages, settle, simulate
    from argosy.simulate.timeline import chrome_trace

    named = Cluster.parse(options.cluster) if options.cluster else None
    run, plan = settle(run, options.world_size, named)
    if not 0 <= options.rank < plan.world_size:
        raise UserError(f"--rank {options.rank}: there are ranks 0 to {plan.world_size - 1}. Try --rank 0.")
    cluster = named or nodes_for(plan.world_size)
    ranks = ranks_of_stages(plan, options.rank) if options.all_stages else [options.rank]
    if options.device != "cpu":
        _on_cuda(plan, run, ranks, options)
        return
    found = simulate(plan, run, ranks, cluster, processes=cores_here())
    if options.trace is not None:
        write_file(options.trace, chrome_trace({one.record.rank: one.timeline for one in found}), "--trace")
    answer(
        options.json,
        "simulate",
        "\n\n".join([*(_in_words(one.record) for one in found), *cluster.device.caveats]),
        *(one.record for one in found),
    )


def _on_cuda(plan: Plan, run: RunConfig, ranks: list[int], options: Options) -> None:
    """Print what each rank does on a GPU. Raises: UserError, or RunFailed if tensors of two devices meet."""
    from argosy.accelerator import NVIDIA
    from argosy.simulate.on_cuda import step_on_cuda

    if options.device != NVIDIA:
        raise UserError(f"--device {options.device}: a step is simulated on cpu or {NVIDIA}. Try --device {NVIDIA}.")
    if options.trace is not None:
        raise UserError("--trace: --device cuda has no times to draw. Leave out one of the two.")
    found = [step_on_cuda(plan, run, rank) for rank in ranks]
    answer(options.json, "simulate-cuda", "\n\n".join(map(str, found)), *found)
    if any(one.misplaced for one in found):
        raise RunFailed("tensors of two devices meet in the step: it would fail on a GPU.")


def _in_full(word: str) -> str:
    name, equals, value = word.partition("=")
    return SIMULATE_SHORT.get(name, name) + equals + value


def _in_words(found: SimulatedRecord) -> str:
    from argosy.plan.cost.estimate import seconds
    from argosy.simulate.record import StepPlace

    memory, time = found.memory, found.time
    waited = ", ".join(f"{axis} {seconds(waited)}" for axis, waited in sorted(time.waited_s.items())) or "nothing"
    host = f", {_size(memory.host_bytes)} on the host" if memory.host_bytes else ""
    flops = {phase: count for phase, count in found.flops.items() if phase != "total"}
    return "\n".join(
        [
            f"rank {found.rank} of {found.plan}",
            f"memory   {_size(memory.peak_bytes)} at the peak, in {StepPlace(memory.peak_phase, memory.peak_layer)}; "
            f"{_size(memory.held_bytes)} between steps{host}",
            *(f"  {category:12} {_size(size):>10}" for category, size in _largest_first(memory.at_peak)),
            f"FLOPs    {found.flops['total']:.4g} a step: "
            + ", ".join(f"{phase} {count:.3g}" for phase, count in _largest_first(flops)),
            "sent in a step",
            *(
                f"  {sent.axis:12} {sent.collective:15} {_size(sent.bytes):>10}  {sent.messages:>6} messages"
                for sent in sorted(found.traffic, key=lambda sent: -sent.bytes)
            ),
            f"time     {seconds(time.step_s)} at best: {seconds(time.compute_s)} of work; waits for {waited}",
            f"simulated in {found.tracing_s:.1f} s",
        ]
    )


def _largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
