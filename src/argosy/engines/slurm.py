"""SLURM: batch jobs, through the programs of the cluster.

A run's script says what it needs of SLURM: a lost node must not end the job (--no-kill), nor a lost task the others
(--kill-on-bad-exit=0, --wait=0); the signal before the end of the time leaves room to save; an agent that was killed is
started again; and whether the job is requeued follows from what became of the run, not from srun's exit code.

Jobs that are started together are the tasks of one array, which begin one by one as the cluster has room for them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from argosy.config.launch import EngineOptions
from argosy.config.schema import RunConfig
from argosy.engines.engine import PROGRAM_ANSWER_S, STOP_SPARE_S, Engine, Job, ProgramJob, RunJob
from argosy.engines.record import JobState, LaunchedJob
from argosy.errors import UserError, counted
from argosy.files import atomic_write

SLURM_JOB = re.compile(r"[0-9]{1,12}(_[0-9]{1,12})?")
"""A job's number; of a task of an array with that task's."""
ARRAY_NOTE = "slurm.json"
"""A file in the folder of a run that is a task of an array: it is there before the array is submitted, and names it."""
UNKNOWN_JOB = "Invalid job id"
"""squeue's error for jobs that ended some time ago. Any other error says nothing of the job."""
WAITING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
         "SUSPENDED")  # fmt: skip
ENDED_STATES = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT")  # fmt: skip
UNKNOWN_TO_SLURM = "no longer known to SLURM"
DIRECTIVE = "#SBATCH "
UNQUOTED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.,:=/+@%[]")
"""Characters of an option that mean the same in a script with and without quotes."""
AGENT_TASK = """
trap 'stopped=1' USR1 TERM
for start in {{1..5}}; do
  {command}; code=$?
  [ $code = 137 ] && [ -z "$stopped" ] || break
done
trap '' USR1 TERM
{survivor} $code
exit $code
"""
"""The task on each node, which starts an agent again that is killed, and at the end looks after the job if the batch
host is lost (`launch.survivor`). SLURM signals the task and the agent. An agent that does not take signals yet has
nothing to save, and ends by them: it must not inherit that they are ignored."""


