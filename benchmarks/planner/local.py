"""How true the planner's predictions are on this machine: real runs of 1 to 8 processes, on a cluster file of a probe.

    python benchmarks/planner/local.py                          # probes, runs all plans (minutes), prints a table
    python benchmarks/planner/local.py --cluster cluster.toml   # a probe that was made before
    python benchmarks/planner/local.py --write                  # also into benchmarks/results/planner_local.md

Each plan trains the same small model for some steps, with torch.compile off; a step's time is the mean of the middle
half of its steps, memory the peak of the first process beyond what it held before it made the model. "learnt" are the
predictions for the same plan by a cluster file that has learnt (`argosy plan --learn`) from all runs but its own. Wants
a quiet machine: what else runs makes steps longer, and nobody predicted that.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import tyro
from numpy.typing import NDArray

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.launch.local import train
from argosy.observe.report import Report
from argosy.plan.calibration import learn
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import resized
from argosy.plan.plan import Plan

Floats = NDArray[np.float64]

RESULTS = Path(__file__).resolve().parent.parent / "results" / "planner_local.md"
PLANS = (
    "microbatch=8",
    "microbatch=2",
    "microbatch=4,recompute=full",
    "dp_replicate=2,microbatch=4",
    "dp_shard=2,zero=1,microbatch=4",
    "dp_shard=2,microbatch=4",
    "tp=2,microbatch=4",
    "pp=2,microbatch=2",
    "cp=2,microbatch=4",
    "dp_replicate=4,microbatch=4",
    "dp_shard=4,microbatch=2",
    "dp_replicate=2,tp=2,microbatch=4",
    "dp_replicate=2,pp=2,microbatch=2",
    "pp=2,tp=2,schedule=gpipe,microbatch=4",
    "dp_replicate=8,microbatch=2",
    "dp_shard=4,tp=2,microbatch=2",
    "dp_replicate=2,pp=2,tp=2,microbatch=2",
)


@dataclass
class Options:
    cluster: Path | None = None
    """The cluster file of a probe on this machine; default: probe first, with a process for each core."""
    plans: tuple[str, ...] = PLANS
    """Layouts to run."""
    steps: int = 12
    """Steps of each run."""
    model: str = "llama-5m"
    """A model preset."""
    seq_len: int = 256
    global_batch: int = 16
    write: bool = False
    """Write the results file."""


@dataclass(frozen=True)
class Outcome:
    """The run of one plan."""

    plan: str
    report: Report
    learnt_step_s: float
    learnt_memory_bytes: float


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_all(options, Path(folder))
    words = in_words(options, outcomes, load_before)
    print(words)
    if options.write:
        RESULTS.write_text(words + "\n")
    return 0


def run_all(options: Options, folder: Path) -> list[Outcome]:
    """The runs of all plans, and the predictions for each that the other runs teach."""
    file = options.cluster or probe(options, folder / "cluster.toml")
    cluster = Cluster.load(file)
    plain = cluster.model_copy(update={"factors": {}})
    reports = []
    for i, plan in enumerate(options.plans):
        run = run_of(options, plan, file, folder)
        reports.append(train(run, folder / f"run-{i}", quiet=True))
        print(f"{plan:40} {reports[-1].step_time_s:.3f} s", file=sys.stderr)
    return [outcome(i, reports, plain) for i in range(len(reports))]


def probe(options: Options, file: Path) -> Path:
    """Return the machine, measured with the shapes of the model."""
    command = [sys.executable, "-m", "argosy", "probe", "--model", options.model, "--out", str(file)]
    subprocess.run([*command, "--processes", str(len(os.sched_getaffinity(0)))], check=True)
    return file


def run_of(options: Options, plan: str, cluster: Path, folder: Path) -> RunConfig:
    """Return a run on Python's own standard library, with little beside its steps."""
    return load(
        "demo",
        {
            "name": "local",
            "plan": f"{plan},precision=fp32,compile=false",
            "model.preset": options.model,
            "data.seq_len": options.seq_len,
            "data.prepare.out": str(folder / "data"),
            "data.prepare.max_text_bytes": 2_000_000,
            "data.prepare.vocab_size": 4096,
            "train.minutes": 0,
            "train.steps": options.steps,
            "train.global_batch": options.global_batch,
            "evaluate.every_steps": 0,
            "evaluate.tokens": options.seq_len * options.global_batch,
            "checkpoint.every_minutes": 0,
            "launch.processes": Plan.parse(plan).world_size,
            "launch.device": "cpu",
            "launch.cluster": str(cluster.resolve()),
        },
    )


