"""An hour of a run that nobody disturbs: nothing is to be found wrong with it.

    python benchmarks/faults/healthy.py RUN.toml --minutes 60 [--train.steps 100000 ...]

Trains RUN in a folder of its own, with the options that follow, until the minutes are over or its last step is made,
stops it as a user would, and reads what it left: its event log must have no event but those of a healthy life
(`EXPECTED`), nobody may have been replaced, and every sample was trained on once. Prints what it saw; the exit code
is 0 only if that is nothing.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from argosy.chaos.run import read_ledger
from argosy.checkpoint import store
from argosy.observe.events import read_lines

EXPECTED = {
    "worker_started", "coordinator_started", "agent_came", "agent_left", "node_checked", "generation", "finish",
    "signal", "start", "end", "length", "memory_checkpoint_interval", "recovered", "resume", "save", "verified",
    "prune", "drained", "settled",
}  # fmt: skip
"""Events of a healthy life. Whatever else there is tells of a fault, or of what was taken for one."""
GRACE_S = 120.0
SKIPPED = 10
"""The first steps compile and warm up."""


@dataclass(frozen=True)
class Seen:
    """What a run left behind."""

    events: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    checkpoints: int
    """Verified ones that are there."""

    @property
    def problems(self) -> list[str]:
        """What should not be there."""
        found = [f"{event['event']}: {event}" for event in self.events if event["event"] not in EXPECTED]
        found += list(read_ledger(self.steps).problems)
        if (worlds := sum(event["event"] == "generation" for event in self.events)) != 1:
            found.append(f"{worlds} worlds were formed")
        if len(self.steps) <= SKIPPED:
            found.append(f"only {len(self.steps)} steps were made")
        if not self.checkpoints:
            found.append("no checkpoint was verified")
        return found

    def in_words(self) -> str:
        """What a person wants to know of it."""
        lines = [f"{len(self.steps)} steps; events: {dict(Counter(event['event'] for event in self.events))}"]
        took_s = [step["step_time_s"] for step in self.steps[SKIPPED:]]
        if len(took_s) > 1:
            low, high = quantiles(took_s, n=100)[0], quantiles(took_s, n=100)[-1]
            typical = f"{1e3 * median(took_s):.1f} ms, 1 % under {1e3 * low:.1f}, 1 % over {1e3 * high:.1f}"
            lines.append(f"steps take {typical}; the longest {1e3 * max(took_s):.1f}")
        lines += self.problems or ["silence: nothing was found wrong"]
        return "\n".join(lines)


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0].startswith("-"):
        sys.exit((__doc__ or "").strip())
    minutes = 60.0
    if "--minutes" in words:
        at = words.index("--minutes")
        minutes = float(words[at + 1])
        del words[at : at + 2]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        train(run_dir, words, 60 * minutes)
        seen = look(run_dir)
    print(seen.in_words())
    sys.exit(bool(seen.problems))


def train(run_dir: Path, words: list[str], seconds: float) -> None:
    """Train for so long at most. Raises: CalledProcessError if the run ends otherwise than by its end or our signal."""
    command = [sys.executable, "-m", "argosy", "train", *words, "--run-dir", str(run_dir)]
    process = subprocess.Popen(command, stdout=sys.stderr)
    end = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.5)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait(GRACE_S)
    finally:
        process.kill()
        process.wait()
    if code not in (0, 128 + signal.SIGTERM):
        raise subprocess.CalledProcessError(code, command)


def look(run_dir: Path) -> Seen:
    """Read what the run left."""
    events = [event for path in sorted((run_dir / "events").glob("*.jsonl")) for event in read_lines(path)]
    steps = [record for record in read_lines(run_dir / "metrics.jsonl") if "loss" in record]
    whole = [checkpoint for checkpoint in store.committed(run_dir) if checkpoint.is_verified]
    return Seen(sorted(events, key=lambda event: event["time_s"]), steps, len(whole))


if __name__ == "__main__":
    main()