class Slurm(Engine):
    """The cluster whose sbatch is at hand."""

    name = "slurm"
    takes = frozenset(
        ("nodes", "cpus_per_node", "gpus_per_node", "memory_per_node", "time", "account", "partition", "image", "extra")
    )
    queues = True
    poll_s = 5.0
    most_waiting = 1000  # tasks of an array, with SLURM's usual MaxArraySize

    def check(self, job: RunJob) -> None:
        """Raises: UserError for more nodes in the run than in the job, or a folder that sbatch cannot be told."""
        super().check(job)
        job.check_nodes()
        self.script(job)

    def check_is_there(self, options: EngineOptions) -> None:
        """Raises: UserError if there is no SLURM here, or it does not answer."""
        _find("sbatch")
        ask("squeue", "--me", "--noheader")

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no number of a job."""
        job.check(id=(job.id, SLURM_JOB))

    def script(self, job: Job) -> str:
        body = _run_lines(job) if isinstance(job, RunJob) else _program_lines(job)
        return "\n".join(["#!/bin/bash", *_directives_of(job), *body, ""])

    def start(self, job: Job) -> LaunchedJob:
        path = job.folder / "job.sh"
        path.write_text(self.script(job))
        return _launched(job, _submit(job, path))

    def start_all(self, jobs: Sequence[Job], at_once: int = 0) -> list[LaunchedJob]:
        """Submit an array with a task for each job."""
        name = f"{jobs[0].name.rstrip('-0123456789') or jobs[0].name}-{secrets.token_hex(3)}"
        path = jobs[0].folder / f"{name}.sh"
        path.write_text(self._array(jobs, name, at_once))
        for place, job in enumerate(jobs):
            if isinstance(job, RunJob):
                with atomic_write(job.folder / ARRAY_NOTE) as file:
                    file.write(json.dumps({"name": name, "task": place}).encode())
        number = _submit(jobs[0], path)
        return [_launched(job, f"{number}_{place}") for place, job in enumerate(jobs)]

    def _array(self, jobs: Sequence[Job], name: str, at_once: int) -> str:
        """Return the batch script of an array, with the options of its first job; it runs the script of each.

        That is written to the folder of the job.
        """
        paths = []
        for place, job in enumerate(jobs):
            log = shlex.quote(str(job.folder)) + '/"slurm-${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}.out"'
            script = self.script(job).replace("#!/bin/bash\n", f"#!/bin/bash\nexec >> {log} 2>&1\n", 1)
            paths.append(job.folder / f"{name}-{place}.sh")
            paths[-1].write_text(script)
        of_array = {
            "job-name": name,
            "array": f"0-{len(jobs) - 1}" + (f"%{at_once}" if at_once else ""),
            "cpus-per-task": str(max(job.cpus_per_node for job in jobs) or ""),
            "output": "/dev/null",
        }
        lines = [
            line
            for line in _directives_of(jobs[0])
            if line.removeprefix("#SBATCH --").partition("=")[0] not in of_array
        ]
        lines += directives(of_array)
        return "\n".join(
            ["#!/bin/bash", *lines, f"scripts=({shlex.join(map(str, paths))})",
             'exec bash "${scripts[$SLURM_ARRAY_TASK_ID]}"', ""]
        )  # fmt: skip

    def find(self, job: Job) -> LaunchedJob | None:
        """Return the job of the record, or the one by whose name its folder was noted before it was submitted."""
        if (before := self.recorded(job)) is not None and before.id in self._left:
            return before
        record = LaunchedJob.load(job.folder.parent)
        if not (job.folder / ARRAY_NOTE).exists() or (record is not None and record.original):
            return None
        note = json.loads((job.folder / ARRAY_NOTE).read_text())
        left = (job_id for job_id, name in self._left.items() if name == note["name"])
        return next((_launched(job, job_id) for job_id in left if job_id.endswith(f"_{note['task']}")), None)

    @cached_property
    def _left(self) -> dict[str, str]:
        """This user's jobs that waited or ran when the first was looked for, and their names.

        A job of a process that is gone was there before this process: so one look is enough for a whole sweep.
        """
        said = ask("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T %j")
        jobs = (_job_in(line) for line in said.splitlines())
        return {job_id: name for job_id, state, name in jobs if meaning(state) != "ended"}

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        return self.states([job])[0]

    def states(self, jobs: Sequence[LaunchedJob]) -> list[tuple[JobState, str]]:
        """Return what squeue says of the jobs. One that it does not know any more has ended."""
        known = {}
        numbers = sorted({job.id.partition("_")[0] for job in jobs})
        for line in listed("--array", "--format=%i %T %r", f"--jobs={','.join(numbers)}") if numbers else ():
            job_id, state, reason = _job_in(line)
            known[job_id] = (state, reason)
        found = [known.get(job.id, ("", "")) for job in jobs]
        return [(meaning(state), in_words(state, reason)) for state, reason in found]

    def stop(self, job: LaunchedJob) -> None:
        """Send SIGTERM to the agents, which save; SLURM kills what is left after its KillWait."""
        self.stop_all([job])

    def stop_all(self, jobs: Sequence[LaunchedJob]) -> None:
        if jobs:
            ask("scancel", *(job.id for job in jobs))


def _submit(job: Job, path: Path) -> str:
    """Return the number of what a script was submitted as.

    The options in its lines are typed as well: else variables such as SBATCH_PARTITION would win over them. It does not
    get the variables of a job from which it is submitted: with SLURM_MEM_PER_CPU there, srun refuses what has --mem.
    """
    _check_image(job.image)
    lines = [line.removeprefix(DIRECTIVE) for line in path.read_text().splitlines() if line.startswith(DIRECTIVE)]
    try:
        words = [word for line in lines for word in shlex.split(line)]
    except ValueError as problem:
        raise UserError(f"--extra={', '.join(job.extra)}: {problem}. Quote it as in a script of sbatch.") from None
    is_in_job = "SLURM_JOB_ID" in os.environ
    kept = {k: v for k, v in os.environ.items() if not (is_in_job and k.startswith("SLURM_")) or k == "SLURM_CONF"}
    said = ask("sbatch", "--parsable", *words, str(path), environment=kept)
    number = said.rpartition("\n")[2].partition(";")[0].strip()  # a cluster's own sbatch may greet before it
    if not SLURM_JOB.fullmatch(number):
        raise UserError(
            f"--on slurm: sbatch says no number of a job: {said[-300:]!r}. Look whether squeue --me has it."
        )
    return number


def _job_in(line: str) -> tuple[str, str, str]:
    """Return a job's number, its state and the rest of a line that squeue prints. Raises: UserError if it is none."""
    job_id, state, rest = (*line.split(maxsplit=2), "", "", "")[:3]
    if not state:
        raise UserError(f"--on slurm: squeue says {line[:300]!r}, which is no job and its state. Try again later.")
    return job_id, state, rest


