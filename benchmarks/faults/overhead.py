"""What watching a healthy run costs: fingerprints, heartbeat, copies in memory, as shares of its own steps.

    python benchmarks/faults/overhead.py RUN.toml [--train.steps 200 ...]

One run, compared with itself: with `resilience.fingerprint_every_steps = 2` every other step sums the bits of weights
and optimizer state, and those before and after it do not; copies in memory are in the accounts of the steps that follow
them. What a step writes into its page of heartbeat is timed by itself, and counted as often as a step writes. Only a
quiet machine gives figures that mean anything. It works in a folder of its own and leaves RUN's alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from argosy.observe.events import read_lines
from argosy.observe.heartbeat import Heartbeat

SKIPPED = 10
"""The first steps compile and warm up."""
WRITES = 12
"""Writes in a step: each phase that it enters, some of them for each microbatch; its number; how long it took."""
EVERY = 16
"""Steps between copies in memory, as by default where nothing is known of failures."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit((__doc__ or "").strip())
    with tempfile.TemporaryDirectory() as folder:
        steps = trained(Path(folder), sys.argv[1], sys.argv[2:])
        writing_s = heartbeat(Path(folder))
    plain = [record["step_time_s"] for record in steps if record["step"] % 2]
    watched = paired(steps)
    low, _, high = quantiles(watched, n=4)
    print(f"{len(steps)} steps of {1e3 * median(plain):.1f} ms (those without fingerprints)")
    print(f"fingerprints       {median(watched) - 1:+.2%} of a step (quartiles {low - 1:+.2%} to {high - 1:+.2%})")
    print(f"heartbeat        {WRITES * writing_s / median(plain):+.4%} ({1e6 * writing_s:.1f} us a write)")
    copy_s = median(record["seconds"]["checkpoint"] for record in steps if record["step"] % EVERY == 0)
    print(f"copies in memory   {copy_s / median(plain) / EVERY:+.2%} ({1e3 * copy_s:.1f} ms in {EVERY} steps)")


def trained(folder: Path, run: str, overrides: list[str]) -> list[dict[str, Any]]:
    """The lines of the steps that count, of a run made here."""
    settings = ["--resilience.fingerprint_every_steps", "2", "--resilience.memory_checkpoint_every_steps", str(EVERY)]
    settings += ["--checkpoint.every_steps", "0", "--checkpoint.every_minutes", "0", "--evaluate.every_steps", "0"]
    command = [sys.executable, "-m", "argosy", "train", run, "--run-dir", str(folder / "run"), *settings, *overrides]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return [r for r in read_lines(folder / "run" / "metrics.jsonl") if "step_time_s" in r and r["step"] >= SKIPPED]


def paired(steps: list[dict[str, Any]]) -> list[float]:
    """Each step with fingerprints over the mean of the two around it."""
    seconds = {record["step"]: record["step_time_s"] for record in steps}
    return [
        2 * seconds[step] / (seconds[step - 1] + seconds[step + 1])
        for step in seconds
        if step % 2 == 0 and {step - 1, step + 1} <= seconds.keys()
    ]


def heartbeat(folder: Path) -> float:
    """Seconds of one write."""
    heartbeat, writes = Heartbeat(folder), 10_000
    begin = time.perf_counter()
    for _ in range(writes):
        heartbeat.enter("forward")
    took_s = time.perf_counter() - begin
    heartbeat.close()
    return took_s / writes


if __name__ == "__main__":
    main()
