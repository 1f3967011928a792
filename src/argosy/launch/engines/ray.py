"""Ray: a job of the cluster, in which this same command holds an agent on each node (`ray_job`)."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from argosy.errors import UserError
from argosy.launch.engines.engine import Engine, LaunchRequest, check_nodes
from argosy.launch.engines.job import JobState, LaunchedJob
from argosy.launch.engines.ray_job import SPARE_S, STOP_WAIT, WAITING
from argosy.processes.ray_cluster import ADDRESS, knock, need_ray, no_cluster

API_ADDRESS, HEADERS = "RAY_API_SERVER_ADDRESS", "RAY_JOB_HEADERS"
"""Environment variables: of the client of jobs, and of `ray job`."""
NUMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
DASHBOARD = re.compile(r"https?://[A-Za-z0-9_.:\[\]-]+(/[A-Za-z0-9_./~-]*)?")
"""Ray takes other addresses too, and imports the module that one begins with."""
SECRETS = ("_SECRET", "_TOKEN")
"""Environment variables that end so are in no job's environment, which Ray's dashboard shows."""
ANSWER_S = 10.0
NOT_YET = "No available agent"
"""What Ray answers before the head has all of its processes."""
CLUSTER_S = 60
"""Added to what a job is given to stop, beside `SPARE_S`: the job's own end."""
EXTRA: dict[str, tuple[str, Callable[[str], Any]]] = {
    "runtime-env-json": ("runtime_env", json.loads),
    "metadata-json": ("metadata", json.loads),
    "entrypoint-num-cpus": ("entrypoint_num_cpus", float),
    "entrypoint-num-gpus": ("entrypoint_num_gpus", float),
    "entrypoint-memory": ("entrypoint_memory", int),
    "entrypoint-resources": ("entrypoint_resources", json.loads),
}
"""Options of `ray job submit` that --extra takes -> what they are called in Python, and how they are read."""
OPTION = "--"


class Ray(Engine):
    """The cluster whose dashboard is at `--address`, or that this machine is a part of."""

    name = "ray"
    takes = frozenset(("nodes", "cpus_per_node", "gpus_per_node", "address", "extra"))
    needs_seal = True

    def check(self, request: LaunchRequest) -> None:
        """Raises: UserError for more nodes in the run than are asked for."""
        super().check(request)
        check_nodes(request)

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no number of a job, or no address."""
        job.check(id=(job.id, NUMBER), address=(job.place.get("address"), DASHBOARD))

    def script(self, request: LaunchRequest) -> str:
        """Return the command of Ray that submits the same job."""
        given = _given(request)
        words = ["ray", "job", "submit", "--no-wait", "--runtime-env-json", json.dumps(given["runtime_env"])]
        words += ["--address", request.address] if request.address else []
        words += [word for word in request.extra if not word.startswith("--runtime-env-json")]
        # Versions of Ray differ in how they quote this for a shell of their own: it has no variables.
        entry = f"cd {shlex.quote(str(request.work_dir))} && exec {shlex.join([sys.executable, *_words(request)])}"
        return f"{shlex.join(words)} -- {shlex.join(['sh', '-c', entry])}\n"

    def submit(self, request: LaunchRequest) -> LaunchedJob:
        """Submit the job."""
        job_id = f"argosy-{request.name}-{secrets.token_hex(4)}"
        return submit(request, job_id, _words(request), request.folder / f"ray-{job_id}.out")

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return what Ray says of the job."""
        client = client_of(job.place["address"])
        try:
            info = client.get_job_info(job.id)
        except RuntimeError as problem:
            if "does not exist" not in str(problem):
                raise no_cluster("--on ray", job.place["address"], problem) from None
            return "ended", "no longer known to Ray"
        words = info.status.lower()
        if info.status == "PENDING":
            return "waiting", words
        if info.status == "RUNNING":
            last = _last_line(Path(job.log))
            return ("waiting", last.removeprefix(WAITING)) if last.startswith(WAITING) else ("running", words)
        return "ended", words

    def stop(self, job: LaunchedJob) -> None:
        """Send SIGTERM to the job, which has its agents save."""
        client = client_of(job.place["address"])
        with refusals():
            client.stop_job(job.id)

    def logs(self, job: LaunchedJob, follow: bool) -> Iterator[bytes]:
        """Yield what the job prints; if it could not even begin, what Ray has noted."""
        is_empty = True
        for text in super().logs(job, follow):
            is_empty = False
            yield text
        if is_empty:
            with suppress(UserError, RuntimeError):
                yield client_of(job.place["address"]).get_job_logs(job.id).encode()