def _launched(job: Job, job_id: str) -> LaunchedJob:
    return LaunchedJob.submitted(Slurm.name, job_id, job.nodes, job.folder / f"slurm-{job_id}.out")


def _directives_of(job: Job) -> list[str]:
    """Return the lines that say what a job asks of SLURM."""
    is_run = isinstance(job, RunJob)
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(job.cpus_per_node or ""),
        "gpus-per-node": str(job.gpus_per_node or ""),
        "mem": job.memory_per_node,
        "time": job.time,
        "account": job.account,
        "partition": job.partition,
        "output": output(str(job.folder), "slurm-%j.out"),
        "open-mode": "append",
        # SLURM may send it up to 60 s early, and looks at the time every 30 s.
        "signal": f"USR1@{round(job.grace_s) + STOP_SPARE_S}" if is_run else "",
    }
    lines = directives(options)
    lines += [] if job.cpus_per_node else ["#SBATCH --exclusive"]
    lines += ["#SBATCH --requeue", *(["#SBATCH --no-kill"] if is_run else [])]
    return lines + [f"#SBATCH {line}" for line in job.extra]


def _program_lines(job: Job) -> list[str]:
    environment = job.environment if isinstance(job, ProgramJob) else {}
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f"cd {shlex.quote(str(job.work_dir))} || exit 2",
        f"exec {job.command}",
    ]


