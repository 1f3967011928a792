"""At the end of a batch job: whether it is to run again, from what became of the run.

A run that was stopped, or lost its processes or machines, goes on in the same job. One that is finished or has failed
does not: the same command would fail again. Nor does one that has made no step in several jobs in a row.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from argosy.engines.record import LAUNCH_FOLDER
from argosy.engines.slurm import ask, job_here, listed
from argosy.errors import STOP_SIGNALS, Retryable, RunFailed, StorageError, UserError
from argosy.files import atomic_write
from argosy.observe.events import from_the_end
from argosy.processes.supervisor import RestartPolicy, Restarts
from argosy.sync.layout import kept_in
from argosy.watch.reader import RunReader, is_run

AGENT_RESTARTS = RestartPolicy(most_failures=3, pause_s=2.0)
"""The restarts of a batch job and of a node's agent; progress is a step more than before."""
IDLE_JOBS_FILE = "progress.json"
"""The file in the folder for launches with the number of jobs in a row, of one launch, that have made no step."""
CONTROLLER_AGAIN_S = 3.0
"""Seconds between two questions to a controller of SLURM that does not answer."""
REQUEUE_TRIES = 3
T = TypeVar("T")
SIGNALLED = {128 + number for number in (signal.SIGKILL, *STOP_SIGNALS)}
"""Exit codes of a command that a signal has ended."""


def decide(run_dir: Path, code: int) -> tuple[int, str]:
    """Return the exit code of the job (Retryable's: requeue it), and why. code: as in `outcome`."""
    found, why = outcome(run_dir, code)
    if found != Retryable.exit_code:
        return found, why
    try:
        idle = _idle_jobs(run_dir)
    except OSError as problem:  # without the count it might be requeued for ever
        return StorageError.exit_code, f"the jobs without a step cannot be counted ({problem})"
    if idle >= AGENT_RESTARTS.most_failures:
        return RunFailed.exit_code, f"{AGENT_RESTARTS.most_failures} jobs in a row have made no step"
    return found, why


def outcome(run_dir: Path, code: int) -> tuple[int, str]:
    """Return 0 if the run is finished, the exit code of its failure if it has failed, else Retryable's; and why.

    code: that of the command which ended (srun's is the largest of its tasks'): it decides only if the run has recorded
    nothing.
    """
    run_dir = kept_in(run_dir)
    if not is_run(run_dir):
        return Retryable.exit_code if code in SIGNALLED else code, "the run did not begin"
    run = RunReader.read(run_dir)
    if run.state == "finished":
        return 0, "the run is finished"
    steps = int(run.last_line.get("step", -1)) + 1
    if run.state == "stopped" and run.run is not None and 0 < run.run.train.pause_at <= steps:
        return 0, f"the run pauses at step {steps} (train.pause_at)"
    failed = next((e["exit_code"] for e in reversed(run.events) if e["event"] == "finish" and e["exit_code"]), 0)
    if run.state == "failed" and failed != Retryable.exit_code:
        return failed, f"the run has failed: {run.why}"
    return Retryable.exit_code, run.why or "its processes ended"


def last_step(run_dir: Path) -> int:
    """Return the number of the run's last step; -1 before the first."""
    return next((int(line["step"]) for line in from_the_end(kept_in(run_dir) / "metrics.jsonl")), -1)


def _idle_jobs(run_dir: Path) -> int:
    """Return how many jobs in a row, this one included, have made no step. Of one, several processes may ask this."""
    path, step = run_dir / LAUNCH_FOLDER / IDLE_JOBS_FILE, last_step(run_dir)
    before = json.loads(path.read_text()) if path.exists() else {"step": -1, "idle": 0}
    job = " ".join(os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT")).strip()
    if job and before.get("job") == job:
        return int(before["idle"])
    restarts = Restarts(AGENT_RESTARTS, before["idle"])
    restarts.ended(made_progress=step > before["step"])
    with atomic_write(path) as file:
        file.write(json.dumps({"step": step, "idle": restarts.failures, "job": job}).encode())
    return restarts.failures


def answered(question: Callable[[], T]) -> T:
    """Return what SLURM answers. While its controller does not, nothing is known: ask it again."""
    while True:
        try:
            return question()
        except UserError:
            time.sleep(CONTROLLER_AGAIN_S)


def requeue(job: str) -> str:
    """Have SLURM requeue a job. Return what it says if it refuses each time; "" if it does what it is asked."""
    refusal = ""
    for _ in range(REQUEUE_TRIES):
        answered(lambda: listed(f"--jobs={job}"))
        try:
            ask("scontrol", "requeue", job)
        except UserError as problem:  # the controller may have gone since it answered
            refusal = str(problem)
            time.sleep(CONTROLLER_AGAIN_S)
        else:
            return ""
    return refusal


def main() -> None:
    """`python -m argosy.launch.requeue RUN_DIR CODE`, in a batch job of SLURM."""
    code, why = decide(Path(sys.argv[1]), int(sys.argv[2]))
    again = code == Retryable.exit_code
    print(f"argosy launch: {why}: {'the job is requeued' if again else f'the job ends with {code}'}", flush=True)
    if again and (refusal := requeue(job_here(os.environ))):
        print(f"argosy launch: {refusal}\n  The job ends with {code}: launch the run again to go on.", flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
