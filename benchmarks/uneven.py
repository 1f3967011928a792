"""Two replicas of which one gets a share of the processor's time: even shares, those measured, those predicted.

    python benchmarks/uneven.py [--duty 0.33] [--steps 40]

Process 1 is stopped and continued (SIGSTOP, SIGCONT) such that it runs for `--duty` of the time, as on a device so much
slower. The same run is trained three times: even, with `resilience.rebalance`, and from the start with the shares that
the planner chooses for a cluster of two devices with these speeds. The planner's figures use the matmul rate that the
run measured, and no other measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import argosy
from argosy.config.data import PrepareConfig
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.data.prepare import prepare
from argosy.observe.events import each_line
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.heterogeneous import uneven_splits
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.plan.hardware.data_sheet import Efficiencies, PeakFlops
from argosy.plan.hardware.devices import find_device
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan

EVEN = "dp_replicate=2,microbatch=1,precision=fp32,compile=false"
PERIOD_S = 0.06
"""Of one stop and go: a fraction of a microbatch."""
LAST = 12
"""Steps at a run's end that are measured."""


def main() -> None:
    """Print one line for each way, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duty", type=float, default=0.33)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        text = (str(Path(argosy.__file__).parent),)
        prepare(PrepareConfig(out=top / "data", input=text, vocab_size=1024, validation_fraction=0.1, processes=1))
        even, flops = trained(options, top / "even", EVEN, rebalance=False)
        predicted = predictions(load(top / "even" / "run.toml"), flops, options.duty)
        measured, _ = trained(options, top / "rebalanced", EVEN, rebalance=True)
        chosen, _ = trained(options, top / "planned", str(predicted["plan"]), rebalance=False)
        told = [e for e in each_line(top / "rebalanced" / "events" / "rank-0.jsonl") if e["event"] == "rebalanced"]
    found = {
        "duty": options.duty,
        "even_tokens_per_s": even,
        "rebalanced_tokens_per_s": measured,
        "planned_tokens_per_s": chosen,
        "rebalanced": [{k: e[k] for k in ("step", "shares", "step_s", "predicted_s", "microbatch_s")} for e in told],
        **predicted,
    }
    for name in ("even", "rebalanced", "planned"):
        speed = found[f"{name}_tokens_per_s"]
        print(f"{name:11} {speed:8.0f} tokens/s  {speed / even:5.2f} x even")
    print(f"predicted   {predicted['gain']:5.2f} x even with {predicted['plan']}")
    print(json.dumps(found))


def trained(options: argparse.Namespace, run_dir: Path, plan: str, rebalance: bool) -> tuple[float, float]:
    """Train in two processes, the second slowed down; return tokens per second of the last steps, and FLOP/s of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = {
        "model.preset": "llama-5m", "data.seq_len": 64, "train.global_batch": 16, "train.steps": options.steps,
        "evaluate.every_steps": 0, "checkpoint.every_minutes": 0, "resilience.rebalance": str(rebalance).lower(),
    }  # fmt: skip
    command = [sys.executable, "-m", "argosy", "train", "demo", "--run-dir", str(run_dir), "--plan", plan]
    command += [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command += ["--data.sources", str(run_dir.parent / "data"), "1"]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() and all(rank.poll() is None for rank in ranks):
        time.sleep(0.1)
    while all(rank.poll() is None for rank in ranks):
        time.sleep(options.duty * PERIOD_S)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep((1 - options.duty) * PERIOD_S)
        ranks[1].send_signal(signal.SIGCONT)
    if any(rank.wait() for rank in ranks):
        raise SystemExit(f"{run_dir}: a process failed")
    lines = [line for line in each_line(metrics) if "step_time_s" in line][-LAST:]
    start = next(e for e in each_line(run_dir / "events" / "rank-0.jsonl") if e["event"] == "start")
    return statistics.median(line["tokens_per_s"] for line in lines), start["peak_flops"] / 2


def predictions(run: RunConfig, flops_per_s: float, duty: float) -> dict[str, Any]:
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
    even = Plan.parse(EVEN)
    even_s = float(costs.predict_time(Layouts.of([even])).total[0])  # type: ignore[index]
    split = next(s for s in uneven_splits(costs, [even]) if s.what == "microbatches")
    return {"plan": split.plan, "even_s": even_s, "uneven_s": split.step_s, "gain": even_s / split.step_s}


if __name__ == "__main__":
    main()
