"""Two processes of which one gets a share of the processor's time: even work, dealt by measured speed, by predicted.

    python benchmarks/uneven.py [--duty 0.33] [--period-ms 12] [--steps 36] [--out FILE.md]

The second process is stopped and continued (SIGSTOP, SIGCONT) such that it runs for `--duty` of the time, as on a
device so much slower. Two replicas have shares of the microbatches, two pipeline stages have layers. Each is trained
three times: even; with `resilience.rebalance`, which finds the shares, or moves the layers in the run; and from the
start with what the planner chooses for a cluster of two devices with these speeds. The planner's figures use the
matmul rate that the run measured, and no other measurement. Speed is the median of the last steps. It prints a Markdown
table, and all figures as JSON; four minutes with 36 steps on two cores. Only a quiet machine gives figures that mean
anything.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from os import kill
from pathlib import Path
from typing import Any

import numpy as np
import torch

import argosy
from argosy.config.data import PrepareConfig
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.data.prepare import prepare
from argosy.observe.events import each_line, read_lines
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.heterogeneous import uneven_splits
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.plan.hardware.devices import Efficiencies, PeakFlops, find_device
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan

WORDS = "microbatch=1,precision=fp32,compile=false"
EVEN = {"microbatches": f"dp_replicate=2,{WORDS}", "layers": f"pp=2,layers=3:3,{WORDS}"}
"""What is dealt out -> the plan that does it evenly."""
WAYS = ("even", "rebalanced", "planned")
LAST = 8
"""Steps at a run's end that are measured."""
LONG = 2000
"""Steps of a run that is paused after some: for a move of layers that pays in the steps that are left."""


@dataclass(frozen=True)
class Trained:
    """What a run showed."""

    tokens_per_s: float
    plan: str
    """The plan at its end."""
    flops_per_s: float
    """Rate of a matmul in one process, before any was slowed down."""
    told: list[dict[str, Any]]
    """Events that deal work out anew."""


