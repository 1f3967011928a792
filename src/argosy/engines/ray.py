"""Ray: jobs of the cluster. A program is the command of its job; in a run's, this same command holds an agent on each
node (`launch.ray_job`).

A job, not a task or an actor: a job outlives who submitted it, waits for its resources, and is stopped and shown by
Ray's own tools.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.config.launch import EngineOptions
from argosy.engines.engine import STOP_SPARE_S, Engine, Job, NeverFits, ProgramJob, RunJob
from argosy.engines.record import JobState, LaunchedJob
from argosy.errors import UserError
from argosy.files import text_at_end
from argosy.processes.ray_cluster import RAY_ADDRESS, knock, need_ray, no_cluster

API_ADDRESS, HEADERS_VARIABLE = "RAY_API_SERVER_ADDRESS", "RAY_JOB_HEADERS"
"""Environment variables: of the client of jobs, and of `ray job`."""
RAY_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
DASHBOARD = re.compile(r"https?://[A-Za-z0-9_.:\[\]-]+(/[A-Za-z0-9_./~-]*)?")
"""Ray takes other addresses too, and imports the module that one begins with."""
SECRETS = ("_SECRET", "_TOKEN")
"""Environment variables that end so are in no job's environment, which Ray's dashboard shows."""
ANSWER_S = 10.0
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable of a job: how long after SIGTERM Ray kills its command; 3 s without it."""
WAITING_PREFIX = "argosy launch: waiting: "
"""If the log's last line begins so, it says what the job waits for."""
NOT_YET = "No available agent"
"""Ray's answer before the head has all of its processes."""
CLUSTER_S = 60
"""Added to what a job is given to stop, beside `STOP_SPARE_S`: the job's own end."""
RAY_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "runtime-env-json": ("runtime_env", json.loads),
    "metadata-json": ("metadata", json.loads),
    "entrypoint-num-cpus": ("entrypoint_num_cpus", float),
    "entrypoint-num-gpus": ("entrypoint_num_gpus", float),
    "entrypoint-memory": ("entrypoint_memory", int),
    "entrypoint-resources": ("entrypoint_resources", json.loads),
}
"""Options of `ray job submit` that --extra takes -> what they are called in Python, and how they are read."""
OPTION_BEGIN = "--"
UNKNOWN_TO_RAY = "no longer known to Ray"
WAITED_LONG = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
"""Ray's word for the end of a job that has waited for room for 15 minutes (RAY_JOB_START_TIMEOUT_SECONDS of the
head)."""
RAY_NEWS_S = 1.0
RESOURCES = {
    "entrypoint_num_cpus": ("CPU", 1.0, "CPUs"),
    "entrypoint_num_gpus": ("GPU", 1.0, "GPUs"),
    "entrypoint_memory": ("memory", 1e9, "GB of memory"),
}
"""Request of a program -> its name on a node of Ray, its unit, and that in words."""
MOST_RAY_NODES = 10_000
"""Most nodes that Ray is asked for."""


@dataclass
class _Queued:
    """A program that was submitted from here, and its job in the queue now."""

    job: ProgramJob
    launched: LaunchedJob