def outcome(i: int, reports: Sequence[Report], plain: Cluster) -> Outcome:
    """Return run `i`, and the prediction for it by a cluster that learnt from the other runs."""
    mine = reports[i]
    others = [report.run_dir for report in reports if report is not mine]
    taught = learn(others, plain) if others else plain
    plan, run = Plan.load(mine.run_dir / "plan.toml"), load(mine.run_dir / "run.toml")
    learnt = predict(plan, run, resized(taught, plan.world_size))
    return Outcome(str(plan), mine, float(learnt.step_s.mid), float(learnt.memory_bytes.mid))


def in_words(options: Options, outcomes: Sequence[Outcome], load_before: float) -> str:
    """Return the results file."""
    rows = [row(outcome) for outcome in outcomes]
    return "\n".join(
        [
            f"# Predicted and measured on one machine, {date.today().isoformat()}",
            "",
            f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}; load {load_before:.1f} before "
            f"the first run. {options.model}, {options.global_batch} sequences of {options.seq_len} tokens a step, "
            f"fp32, not compiled, {options.steps} steps, {outcomes[0].report.software}.",
            "",
            "| | step | step, learnt | memory | memory, learnt |",
            "|---|--:|--:|--:|--:|",
            *summary(outcomes),
            "",
            "| plan | step: predicted | measured | learnt | memory: predicted | measured | learnt |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *rows,
        ]
    )


def row(outcome: Outcome) -> str:
    step_s, memory = compared(outcome.report)
    plan = outcome.plan.replace(",precision=fp32,compile=false", "")
    times = [f"{seconds:.3f} s" for seconds in (*step_s, outcome.learnt_step_s)]
    sizes = [f"{size / 1e6:.0f} MB" for size in (*memory, outcome.learnt_memory_bytes)]
    return f"| `{plan}` | {' | '.join([*times, *sizes])} |"


def compared(report: Report) -> tuple[tuple[float, float], tuple[float, float]]:
    """Predicted and measured step and memory."""
    assert report.predicted is not None
    step_s, memory = report.predicted.step_s, report.predicted.memory_bytes
    return (step_s.predicted, step_s.measured), (memory.predicted, memory.measured)


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Return median error, bias, rank correlation and coverage of each kind of prediction."""
    pairs = [compared(outcome.report) for outcome in outcomes]
    measured = [np.array([pair[kind][1] for pair in pairs]) for kind in (0, 1)]
    columns = [
        (np.array([pair[0][0] for pair in pairs]), measured[0]),
        (np.array([outcome.learnt_step_s for outcome in outcomes]), measured[0]),
        (np.array([pair[1][0] for pair in pairs]), measured[1]),
        (np.array([outcome.learnt_memory_bytes for outcome in outcomes]), measured[1]),
    ]
    figures = {
        "median error": [f"{100 * np.median(np.abs(p / m - 1)):.1f} %" for p, m in columns],
        "bias (median of predicted over measured)": [f"{100 * (np.median(p / m) - 1):+.1f} %" for p, m in columns],
        "Kendall tau": [f"{tau(p, m):.2f}" for p, m in columns],
    }
    return [f"| {name} | {' | '.join(cells)} |" for name, cells in figures.items()]


def tau(predicted: Floats, measured: Floats) -> float:
    """Return Kendall's rank correlation: pairs in the same order less the others, over all."""
    i, j = np.triu_indices(len(predicted), 1)
    return float(np.mean(np.sign(predicted[i] - predicted[j]) * np.sign(measured[i] - measured[j]))) if len(i) else 1.0


def cpu_name() -> str:
    """Return the kernel's name of the processor."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


if __name__ == "__main__":
    sys.exit(main())
