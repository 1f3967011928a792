"""SLURM: a batch job whose nodes have an agent each, and that is requeued until the run has ended.

The script says what a run needs of SLURM: a lost node must not end the job (--no-kill), nor a lost task the others
(--kill-on-bad-exit=0, --wait=0); the signal before the end of the time leaves room to save; an agent that was killed is
started again; and whether the job is requeued follows from what became of the run, not from srun's exit code.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from argosy.errors import UserError
from argosy.launch.engines.engine import Engine, Job, JobState, Request

SPARE_S = 30
"""SLURM may send a signal up to 60 s early, and looks at the time every 30 s: so much is added to `grace_s`."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "SPECIAL_EXIT")
ANSWER_S = 60.0
AGENT = """
trap '' USR1 TERM
for start in {{1..5}}; do
  {command}; code=$?
  [ $code = 137 ] || break
done
exit $code
"""
"""The task on each node, which starts an agent again that is killed. Signals are for the agent, once it takes them:
before, they would end it."""


class Slurm(Engine):
    """The cluster whose sbatch is at hand."""

    name = "slurm"
    takes = frozenset(
        ("nodes", "cpus_per_node", "gpus_per_node", "memory_per_node", "time", "account", "partition", "image", "extra")
    )

    def script(self, request: Request) -> str:
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
            "output": f"{request.folder}/slurm-%j.out",
            "open-mode": "append",
            "signal": f"USR1@{round(request.grace_s) + SPARE_S}",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
        lines += [] if request.cpus_per_node else ["#SBATCH --exclusive"]
        lines += ["#SBATCH --requeue", "#SBATCH --no-kill", *(f"#SBATCH {line}" for line in request.extra)]
        step = ["srun", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
        step += [f"--container-image={shlex.quote(request.image)}"] if request.image else []
        step += [f"--cpus-per-task={request.cpus_per_node}"] if request.cpus_per_node else []
        after = shlex.join([sys.executable, "-m", "argosy.launch.engines.requeue", str(request.run_dir)])
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                f"cd {shlex.quote(str(request.work_dir))} || exit 2",
                f"{' '.join(step)} bash -c {shlex.quote(AGENT.format(command=request.command))}",
                f"exec {after} $?",
                "",
            ]
        )

    def submit(self, request: Request) -> Job:
        """Give the script to sbatch."""
        _check_image(request.image)
        path = request.folder / "job.sh"
        path.write_text(self.script(request))
        job_id = ask("sbatch", "--parsable", str(path)).split(";")[0]
        return Job(
            engine=self.name,
            id=job_id,
            submitted_s=round(time.time(), 3),
            nodes=request.nodes,
            log=str(request.folder / f"slurm-{job_id}.out"),
        )

    def state(self, job: Job) -> tuple[JobState, str]:
        """Return what squeue says of the job."""
        answer = ask("squeue", "--noheader", "--states=all", "--format=%T %r", f"--jobs={job.id}", may_fail=True)
        state, _, reason = answer.partition(" ")
        if state in WAITING:
            return "waiting", f"{state.lower()}: {reason}" if reason not in ("", "None") else state.lower()
        if state in ("RUNNING", "COMPLETING", "STOPPED"):
            return "running", state.lower()
        return "ended", state.lower() or "no longer known to SLURM"

    def stop(self, job: Job) -> None:
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


def ask(program: str, *words: str, may_fail: bool = False) -> str:
    """Return what a program of SLURM prints. Raises: UserError with what it says, if it fails."""
    if shutil.which(program) is None:
        raise UserError(f"--on slurm: there is no {program} here. Give the command on a machine of the SLURM cluster.")
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"--on slurm: {program} did not answer within {ANSWER_S:.0f} s. Try again later.") from None
    if done.returncode and not may_fail:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"--on slurm: {program} refuses: {said}. Mend that, or pass what is missing with --extra.")
    return done.stdout.strip()