def main() -> None:
    """Print a line for each way, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duty", type=float, default=0.33, help="share of the time that the second process runs")
    parser.add_argument("--period-ms", type=float, default=12.0, help="from one stop to the next; a microbatch has 20")
    parser.add_argument("--steps", type=int, default=36, help="of each run")
    parser.add_argument("--out", type=Path, help="write the table there too")
    options = parser.parse_args()
    lines = [
        f"Process 1 runs {options.duty:.0%} of the time; {options.steps} steps, {platform.machine()}, "
        f"torch {torch.__version__}, Python {platform.python_version()}.",
        "",
        "| dealt out | way | plan at the end | tokens/s | x even | predicted x even |",
        "|---|---|---|---|---|---|",
    ]
    figures: dict[str, Any] = {"duty": options.duty, "steps": options.steps}
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        text = (str(Path(argosy.__file__).parent),)
        prepare(PrepareConfig(out=top / "data", input=text, vocab_size=1024, validation_fraction=0.1, processes=1))
        for what in EVEN:
            of_ways, predicted = compared(what, options, top)
            even = of_ways["even"].tokens_per_s
            for way, found in of_ways.items():
                times = 1.0 if way == "even" else predicted["gain"]
                plan = found.plan.removesuffix(f",{WORDS}").replace(f"{WORDS.split(',', maxsplit=1)[0]},", "")
                lines.append(
                    f"| {what} | {way} | `{plan}` | {found.tokens_per_s:,.0f} | {found.tokens_per_s / even:.2f} "
                    f"| {times:.2f} |"
                )
                print(lines[-1], flush=True)
            figures[what] = {
                **{way: found.tokens_per_s for way, found in of_ways.items()},
                "told": of_ways["rebalanced"].told,
                **predicted,
            }
    print("\n" + "\n".join(lines))
    print(json.dumps(figures))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


def compared(what: str, options: argparse.Namespace, top: Path) -> tuple[dict[str, Trained], dict[str, Any]]:
    """Return the runs of each way, and what the planner predicts."""
    even = trained(options, top / what / "even", top / "data", EVEN[what], rebalance=False)
    run = load(top / what / "even" / "run.toml")
    predicted = predictions(what, run, even.flops_per_s, options.duty)
    rebalanced = trained(options, top / what / "rebalanced", top / "data", EVEN[what], rebalance=True)
    planned = trained(options, top / what / "planned", top / "data", str(predicted["plan"]), rebalance=False)
    return dict(zip(WAYS, (even, rebalanced, planned), strict=True)), predicted


def trained(options: argparse.Namespace, run_dir: Path, data: Path, plan: str, rebalance: bool) -> Trained:
    """Train in two processes, of which that of rank 1 is slowed down once the first step is made."""
    keys = {
        "model.preset": "llama-5m", "data.seq_len": 64, "train.global_batch": 16, "train.steps": LONG,
        "train.pause_at": options.steps, "evaluate.every_steps": 0, "checkpoint.every_minutes": 0,
        "launch.processes": 2, "launch.device": "cpu", "resilience.rebalance": str(rebalance).lower(),
        "resilience.straggler_steps": 8, "resilience.straggler_s": 3, "resilience.migrate": "false",
    }  # fmt: skip
    command = [sys.executable, "-m", "argosy", "train", "demo", "--run-dir", str(run_dir), "--plan", plan]
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command += ["--data.sources", str(data), "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while steps_of(run_dir) == 0 and process.poll() is None:
            time.sleep(0.1)
        slow_down(run_dir, process, options.duty, options.period_ms / 1e3)
    finally:
        process.kill()
    if process.wait():
        raise SystemExit(f"{run_dir}: the run failed")
    events = [e for path in (run_dir / "events").glob("*.jsonl") for e in each_line(path)]
    last = [line for line in each_line(run_dir / "metrics.jsonl") if "step_time_s" in line][-LAST:]
    start = min((e for e in events if e["event"] == "start"), key=lambda e: e["time_s"])
    told = [e for e in events if e["event"] in ("rebalanced", "migrated", "stayed", "migration_measured")]
    return Trained(
        statistics.median(line["tokens_per_s"] for line in last),
        str(Plan.load(run_dir / "plan.toml")),
        start["peak_flops"] / 2,
        sorted(told, key=lambda e: e["time_s"]),
    )


def slow_down(run_dir: Path, process: subprocess.Popen[bytes], duty: float, period_s: float) -> None:
    """Let the process of rank 1 run for `duty` of each period, until the run ends."""
    pid = pid_of_rank_1(run_dir)
    with suppress(ProcessLookupError):  # it has ended
        while process.poll() is None:
            time.sleep(duty * period_s)
            kill(pid, signal.SIGSTOP)
            try:
                time.sleep((1 - duty) * period_s)
            finally:
                kill(pid, signal.SIGCONT)
    process.wait()


def pid_of_rank_1(run_dir: Path) -> int:
    """Return the process of rank 1; it stays the same where layers move."""
    (world, *_) = [e for e in read_lines(run_dir / "events" / "coordinator.jsonl") if e["event"] == "generation"]
    (place,) = [place for place, rank in world["ranks"].items() if rank == 1]
    started = [e for e in read_lines(run_dir / "events" / "launcher.jsonl") if e["event"] == "worker_started"]
    return next(int(e["pid"]) for e in started if e["slot"] == int(place.rpartition("/")[2]))


def steps_of(run_dir: Path) -> int:
    """Return how many steps the run has made."""
    metrics = run_dir / "metrics.jsonl"
    return sum("loss" in line for line in each_line(metrics)) if metrics.exists() else 0


def predictions(what: str, run: RunConfig, flops_per_s: float, duty: float) -> dict[str, Any]:
    """Return the planner's choice for two devices, one of which is `duty` times as fast, and what it is to gain."""
    cpu, sure = find_device("cpu"), Efficiencies(fp32=1.0)
    rates = (flops_per_s, duty * flops_per_s)
    fast, slow = (
        cpu.model_copy(update={
            "name": f"CPU {rate:.3g}", "peak_flops_per_s": PeakFlops(fp32=rate), "matmul_efficiency": sure,
            "memory_bytes_per_s": cpu.memory_bytes_per_s * rate / flops_per_s, "devices_per_node": 1,
        })
        for rate in rates
    )  # fmt: skip
    groups = tuple(NodeGroup(device=device, nodes=1, devices_per_node=1) for device in (fast, slow))
    costs = CostModel.of(run, Cluster(groups=groups))
    even = Plan.parse(EVEN[what])
    even_s = float(np.asarray(costs.predict_time(Layouts.of([even])).total)[0])
    split = next(s for s in uneven_splits(costs, [even]) if s.what == what)
    return {"plan": split.plan, "even_s": even_s, "uneven_s": split.step_s, "gain": even_s / split.step_s}


if __name__ == "__main__":
    main()
