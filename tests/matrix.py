"""A run that is disturbed, and what must hold of it afterwards whatever happened."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from argosy.checkpoint import store
from argosy.observe.events import read_lines
from argosy.observe.ledger import read_ledger
from commands import Folder

STEPS = 24
SEEN_S, AGAIN_S = 1.0, 10.0
"""A death is seen within, and steps are made again within."""


def plan_text(plan: str) -> str:
    return f"{plan},precision=fp32,compile=false"


@dataclass
class Disturbed:
    """A run of the tiny model under a plan, with faults inside (`ARGOSY_FAULTS`) and from outside."""

    folder: Folder
    plan: str = "dp_replicate=2,microbatch=2"
    faults: str = ""
    options: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = field(default=None, init=False)
    text: str = field(default="", init=False)

    @property
    def run_dir(self) -> Path:
        return self.folder.path / "runs/tiny"

    def start(self) -> Disturbed:
        if not (self.folder.path / "run.toml").exists():
            run = self.folder.write_run(steps=STEPS, every_steps=5, processes=2)
            text = run.read_text()
            text = re.sub(r'plan = ".*"', f'plan = "{plan_text(self.plan)}"', text)
            run.write_text(
                text.replace("processes = 2\n", "").replace("every_steps = 5\ntokens", "every_steps = 0\ntokens")
            )
        words = [*("train", "run.toml", "--resilience.memory_every_steps", "2"), *self.options]
        self.process = self.folder.start(*words, ARGOSY_FAULTS=self.faults)
        return self

    def end(self, code: int = 0, timeout_s: float = 120) -> Disturbed:
        assert self.process is not None
        out, err = self.process.communicate(timeout=timeout_s)
        self.text = out + err
        assert self.process.returncode == code, f"exit code {self.process.returncode}\n{self.text}"
        return self

    def steps(self) -> int:
        return len(self.records())

    def records(self) -> list[dict[str, Any]]:
        return [r for r in read_lines(self.run_dir / "metrics.jsonl") if "loss" in r]

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records()]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = [e for path in (self.run_dir / "events").glob("*.jsonl") for e in read_lines(path)]
        return sorted((e for e in found if e["event"] in kinds), key=lambda e: e["time_s"])

    def wait_for_step(self, step: int, seconds: float = 60) -> Disturbed:
        self.wait_until(lambda: self.steps() > step, seconds)
        return self

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        assert self.process is not None
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited too long\n{self._story()}"
            assert self.process.poll() is None, f"the run ended\n{self._story()}"
            time.sleep(0.01)

    def pids(self) -> dict[int, int]:
        """Rank -> pid, in the newest epoch."""
        ranks = self.events("epoch")[-1]["ranks"]
        started = {e["slot"]: e["pid"] for e in self.events("worker_started")}
        return {rank: started[int(place.rpartition("/")[2])] for place, rank in ranks.items()}

    def send(self, rank: int, number: signal.Signals) -> int:
        pid = self.pids()[rank]
        os.kill(pid, number)
        return pid

    def weights(self) -> dict[str, str]:
        """Checksums of all tensors of the newest checkpoint."""
        choice = store.newest_whole(self.run_dir)
        assert choice is not None
        tensors: dict[str, Any] = {}
        for path in sorted(choice.checkpoint.folder.glob("*.safetensors")):
            tensors |= {f"{name}": array for name, array in load_file(path).items()}
        return {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in tensors.items() if "rng." not in name}

    def check_promises(self, undisturbed: Disturbed) -> None:
        """What holds after every fault of a run that ended well."""
        assert self.losses() == undisturbed.losses(), self._story()
        assert self.weights() == undisturbed.weights()
        ledger = read_ledger(self.records())
        assert not ledger.problems and ledger.committed == STEPS * 8, ledger
        assert "whole" in self.folder.argosy("checkpoint", "verify", self.run_dir)
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """No process of the run, and nothing of it in memory."""
        assert not self.processes(), self.processes()
        agents = [e["pid"] for e in self.events("coordinator_started")] + self._all_pids()
        left = [p.name for p in Path("/dev/shm").iterdir() if any(str(pid) in p.name.split("-") for pid in agents)]
        assert not left, left

    def processes(self) -> list[str]:
        """Command lines of what works for this run."""
        end = time.monotonic() + 12  # a coordinator without agents ends after ten seconds
        while found := list(self._processes()):
            if time.monotonic() > end:
                return found
            time.sleep(0.1)
        return []

    def _processes(self) -> Any:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            except OSError:
                continue
            if str(self.run_dir).encode() in words and int(path.name) != os.getpid():
                yield (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()

    def _all_pids(self) -> list[int]:
        return [e["pid"] for e in self.events("worker_started")]

    def _story(self) -> str:
        kinds = ("epoch", "break", "worker_died", "killed", "recovered", "resume", "finish", "fault", "replan")
        return self.text[-3000:] + "\n".join(json.dumps(e) for e in self.events(*kinds))

    def time_to(self, began_s: float, *kinds: str) -> float:
        """Seconds from a moment to the first event of these kinds after it."""
        return next(e["time_s"] for e in self.events(*kinds) if e["time_s"] >= began_s - 0.002) - began_s