class Ray(Engine):
    """The cluster whose dashboard is at `--address`, or that this machine is a part of."""

    name = "ray"
    takes = frozenset(("nodes", "cpus_per_node", "gpus_per_node", "address", "extra"))
    needs_seal = True
    most_waiting = 8  # Ray gives each of them a process, and takes the first that fits

    def __init__(self) -> None:
        self._queued: dict[str, _Queued] = {}
        """Number, as the starter knows it -> the program, which may have another by now (see `states`)."""
        self._listed: dict[str, Any] = {}
        self._listed_s = -math.inf

    def check(self, job: RunJob) -> None:
        """Raises: UserError for more nodes in the run than are asked for."""
        super().check(job)
        job.check_nodes()

    def check_is_there(self, options: EngineOptions) -> None:
        """Raises: UserError if there is no cluster, or no Ray here."""
        client_of(options.address)

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no number of a job, or no address."""
        job.check(id=(job.id, RAY_JOB), address=(job.place.get("address"), DASHBOARD))

    def script(self, job: RunJob) -> str:
        """Return the command of Ray that submits the same job."""
        given = _given(job)
        words = ["ray", "job", "submit", "--no-wait", "--runtime-env-json", json.dumps(given["runtime_env"])]
        words += ["--address", job.address] if job.address else []
        words += [word for word in job.extra if not word.startswith("--runtime-env-json")]
        # Versions of Ray differ in how they quote this for a shell of their own: it has no variables.
        entry = f"cd {shlex.quote(str(job.work_dir))} && exec {shlex.join([sys.executable, *_launch_words(job)])}"
        return f"{shlex.join(words)} -- {shlex.join(['sh', '-c', entry])}\n"

    def start(self, job: Job) -> LaunchedJob:
        """Submit the job. A run's command holds an agent on each node (`launch.ray_job`); a program is the command."""
        job_id = _prefix(job) + secrets.token_hex(4)
        client, given = client_of(job.address), _given(job)
        if isinstance(job, ProgramJob):
            given |= _resources(job)
            entry, log = command(job.work_dir, job.python_words, job.log), job.log
        else:
            assert isinstance(job, RunJob)
            entry, log = command(job.work_dir, _launch_words(job)), job.folder / f"ray-{job_id}.out"
        with refusals():
            _submit(client, entrypoint=entry, submission_id=job_id, **given)
        self._listed_s = -math.inf
        launched = LaunchedJob.submitted(self.name, job_id, job.nodes, log, {"address": client.get_address()})
        if isinstance(job, ProgramJob):
            self._queued[job_id] = _Queued(job, launched)
        return launched

    def find(self, job: Job) -> LaunchedJob | None:
        """Return the job whose number begins as this one's, whatever stands in the folder, which may be a copy."""
        address = client_of(job.address).get_address()
        for job_id, details in self._list(address).items():
            if job_id.startswith(_prefix(job)) and _meaning(details)[0] != "ended":
                assert isinstance(job, ProgramJob)
                found = LaunchedJob.submitted(self.name, job_id, job.nodes, job.log, {"address": address})
                self._queued[job_id] = _Queued(job, found)
                return found
        return None

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        client = client_of(job.place["address"])
        try:
            details = client.get_job_info(job.id)
        except RuntimeError as problem:
            if "does not exist" not in str(problem):
                raise no_cluster("--on ray", job.place["address"], problem) from None
            return "ended", UNKNOWN_TO_RAY
        state, words = _meaning(details)
        if state == "running" and (last := _last_line(Path(job.log))).startswith(WAITING_PREFIX):
            return "waiting", last.removeprefix(WAITING_PREFIX)
        return state, words

    def states(self, jobs: Sequence[LaunchedJob]) -> list[tuple[JobState, str]]:
        """Return what Ray says of programs that were submitted, or found, from here.

        One that has waited for as long as Ray lets a job wait is submitted again, which its starter need not know.
        Raises: UserError; NeverFits if no node of the cluster has what it needs.
        """
        listed = self._list(jobs[0].place["address"]) if jobs else {}
        states: list[tuple[JobState, str]] = []
        for job in jobs:
            queued = self._queued.get(job.id)
            details = listed.get(queued.launched.id if queued else job.id)
            if queued and details is not None and details.error_type == WAITED_LONG:
                self._submit_again(queued)
                states.append(("waiting", "submitted again"))
            else:
                states.append(_meaning(details))
        return states

    def _submit_again(self, queued: _Queued) -> None:
        wanted = _resources(queued.job)
        nodes = _nodes(queued.launched.place["address"])
        if not any(all(node[name] >= amount for name, amount in wanted.items()) for node in nodes):
            there = "; ".join(sorted({_in_words(node) for node in nodes})) or "it has no nodes"
            raise NeverFits(
                f"--on ray: {queued.job.name} needs {_in_words(wanted)} of one node, and no node of the cluster has "
                f"that ({there}). Ask for less, or add a node; the same command goes on."
            )
        before, queued.launched = queued.launched, self.start(queued.job)
        del self._queued[queued.launched.id]  # its starter knows it by the number of before
        with suppress(UserError):
            if (record := LaunchedJob.load(queued.job.folder.parent)) is not None and record.id == before.id:
                queued.launched.save(queued.job.folder.parent)

    def _list(self, address: str) -> dict[str, Any]:
        """Return Ray's details of its jobs by number; they are asked for again when they are `RAY_NEWS_S` old."""
        if time.monotonic() - self._listed_s > RAY_NEWS_S:
            client = client_of(address)
            with refusals():
                jobs = client.list_jobs()
            self._listed = {job.submission_id: job for job in jobs if job.submission_id}
            self._listed_s = time.monotonic()
        return self._listed

    def stop(self, job: LaunchedJob) -> None:
        """Send SIGTERM to the job, which has its agents save."""
        queued = self._queued.get(job.id)
        client = client_of(job.place["address"])
        with refusals():
            client.stop_job(queued.launched.id if queued else job.id)

    def logs(self, job: LaunchedJob, follow: bool) -> Iterator[bytes]:
        """Yield what the job prints; if it could not even begin, what Ray has noted."""
        is_empty = True
        for text in super().logs(job, follow):
            is_empty = False
            yield text
        if is_empty:
            with suppress(UserError, RuntimeError):
                yield client_of(job.place["address"]).get_job_logs(job.id).encode()


def _prefix(job: Job) -> str:
    """Return the beginning of the numbers of a job, whenever it is submitted."""
    return f"argosy-{job.name.removeprefix('argosy-')}-"


def _meaning(details: Any) -> tuple[JobState, str]:
    """Return the state of a job, and in words, from Ray's details; None: Ray no longer knows it."""
    if details is None:
        return "ended", UNKNOWN_TO_RAY
    status = str(getattr(details.status, "value", details.status))
    states: dict[str, JobState] = {"PENDING": "waiting", "RUNNING": "running"}
    return states.get(status, "ended"), status.lower()


