"""SLURM: a batch job whose nodes have an agent each, and that is requeued until the run has ended.

The script says what a run needs of SLURM: a lost node must not end the job (--no-kill), nor a lost task the others
(--kill-on-bad-exit=0, --wait=0); the signal before the end of the time leaves room to save; an agent that was killed is
started again; and whether the job is requeued follows from what became of the run, not from srun's exit code.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path

from argosy.errors import UserError
from argosy.launch.engines.engine import Engine, LaunchRequest, check_nodes
from argosy.launch.engines.job import JobState, LaunchedJob
from argosy.processes.slurm import ask, directives, in_words, listed, meaning, output

SPARE_S = 30
"""SLURM may send a signal up to 60 s early, and looks at the time every 30 s: so much is added to `grace_s`."""
NUMBER = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")
"""A job's number; of a task of an array with that task's."""
AGENT = """
trap '' USR1 TERM
for start in {{1..5}}; do
  {command}; code=$?
  [ $code = 137 ] || break
done
{survivor} $code
exit $code
"""
"""The task on each node, which starts an agent again that is killed, and at the end looks after the job if the batch
host is lost (`launch.survivor`). Signals are for the agent, once it takes them: before, they would end it."""


class Slurm(Engine):
    """The cluster whose sbatch is at hand."""

    name = "slurm"
    takes = frozenset(
        ("nodes", "cpus_per_node", "gpus_per_node", "memory_per_node", "time", "account", "partition", "image", "extra")
    )

    def check(self, request: LaunchRequest) -> None:
        """Raises: UserError for more nodes in the run than in the job, or a folder that sbatch cannot be told."""
        super().check(request)
        check_nodes(request)
        self.script(request)

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no number of a job."""
        job.check(id=(job.id, NUMBER))

    def script(self, request: LaunchRequest) -> str:
        """Return the batch script."""
        options = {
            "job-name": request.name,
            "nodes": str(request.nodes),
            "ntasks-per-node": "1",
            "cpus-per-task": str(request.cpus_per_node or ""),
            "gpus-per-node": str(request.gpus_per_node or ""),
            "mem": request.memory_per_node,
            "time": request.time,
            "account": request.account,
            "partition": request.partition,
            "output": output(str(request.folder), "slurm-%j.out"),
            "open-mode": "append",
            "signal": f"USR1@{round(request.grace_s) + SPARE_S}",
        }
        lines = directives(options)
        lines += [] if request.cpus_per_node else ["#SBATCH --exclusive"]
        lines += ["#SBATCH --requeue", "#SBATCH --no-kill", *(f"#SBATCH {line}" for line in request.extra)]
        step = ["srun", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        step += [f"--container-image={shlex.quote(request.image)}"] if request.image else []
        step += [f"--cpus-per-task={request.cpus_per_node}"] if request.cpus_per_node else []
        after, survivor = (
            shlex.join([sys.executable, "-m", f"argosy.launch.{module}", str(request.run_dir)])
            for module in ("engines.requeue", "survivor")
        )
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                f"cd {shlex.quote(str(request.work_dir))} || exit 2",
                "export ARGOSY_BATCH_NODE=$SLURMD_NODENAME",
                f"{' '.join(step)} bash -c " + shlex.quote(AGENT.format(command=request.command, survivor=survivor)),
                f"exec {after} $?",
                "",
            ]
        )

    def submit(self, request: LaunchRequest) -> LaunchedJob:
        """Give the script to sbatch."""
        _check_image(request.image)
        path = request.folder / "job.sh"
        path.write_text(self.script(request))
        job_id = ask("sbatch", "--parsable", str(path)).split(";")[0]
        return LaunchedJob(
            engine=self.name,
            id=job_id,
            submitted_s=round(time.time(), 3),
            nodes=request.nodes,
            log=str(request.folder / f"slurm-{job_id}.out"),
        )

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return what squeue says of the job."""
        state, _, reason = next(iter(listed("--format=%T %r", f"--jobs={job.id}")), "").partition(" ")
        return meaning(state), in_words(state, reason)

    def stop(self, job: LaunchedJob) -> None:
        """Send SIGTERM to the agents, which save; SLURM kills what is left after its KillWait."""
        ask("scancel", job.id)


def _check_image(image: str) -> None:
    """Raises: UserError if a file is not there, or this SLURM cannot start containers."""
    if not image:
        return
    if image.startswith(("/", ".")) and not Path(image).exists():
        raise UserError(
            f"--image {image}: there is no such file. Name one that all nodes see, or an image of a registry."
        )
    if "--container-image" not in ask("srun", "--help"):
        raise UserError(
            f"--image {image}: this SLURM knows no container images (srun has no --container-image). Its administrator "
            "can install the plugin pyxis; without it, leave --image out and use a Python that all nodes see."
        )
