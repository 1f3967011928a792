"""At the end of a task of a batch job: if the batch script is lost with its node, the task ends the job in its place.

SLURM keeps a job whose batch host is lost (--no-kill), so the run goes on. But the script, which would have the job
requeued, is gone, and the nodes that are left would be held until the job's time is over. So each task but the batch
host's looks, once its agent has ended, whether that node is there. The last one does what the script would have done.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from argosy.engines.record import LAUNCH_FOLDER
from argosy.engines.slurm import ask, job_here, listed
from argosy.errors import STOP_SIGNALS, Retryable, UserError
from argosy.files import RUN_LOCK, is_locked
from argosy.launch.requeue import answered, decide
from argosy.observe.events import from_the_end
from argosy.sync.layout import kept_in

BATCH_NODE = "ARGOSY_BATCH_NODE"
"""Environment variable of a job: the node that its batch script runs on."""
ORDERLY = {0, *(128 + number for number in STOP_SIGNALS)}
"""Exit codes of an agent whose run is finished, or was stopped with its state saved."""
SLURMD_PORT = 6818
"""SLURM's default."""
CALLS, CALL_S, CALL_AGAIN_S = 3, 5.0, 3.0
"""A node is lost if SLURM says so, or its slurmd does not answer any of so many calls."""
DOWN = re.compile(r"DOWN|NOT_RESPONDING|\*")
AGENTS_LOOK_S = 2.0
"""Seconds between two looks at other tasks' agents."""
OTHERS_WAIT_S = 60.0
"""Time for which those are waited for once the run has ended: a lost machine may hold its lock on the shared folder."""


def was_there_at_the_end(run_dir: Path, node: str) -> bool:
    """Return True if a node had ranks in the run's last world."""
    events = from_the_end(kept_in(run_dir) / "events" / "coordinator.jsonl")
    last: dict[str, int] = next((event["ranks"] for event in events if event["event"] == "generation"), {})
    return any(place.rpartition("/")[0] == node for place in last)


def is_lost(node: str, show: Callable[[str], str]) -> bool:
    """Return True if a node of the cluster is lost. show: returns what `scontrol show node` prints of it."""
    for call in range(CALLS):
        time.sleep(CALL_AGAIN_S if call else 0.0)
        said = answered(partial(_shown, node, show))
        if DOWN.search(said.get("State", "")):
            return True
        with suppress(OSError):
            socket.create_connection((said["NodeAddr"], int(said.get("Port", SLURMD_PORT))), CALL_S).close()
            return False
    return True


def _shown(node: str, show: Callable[[str], str]) -> dict[str, str]:
    """Return what SLURM shows of a node. Raises: UserError if it does not say where that is."""
    said = dict(reversed(re.findall(r"(\w+)=(\S+)", show(node))))  # what people write of a node comes last
    if "NodeAddr" not in said:
        raise UserError(f"--on slurm: scontrol shows no address of {node}.")
    return said


def do_others_run(run_dir: Path, but: set[str]) -> bool:
    """Return True if the agent of a node runs, other than of those in `but`: it holds its lock."""
    paths = sorted(kept_in(run_dir).glob(f"{RUN_LOCK}-*"))
    return any(is_locked(path) for path in paths if path.name.removeprefix(f"{RUN_LOCK}-") not in but)


def end_the_job(run_dir: Path, code: int, environment: Mapping[str, str]) -> None:
    """Have the job requeued, or cancel it, as is due. Other survivors may do the same at the same time.

    One that somebody has cancelled, or another has requeued, is left alone.
    """
    job = job_here(environment)
    if answered(lambda: listed("--format=%T", f"--jobs={job}")) != ["RUNNING"]:
        return
    code, why = decide(run_dir, code)
    again = code == Retryable.exit_code
    end = "the job is requeued" if again else f"the job is cancelled, as it would end with {code}"
    line = f"argosy launch: the batch host {environment[BATCH_NODE]} is lost; {why}: {end}\n"
    with (
        suppress(OSError),
        (run_dir / LAUNCH_FOLDER / f"slurm-{job}.out").open("a") as log,
    ):  # srun passes on nothing any more
        log.write(line)
    subprocess.run(["scontrol", "requeue", job] if again else ["scancel", job], check=False)


def main() -> None:
    """`python -m argosy.launch.survivor RUN_DIR CODE`, in a task of a batch job. CODE: of its agent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the task ignores: with it SLURM ends the job by itself
    run_dir, code, environment = Path(sys.argv[1]), int(sys.argv[2]), os.environ
    batch, mine = environment.get(BATCH_NODE, ""), environment.get("SLURMD_NODENAME", "")
    if not batch or batch == mine or (code in ORDERLY and was_there_at_the_end(run_dir, batch)):
        return
    if not is_lost(batch, lambda node: ask("scontrol", "show", "node", node)):
        return
    waited_s = 0.0
    while do_others_run(run_dir, {batch, mine}) and (code not in ORDERLY or waited_s < OTHERS_WAIT_S):
        time.sleep(AGENTS_LOOK_S)
        waited_s += AGENTS_LOOK_S
    end_the_job(run_dir, code, environment)


if __name__ == "__main__":
    main()
