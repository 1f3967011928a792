"""Processor time and memory that reading a long run's metrics.jsonl takes: each reader in a process of its own.

    python benchmarks/metrics.py [--steps 1000000] [--json]

watch    the coordinator's first look, when it starts late in the run
resume   lines of lost steps are dropped, and those that the bad-step policy compares with are read
result   the last loss on held-out text, as `argosy scaling` reads it
report   the totals at the run's end, the only one that needs all lines
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from argosy.observe.events import from_the_end
from argosy.observe.line_follower import LineFollower

LOST = 10
"""Steps that are run again on resuming."""


def watch(run_dir: Path) -> None:
    """As `supervise.watch` does."""
    assert LineFollower.near_end(run_dir / "metrics.jsonl").take()


def resume(run_dir: Path) -> None:
    """As `training.saving` and `training.records` do."""
    from argosy.observe.events import Metrics

    metrics = Metrics(run_dir)
    metrics.forget_from(metrics.last(1)[0]["step"] + 1 - LOST)
    assert len(metrics.last(128)) == 128


def result(run_dir: Path) -> None:
    """As `compare.results` does."""
    assert next(record for record in from_the_end(run_dir / "metrics.jsonl") if "validation_loss" in record)


def report(run_dir: Path) -> None:
    """As `training.summary` does."""
    from argosy.observe.events import Metrics
    from argosy.observe.report import totals, typical
    from argosy.training.summary import StepFigures

    measured = StepFigures(0)
    assert totals(measured.steps(Metrics(run_dir)))
    assert typical(list(measured.newest))


READERS: dict[str, Callable[[Path], None]] = {read.__name__: read for read in (watch, resume, result, report)}


def write(path: Path, steps: int) -> None:
    """Write lines as a run of eight ranks on a CPU does, with an evaluation every 100 steps."""
    seconds = {
        "checkpoint": 1.7e-05, "data": 0.00114, "forward": 0.014457, "backward": 0.011733, "communication": 0.004849,
        "optimizer": 0.011753, "other": 0.009537, "step": 0.053486,
    }  # fmt: skip
    with path.open("w") as file:
        for step in range(steps):
            record = {
                "step": step, "tokens": 256 * (step + 1), "loss": 5.95733118057251, "grad_norm": 0.7165771580867467,
                "lr": 0.01, "first_sample": 8 * step, "samples": 8, "step_time_s": 0.05 + step % 97 / 1e5,
                "tokens_per_s": 4787.8, "mfu": 0.0047, "memory_bytes": 311390208, "seconds": seconds,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
            if step % 100 == 99:
                file.write(json.dumps({"step": step, "validation_loss": 5.5, "bits_per_byte": 4.2}) + "\n")


def main() -> None:
    """Run each reader on one file, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        if options.reader in ("resume", "report"):
            import argosy.training.summary  # noqa: F401  (torch, which takes most of the time and memory)
        began_s, before = time.process_time(), _peak_mb()
        READERS[options.reader](options.run_dir)
        print(json.dumps({"seconds": round(time.process_time() - began_s, 3), "mb": round(_peak_mb() - before, 1)}))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "metrics.jsonl", options.steps)
        for reader in READERS:
            command = [sys.executable, __file__, "--reader", reader, "--run-dir", folder]
            found[reader] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if options.json:
        print(json.dumps({"steps": options.steps, **found}))
        return
    for reader, took in found.items():
        print(f"{reader:8} {took['seconds']:8.3f} s {took['mb']:8.1f} MB beside what its imports take")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
