"""A run that is disturbed, and what must hold of it afterwards whatever happened."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from argosy.chaos.run import read_ledger
from argosy.checkpoint import store
from argosy.config.load import load
from argosy.observe.events import read_lines
from commands import Folder
from waiting import PATIENT_S, wait_until

STEPS = 24
SEEN_S, AGAIN_S = 1.0, 10.0
"""A death is seen within, and steps are made again within."""
PLANS = {
    "replicas": "dp_replicate=2,microbatch=2",
    "sharded": "dp_shard=2,zero=3,microbatch=2",
    "pipeline": "pp=2,microbatch=2",
    "tensor": "tp=2,microbatch=4",
}
PATIENCE = ("--resilience.heartbeat_timeout_s", "1", "--resilience.hang_s", "2", "--resilience.first_step_s", "20")
"""Little of it, for rows in which somebody stands still."""
STEADY = ("--optimizer.lr", "1e-3")
"""For rows of more than 64 steps, in which norms are judged: so low a rate that none is an outlier."""
TOLD = (
    "worker_died", "writer_died", "coordinator_lost", "fork_server_replaced",
    "stopped", "frozen", "hang", "stuck_loader", "mismatch", "straggler", "slow_link",
    "oom_kill", "memory_low", "disk_failed", "disk_slow", "disk_full", "clock_jump", "limit_near",
    "bad_step", "rewind", "bad_shard", "corruption", "collective_corrupt", "gradient_corrupt",
    "save_failed", "damaged_checkpoint", "upkeep_failed", "drain_failed", "replan_failed",
)  # fmt: skip
"""Events by which a run tells of a fault."""


def plan_text(plan: str) -> str:
    return plan if "precision=" in plan else f"{plan},precision=fp32,compile=false"


@dataclass
class Disturbed:
    """A run of the tiny model under a plan, with faults inside (`ARGOSY_FAULTS`) and from outside."""

    folder: Folder
    plan: str = PLANS["replicas"]
    faults: str = ""
    options: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    """A command that runs the command given after it, in a control group or a namespace of its own, say."""
    process: subprocess.Popen[str] | None = field(default=None, init=False)
    text: str = field(default="", init=False)
    agents: list[int] = field(default_factory=list, init=False)
    """Process ids of all commands that were given for it."""

    @property
    def run_dir(self) -> Path:
        return self.folder.path / "runs/tiny"

    def start(self, *more: str) -> Disturbed:
        self.process = self.launch(*more)
        return self

    def launch(self, *more: str) -> subprocess.Popen[str]:
        """Give the command, with `more` options: that of the run, or of another of its nodes."""
        process = self.folder.start(*self._words(*more), within=self.within, ARGOSY_FAULTS=self.faults)
        self.agents.append(process.pid)
        return process

    def run_here(self) -> Disturbed:
        """Run it to its end, with the command in this process: without faults."""
        self.text = self.folder.argosy_here(*self._words())
        return self

    def _words(self, *more: str) -> list[str]:
        self.write()
        return [*("train", "run.toml", "--resilience.memory_checkpoint_every_steps", "2"), *self.options, *more]

    def write(self) -> None:
        """Write the run file, if it is not there."""
        if (self.folder.path / "run.toml").exists():
            return
        run = self.folder.write_run(steps=STEPS, every_steps=5, processes=2)
        text = re.sub(r'plan = ".*"', f'plan = "{plan_text(self.plan)}"', run.read_text())
        run.write_text(
            text.replace("processes = 2\n", "").replace("every_steps = 5\ntokens", "every_steps = 0\ntokens")
        )

    def end(self, code: int = 0, timeout_s: float = 300) -> Disturbed:
        assert self.process is not None
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            err += f"\nit did not end within {timeout_s:.0f} s"
        self.text = out + err
        assert self.process.returncode == code, f"exit code {self.process.returncode}\n{self._story()}"
        return self

    def kill_and_start_again(self) -> None:
        """Kill the command, whose processes end with it, and give it again."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert not self.processes()
        self.start()

    def steps(self) -> int:
        return len(self.records())

    def records(self) -> list[dict[str, Any]]:
        return [r for r in read_lines(self.run_dir / "metrics.jsonl") if "loss" in r]

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records()]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Those of these kinds, of all processes; "by" is the name of the process."""
        paths = (self.run_dir / "events").glob("*.jsonl")
        found = [{**e, "by": path.stem} for path in paths for e in read_lines(path)]
        return sorted((e for e in found if e["event"] in kinds), key=lambda e: e["time_s"])

    def struck(self, fault: str) -> list[dict[str, Any]]:
        """Injected faults that begin so, as they were recorded."""
        return [e for e in self.events("fault") if e["fault"].startswith(fault)]

    def wait_for_step(self, step: int, seconds: float = PATIENT_S) -> Disturbed:
        self.wait_until(lambda: self.steps() > step, seconds)
        return self

    def wait_until(self, condition: Callable[[], Any], seconds: float = PATIENT_S) -> None:
        assert self.process is not None
        wait_until(condition, seconds, process=self.process, story=self._story)

    def pids(self) -> dict[int, int]:
        """Rank -> pid, in the newest generation."""
        ranks = self.events("generation")[-1]["ranks"]
        started = {(e["by"], e["slot"]): e["pid"] for e in self.events("worker_started")}
        found = {}
        for place, rank in ranks.items():
            node, _, slot = place.rpartition("/")
            found[rank] = started.get(("launcher", int(slot))) or started[f"launcher-{node}", int(slot)]
        return found

    def send(self, rank: int, number: signal.Signals) -> int:
        pid = self.pids()[rank]
        os.kill(pid, number)
        return pid

    def weights(self) -> dict[str, str]:
        """Checksums of all tensors of the newest checkpoint."""
        tensors = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in self._tensors().items()}
        return {name: checksum for name, checksum in tensors.items() if "rng." not in name}

    # ---- what must hold -----------------------------------------------------------------------------------------

    def check(self, healthy: Disturbed | Sequence[Disturbed] | None, *told: str) -> None:
        """What must hold after every fault.

        healthy: the run without faults, which has the same numbers bit for bit; several, under each of the plans that
        the run had: for each change, its losses differ from theirs by at most three times what they differ by from each
        other. None: there is none to compare with. told: kinds of events, all of them and no others, that the run told
        of faults by.
        """
        self.check_state_is_sound()
        self.check_samples()
        if isinstance(healthy, Disturbed):
            assert self.losses() == healthy.losses(), self._story()
            assert self.weights() == healthy.weights()
        elif healthy is not None:
            self._check_is_near(healthy)
        self.check_faults_are_told(*told)
        self.check_nothing_is_left()

    def check_state_is_sound(self) -> None:
        """Nothing that is not finite was committed; there is a verified checkpoint, and what is there is whole."""
        assert all(np.isfinite(array).all() for array in self._tensors().values() if array.dtype.kind == "f")
        assert all(math.isfinite(loss) for loss in self.losses())
        for checkpoint in store.committed(self.run_dir):
            checkpoint.verify()
        assert store.newest_verified(self.run_dir) is not None

    def check_samples(self) -> None:
        """Each sample up to the last step was trained on once, or is listed as skipped."""
        ledger, records = read_ledger(self.records()), self.records()
        assert not ledger.problems and ledger.committed == sum(r["samples"] for r in records), ledger
        assert [r["step"] for r in records] == list(range(len(records)))
        batch = load(self.run_dir / "run.toml").train.global_batch
        assert {r["samples"] for r in records} == {batch}

    def check_faults_are_told(self, *told: str) -> None:
        """The event log has these kinds of faults and no others; a death is there once."""
        events = self.events(*TOLD)
        assert {e["event"] for e in events} == set(told), self._story()
        died = [e["pid"] for e in events if e["event"] in ("worker_died", "writer_died")]
        killed = [e["pid"] for e in self.struck("kill@")]
        assert len(died) == len(set(died)) and set(killed) <= set(died), self._story()

    def check_nothing_is_left(self) -> None:
        """No process of the run and nothing of it in memory.

        Its ports end with its processes; whoever listens on one of their numbers now is another test's.
        """
        assert not self.processes(), self.processes()
        started = self.events("coordinator_started")
        pids = [*self.agents, *(e["pid"] for e in (*started, *self.events("worker_started")))]
        left = [p.name for p in Path("/dev/shm").iterdir() if any(str(pid) in p.name.split("-") for pid in pids)]
        assert not left, left

    def _check_is_near(self, healthy: Sequence[Disturbed]) -> None:
        curves = np.array([run.losses() for run in healthy])
        mine = np.array(self.losses())
        assert mine.shape == curves[0].shape, self._story()
        spread = (curves.max(0) - curves.min(0)).max()
        changes = len(self.events("generation")) - 1
        off = np.abs(curves - mine).min(0).max()
        # Rounding drives them apart as it does those of healthy runs, of which two may happen to be near each other.
        assert off <= 3 * changes * spread, f"{off} from the nearest, {spread} between those of healthy runs"

    def _tensors(self) -> dict[str, Any]:
        choice = store.newest_whole(self.run_dir)
        assert choice is not None
        tensors: dict[str, Any] = {}
        for path in sorted(choice.checkpoint.folder.glob("*.safetensors")):
            tensors |= load_file(path)
        return tensors

    def processes(self) -> list[str]:
        """Command lines of what works for this run."""
        end = time.monotonic() + 12  # a coordinator without agents ends after ten seconds
        while found := list(self._processes()):
            if time.monotonic() > end:
                return found
            time.sleep(0.1)
        return []

    def _processes(self) -> Iterator[str]:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                is_of_run = str(self.run_dir).encode() in words or (path / "cwd").samefile(self.folder.path)
            except OSError:
                continue
            if is_of_run and int(path.name) != os.getpid():
                yield words.replace(b"\0", b" ").decode()

    def _story(self) -> str:
        kinds = (*TOLD, "generation", "break", "killed", "recovered", "resume", "finish", "fault", "replan")
        return self.text[-3000:] + "\n".join(json.dumps(e) for e in self.events(*kinds))

    def time_to(self, began_s: float, *kinds: str) -> float:
        """Seconds from a moment to the first event of these kinds after it."""
        return next(e["time_s"] for e in self.events(*kinds) if e["time_s"] >= began_s - 0.002) - began_s