def _run_lines(job: RunJob) -> list[str]:
    step = ["srun", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    step += [f"--container-image={shlex.quote(job.image)}"] if job.image else []
    step += [f"--cpus-per-task={job.cpus_per_node}"] if job.cpus_per_node else []
    after, survivor = (
        shlex.join([sys.executable, "-m", f"argosy.launch.{module}", str(job.run_dir)])
        for module in ("requeue", "survivor")
    )
    return [
        f"cd {shlex.quote(str(job.work_dir))} || exit 2",
        "export ARGOSY_BATCH_NODE=$SLURMD_NODENAME",
        f"{' '.join(step)} bash -c " + shlex.quote(AGENT_TASK.format(command=job.command, survivor=survivor)),
        f"exec {after} $?",
    ]


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


def _find(program: str) -> None:
    """Raises: UserError if a program of SLURM is not here."""
    if shutil.which(program) is None:
        raise UserError(f"--on slurm: there is no {program} here. Give the command on a machine of the SLURM cluster.")


def ask(program: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """Return what a program of SLURM prints. environment: in place of this process's.

    Raises: UserError with what it says, line by line, if it fails.
    """
    _find(program)
    try:
        done = subprocess.run(
            [program, *words],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",  # names and messages may be in another encoding
            timeout=PROGRAM_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--on slurm: {program} did not answer within {PROGRAM_ANSWER_S:.0f} s. Try again later."
        ) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = "\n  ".join(lines) or f"exit code {done.returncode}"
        if program == "sbatch":
            raise UserError(f"--on slurm: sbatch refuses: {said}\nMend that, or pass what is missing with --extra.")
        raise UserError(f"--on slurm: {program} says: {said}")
    return done.stdout.strip()


def listed(*words: str) -> list[str]:
    """Return the lines that squeue prints; none for jobs that SLURM no longer knows.

    Raises: UserError if it gives no answer: then nothing is known of any job.
    """
    try:
        return ask("squeue", "--noheader", "--states=all", *words).splitlines()
    except UserError as problem:
        if UNKNOWN_JOB in str(problem):
            return []
        raise


def meaning(state: str) -> JobState:
    """Return what a state of squeue's means; "" is that of a job that SLURM no longer knows."""
    if not state or state in ENDED_STATES:
        return "ended"
    return "waiting" if state in WAITING_STATES else "running"


def in_words(state: str, reason: str) -> str:
    words = state.lower() or UNKNOWN_TO_SLURM
    return f"{words}: {reason}" if reason not in ("", "None") else words


def directives(options: Mapping[str, str]) -> list[str]:
    """Return the lines of a batch script that give sbatch these options; those that are empty are left out.

    Raises: UserError for a value that cannot stand in a line.
    """
    return [f"#SBATCH --{name}={_quoted(name, value)}" for name, value in options.items() if value]


def output(folder: str, name: str) -> str:
    """Return a value for the option `output`: `name` may hold patterns such as %j, `folder` is taken as it is."""
    return f"{folder.replace('%', '%%')}/{name}"


def _quoted(name: str, value: str) -> str:
    if "\\" in value or not value.isprintable():
        raise UserError(
            f"--on slurm: {name} = {value!r} cannot be given to sbatch: it has a backslash or a control character. "
            "Choose another name or folder."
        )
    return value if UNQUOTED.issuperset(value) else '"' + value.replace('"', '\\"') + '"'


SLURM_TASKS, SLURM_NODES, SLURM_NODE = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURMD_NODENAME"
TASK = "SLURM_PROCID"


def is_step(environment: Mapping[str, str]) -> bool:
    """Return True in a process that srun has started; False in a batch script, or a shell of salloc."""
    return SLURM_TASKS in environment


def is_first_task(environment: Mapping[str, str]) -> bool:
    """Return True in the first task of a job step, and outside of one: the tasks of a step print to one place."""
    return not is_step(environment) or environment.get(TASK, "0") == "0"


def job_here(environment: Mapping[str, str]) -> str:
    """Return the name of the job that this process is in. One task of an array has the number of the whole array."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"]


def with_nodes_of_srun(run: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """Return `run` with the nodes of the job step that this process is a task of, if it is one.

    launch.nodes becomes the step's number of nodes (if it is given, the others are spares), and launch.node SLURM's
    name of this one. launch.lease, unless that or launch.coordinator is given, becomes the run's folder, which all
    nodes see: if the first node is lost, another one takes its place.

    Raises: UserError if the step has several tasks on a node, or fewer nodes than launch.nodes.
    """
    if not is_step(environment):
        return run
    tasks, nodes = int(environment[SLURM_TASKS]), int(environment[SLURM_NODES])
    if tasks > nodes:
        raise UserError(
            f"srun has started {tasks} tasks on {counted(nodes, 'node')}, and one argosy train on a node "
            f"starts all of its processes. Give srun --ntasks-per-node=1, with the node's CPUs and GPUs for that task."
        )
    launch = run.launch
    if launch.nodes > nodes:
        raise UserError(
            f"launch.nodes = {launch.nodes}, and srun has started {nodes}. Give srun --nodes={launch.nodes}, or "
            "leave launch.nodes out: it is the number of srun's nodes then."
        )
    if nodes == 1:
        return run
    given: dict[str, object] = {"nodes": nodes if launch.nodes == 1 else launch.nodes, "node": environment[SLURM_NODE]}
    if not (launch.coordinator or launch.lease):
        given["lease"] = "folder"
    return run.with_keys(launch=given)