def _resources(job: ProgramJob) -> dict[str, float]:
    """Return what a program asks of one node, by the names of `RESOURCES`."""
    asked = {"entrypoint_num_cpus": job.cpus_per_node, "entrypoint_num_gpus": job.gpus_per_node}
    asked["entrypoint_memory"] = 0 if job.gpus_per_node else int(job.memory_bytes)
    return {name: amount for name, amount in asked.items() if amount}


def _nodes(address: str) -> list[dict[str, float]]:
    """Return what each node of a cluster has, by the names of `RESOURCES`."""
    from ray.util.state import list_nodes

    with refusals():
        nodes = list_nodes(address=address, filters=[("state", "=", "ALIVE")], limit=MOST_RAY_NODES, detail=True)
    return [
        {name: float(node.resources_total.get(theirs, 0)) for name, (theirs, _, _) in RESOURCES.items()}
        for node in nodes
    ]


def _in_words(amounts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{amounts[name] / unit:.3g} {words}" for name, (_, unit, words) in RESOURCES.items() if amounts.get(name)
    )


def command(work_dir: Path, words: Sequence[str], log: Path | None = None) -> str:
    """Return `python WORDS` in a folder, for the shell of a job of Ray; log: a file that the output is added to."""
    python = shlex.quote(sys.executable)  # else the one of a cluster that was set up otherwise
    folder = shlex.quote(str(work_dir))
    into = f" >> {shlex.quote(str(log))} 2>&1" if log else ""
    return f'cd {folder} || exit 2; P={python}; [ -x "$P" ] || P=python; exec "$P" {shlex.join(words)}{into}'


def _launch_words(job: RunJob) -> list[str]:
    """Return the words after `python` of the command that holds a run's agents."""
    words = ["-m", "argosy", "launch", *job.words, "--on", "ray", "--nodes", str(job.nodes)]
    words += ["--cpus-per-node", str(job.cpus_per_node)] if job.cpus_per_node else []
    words += ["--gpus-per-node", str(job.gpus_per_node)] if job.gpus_per_node else []
    return [*words, "--run-dir", str(job.run_dir)]


def _given(job: Job) -> dict[str, Any]:
    """Return the arguments for submitting the job. Raises: UserError for an `--extra` that is no option of it."""
    given: dict[str, Any] = {}
    for word in job.extra:
        option, _, value = word.removeprefix(OPTION_BEGIN).partition("=")
        if not word.startswith(OPTION_BEGIN) or option not in RAY_OPTIONS:
            known = ", ".join(f"--{name}" for name in RAY_OPTIONS)
            raise UserError(f"--extra={word}: is no option of `ray job submit` that can be passed on. Known: {known}.")
        name, read = RAY_OPTIONS[option]
        try:
            given[name] = read(value)
        except ValueError as problem:
            raise UserError(f"--extra={word}: {problem}. Try --extra='--{option}=...'.") from None
    environment = given.get("runtime_env", {})
    if not isinstance(environment, dict) or not isinstance(environment.get("env_vars", {}), dict):
        raise UserError("--extra=--runtime-env-json: it and its env_vars are JSON objects. Try '{\"env_vars\": {}}'.")
    ours = {
        name: value for name, value in os.environ.items() if name.startswith("ARGOSY_") and not name.endswith(SECRETS)
    }
    ours[STOP_WAIT] = str(round(job.grace_s) + STOP_SPARE_S + CLUSTER_S)
    if isinstance(job, ProgramJob):
        ours |= job.environment
    given["runtime_env"] = {**environment, "env_vars": {**ours, **environment.get("env_vars", {})}}
    return given


def client_of(address: str) -> Any:
    """Return a client of the cluster's jobs. Raises: UserError if there is no Ray here, or no cluster there."""
    need_ray("--on ray")
    where = address or os.environ.get(API_ADDRESS) or os.environ.get(RAY_ADDRESS, "")
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ImportError as problem:
        raise UserError(f"--on ray: {problem}. Install it: pip install 'argosy[ray]'") from None
    try:
        knock(where)
        headers = json.loads(os.environ.get(HEADERS_VARIABLE, "null"))
        with _without(*((API_ADDRESS, RAY_ADDRESS) if address else ())):  # they would go before the address
            return JobSubmissionClient(address or None, headers=headers)
    except (RayError, RuntimeError, ValueError, OSError) as problem:
        raise no_cluster("--on ray", where, problem) from None


def _submit(client: Any, **given: Any) -> None:
    """Submit a job; a cluster that has just started is given some seconds. Raises: RuntimeError if Ray refuses."""
    end = time.monotonic() + ANSWER_S
    while True:
        try:
            client.submit_job(**given)
            return
        except RuntimeError as problem:
            if NOT_YET not in str(problem) or time.monotonic() > end:
                raise
        time.sleep(1)


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Take variables out of the environment in this block."""
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def refusals() -> Iterator[None]:
    """Raise UserError, with Ray's own words, in place of its errors."""
    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, TypeError) as problem:
        why = " ".join(str(problem).split()).rstrip(".")
        raise UserError(f"--on ray: Ray refuses: {why}. Mend that, or pass what is missing with --extra.") from None


def _last_line(path: Path) -> str:
    with suppress(OSError):
        return text_at_end(path, 4096).rstrip("\n").rpartition("\n")[2]
    return ""