def submit(
    request: LaunchRequest, job_id: str, words: Sequence[str], log: Path, is_ours: bool = False, **given: Any
) -> LaunchedJob:
    """Submit `python WORDS` as a job of Ray with that number; `log` is where it prints.

    is_ours: what the command prints is led there; otherwise it writes the file itself. given: more arguments of Ray's
    `submit_job`, such as `entrypoint_num_cpus`.
    Raises: UserError if there is no cluster, or it refuses.
    """
    asked = {**_given(request), **given}
    client = client_of(request.address)
    entry = command(request.work_dir, words, log if is_ours else None)
    with refusals():
        _submit(client, entrypoint=entry, submission_id=job_id, **asked)
    place = {"address": client.get_address()}
    return LaunchedJob(
        engine=Ray.name, id=job_id, submitted_s=round(time.time(), 3), nodes=request.nodes, log=str(log), place=place
    )


def command(work_dir: Path, words: Sequence[str], log: Path | None = None) -> str:
    """Return `python WORDS` in a folder, for the shell of a job of Ray; log: a file that the output is added to."""
    python = shlex.quote(sys.executable)  # else the one of a cluster that was set up otherwise
    folder = shlex.quote(str(work_dir))
    into = f" >> {shlex.quote(str(log))} 2>&1" if log else ""
    return f"cd {folder} || exit 2; P={python}; [ -x $P ] || P=python; exec $P {shlex.join(words)}{into}"


def _words(request: LaunchRequest) -> list[str]:
    """Return the words after `python`."""
    words = ["-m", "argosy", "launch", *request.words, "--on", "ray", "--nodes", str(request.nodes)]
    words += ["--cpus-per-node", str(request.cpus_per_node)] if request.cpus_per_node else []
    words += ["--gpus-per-node", str(request.gpus_per_node)] if request.gpus_per_node else []
    return [*words, "--run-dir", str(request.run_dir)]


def _given(request: LaunchRequest) -> dict[str, Any]:
    """Return the arguments for submitting the job. Raises: UserError for an `--extra` that is no option of it."""
    given: dict[str, Any] = {}
    for word in request.extra:
        option, _, value = word.removeprefix(OPTION).partition("=")
        if not word.startswith(OPTION) or option not in EXTRA:
            known = ", ".join(f"--{name}" for name in EXTRA)
            raise UserError(f"--extra={word}: is no option of `ray job submit` that can be passed on. Known: {known}.")
        name, read = EXTRA[option]
        try:
            given[name] = read(value)
        except ValueError as problem:
            raise UserError(f"--extra={word}: {problem}. Try --extra='--{option}=...'.") from None
    environment = given.get("runtime_env", {})
    ours = {
        name: value for name, value in os.environ.items() if name.startswith("ARGOSY_") and not name.endswith(SECRETS)
    }
    ours[STOP_WAIT] = str(round(request.grace_s) + SPARE_S + CLUSTER_S)
    given["runtime_env"] = {**environment, "env_vars": {**ours, **environment.get("env_vars", {})}}
    return given


def client_of(address: str) -> Any:
    """Return a client of the cluster's jobs. Raises: UserError if there is no Ray here, or no cluster there."""
    need_ray("--on ray")
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as problem:
        raise UserError(f"--on ray: {problem}. Install it: pip install 'argosy[ray]'") from None
    try:
        knock(address)
        headers = json.loads(os.environ.get(HEADERS, "null"))
        with _without(*((API_ADDRESS, ADDRESS) if address else ())):  # they would go before the address
            return JobSubmissionClient(address or None, headers=headers)
    except (ConnectionError, RuntimeError, ValueError, OSError) as problem:
        raise no_cluster("--on ray", address, problem) from None


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
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read().decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    return ""
