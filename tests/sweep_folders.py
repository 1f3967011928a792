"""Sweeps of the tiny run: their files, what they have found, and how they are started and ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from argosy.observe.events import read_lines
from commands import Folder

FAST = "trials = 2\ncores = 2\n"


def write(folder: Folder, text: str, steps: int = 12) -> Path:
    """Write a sweep of the tiny run, with the folder's corpus."""
    folder.write_run(steps=steps, every_steps=2, processes=1)
    (folder.path / "lr.toml").write_text(f'run = "run.toml"\n{text}\n[parallel]\n{FAST}')
    return folder.path / "sweeps" / "lr"


def result(folder: Folder) -> dict[str, Any]:
    found: dict[str, Any] = folder.documents("sweep", "lr.toml", "--show")[0]
    return found


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]


def starts(run_dir: Path) -> list[int]:
    """The steps at which a trial's processes began."""
    events = read_lines(run_dir / "events" / "rank-0.jsonl")
    return [event["step"] for event in events if event["event"] == "start"]


@contextmanager
def sweeps_of(folder: Folder) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start sweeps. At the end, end them and the trials that they have left."""
    begun: list[subprocess.Popen[str]] = []

    def start(*words: str, **variables: str) -> subprocess.Popen[str]:
        begun.append(folder.start("sweep", "lr.toml", *words, **variables))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.communicate()
    for lock in folder.path.glob("sweeps/lr/[0-9]*/.lock"):
        if (pid := lock.read_text().strip()) and Path(f"/proc/{pid}").exists():
            os.kill(int(pid), signal.SIGKILL)
