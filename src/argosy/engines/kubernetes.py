"""Kubernetes: a JobSet, made, followed and deleted through the user's kubectl.

kubectl, not the client for Python: whoever has a cluster has it, with contexts, plugins for logging in and proxies set
up, it says itself what is wrong, and what is done here can be done again by hand.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from argosy.engines.engine import FOLLOW_LOOK_S, LOG_PIECE_BYTES, PROGRAM_ANSWER_S, Engine, Job, RunJob
from argosy.engines.jobset import (
    JOBSET_LABEL,
    ClusterPlace,
    Object,
    access,
    belongings,
    in_yaml,
    jobset,
    lease_of,
    needs_access,
)
from argosy.engines.record import JobState, LaunchedJob
from argosy.errors import UserError
from argosy.files import json_of
from argosy.processes.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, secret_of

MOUNT = "/data"
NAME_CHARS = 30
"""Letters of the run's name in the names of its objects, which may have 63 with what JobSet adds."""
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A DNS label (RFC 1123), as Kubernetes takes it for a JobSet and a namespace."""
QUEUE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
"""The name of a LocalQueue of Kueue, which stands in a label."""
RESOURCE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?")
"""The name of what a device plugin offers, with its vendor's domain."""
MADE_AT_LAUNCH = "made when the run is launched"
STEP_IN_LOG = re.compile(rb"\bstep\s+(\d+)/")
TAIL_LINES = 200


class Kubernetes(Engine):
    """The cluster of kubectl's current context."""

    name = "kubernetes"
    starts_programs = False
    takes = frozenset(
        (
            "nodes",
            "cpus_per_node",
            "gpus_per_node",
            "gpu_resource",
            "memory_per_node",
            "namespace",
            "partition",
            "volume",
            "image",
            "extra",
        )
    )

    def check(self, job: RunJob) -> None:
        """Raises: UserError if the image or the volume is missing, or a name is none that Kubernetes takes."""
        super().check(job)
        if not job.image:
            raise UserError(
                "--on kubernetes: no image is given. Build one from Argosy's Dockerfile, push it to a registry that "
                "the cluster reaches, and give its name: --image REGISTRY/argosy:TAG."
            )
        if not job.volume.partition(":")[0]:
            raise UserError(
                "--on kubernetes: no volume is given. Name a PersistentVolumeClaim that all pods can write to, for the "
                "data and the run's folder: --volume CLAIM."
            )
        if not RESOURCE_NAME.fullmatch(job.gpu_resource):
            raise UserError(f"--gpu-resource {job.gpu_resource}: no resource of a device plugin. Try amd.com/gpu.")
        for option, name, form in ("namespace", job.namespace, DNS_LABEL), ("partition", job.partition, QUEUE_NAME):
            if name and not form.fullmatch(name):
                raise UserError(
                    f"--{option} {name}: no name that Kubernetes takes. Give small letters, digits, dashes; at most 63."
                )
        job.check_nodes()

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what cannot be the name of an object, or of a namespace."""
        job.check(id=(job.id, DNS_LABEL), namespace=(job.place.get("namespace"), DNS_LABEL))

    def script(self, job: RunJob) -> str:
        """Return the objects in YAML, as `kubectl create -f -` takes them."""
        namespace = job.namespace or (_own_namespace() if shutil.which("kubectl") else "default")
        place = _place(job, namespace, "00000")
        made = access(place) if needs_access(lease_of(job, place)) else []
        return in_yaml([*made, *belongings(job, place, MADE_AT_LAUNCH, ""), jobset(job, place)])

    def start(self, job: Job) -> LaunchedJob:
        """Make the objects; none is left if one is refused."""
        assert isinstance(job, RunJob)
        place = _place(job, job.namespace or _own_namespace(), secrets.token_hex(3)[:5])
        made = jobset(job, place)
        _check_claim(job, place)
        is_given = SECRET_VARIABLE in os.environ or SECRET_FILE_VARIABLE in os.environ
        secret = secret_of(job.home).decode() if is_given or job.run.site else secrets.token_hex(32)
        if needs_access(lease_of(job, place)):
            _allow(place)
        uid = _parsed("create", "-f", "-", text=json.dumps(made))["metadata"]["uid"]
        try:
            for owned in belongings(job, place, secret, uid):
                _ask("create", "-f", "-", text=json.dumps(owned))
        except UserError:
            _ask("delete", "jobset", place.name, f"--namespace={place.namespace}", "--wait=false", may_fail=True)
            raise
        found_by = {"namespace": place.namespace, "run_dir": str(place.run_dir)}
        return LaunchedJob.submitted(self.name, place.name, job.nodes, place=found_by)

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return what the JobSet's conditions and its pods say."""
        if not (found := _parsed("get", "jobset", job.id, *_where(job), "--ignore-not-found")):
            return "ended", "no longer known to Kubernetes"
        for condition in found.get("status", {}).get("conditions", ()):
            if condition["type"] in ("Completed", "Failed") and condition["status"] == "True":
                return "ended", f"{condition['type'].lower()}: {condition.get('message', '')}".rstrip(": ")
        pods = _parsed("get", "pods", *_where(job), *_selected(job)).get("items", ())
        running = sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)
        if "deletionTimestamp" in found["metadata"]:
            return "running", f"being stopped, {running} pods are left"
        reasons = [reason for pod in pods if (reason := _why_waiting(pod))]
        words = f"{running} of {job.nodes} pods" + (f"; {reasons[0]}" if reasons else "")
        return ("running" if running else "waiting"), words

    def stop(self, job: LaunchedJob) -> None:
        """Delete the JobSet: its pods are sent SIGTERM, and have the time to save."""
        _ask("delete", "jobset", job.id, *_where(job), "--cascade=foreground", "--wait=false", "--ignore-not-found")

    def step(self, job: LaunchedJob) -> int | None:
        printed = _ask("logs", *_where(job), *_selected(job), f"--tail={TAIL_LINES}", may_fail=True)
        steps = [int(number) for number in STEP_IN_LOG.findall(printed.encode())]
        return max(steps, default=None)

    def logs(self, job: LaunchedJob, follow: bool) -> Iterator[bytes]:
        """Yield what the pods print, each line with its pod's name; also that of pods that come later."""
        words = ["kubectl", "logs", *_where(job), *_selected(job), "--prefix", f"--max-log-requests={job.nodes + 8}"]
        since = ["--tail=-1"]
        while True:
            asked = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            with subprocess.Popen([*words, *since, *(["-f"] if follow else [])], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                while text := process.stdout.read1(LOG_PIECE_BYTES):  # type: ignore[attr-defined]
                    since = [f"--since-time={asked}"]
                    yield text
                    asked = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            if not follow or self.known(job)[0] == "ended":
                return
            time.sleep(FOLLOW_LOOK_S)


def _place(job: RunJob, namespace: str, mark: str) -> ClusterPlace:
    slug = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:NAME_CHARS].strip("-") or "run"
    slug = slug if slug[0].isalpha() else f"r-{slug}"
    claim, _, path = job.volume.partition(":")
    mount = PurePosixPath(path or MOUNT)
    if not mount.is_absolute():
        raise UserError(f"--volume {job.volume}: {path} is no absolute path. Try {claim}:{MOUNT}.")
    own = PurePosixPath(job.run_dir)
    if not own.is_relative_to(mount):
        if not own.is_relative_to(job.work_dir):
            raise UserError(
                f"--run-dir {own}: the run's folder is in the volume, at {mount} in the pods. Give a folder there, or "
                "one in this folder, which has the same path in the volume."
            )
        own = mount / own.relative_to(job.work_dir)
    return ClusterPlace(f"{slug}-{mark}", namespace, claim, mount, own)


def _check_claim(job: RunJob, place: ClusterPlace) -> None:
    """Raises: UserError if the volume is not there, or several nodes cannot write to it."""
    found = _parsed("get", "pvc", place.claim, f"--namespace={place.namespace}")
    modes = found.get("spec", {}).get("accessModes", [])
    if job.nodes > 1 and "ReadWriteMany" not in modes:
        raise UserError(
            f"--volume {place.claim}: its access modes are {', '.join(modes)}, and {job.nodes} nodes have to write "
            "to it. Name a claim with ReadWriteMany."
        )


def _allow(place: ClusterPlace) -> None:
    """Make the service account of the pods and its rights, where they are not there yet."""
    for made in access(place):
        try:
            _ask("create", "-f", "-", text=json.dumps(made))
        except UserError as refused:
            if "AlreadyExists" not in str(refused):
                raise UserError(
                    f"{refused} Pods hold the run's lease with a service account. Ask an administrator for the objects "
                    "that --dry-run shows, or agree through the volume: --launch.lease folder."
                ) from None


def _why_waiting(pod: Object) -> str:
    """Return why a pod does not run, in Kubernetes' words; empty if it does."""
    status = pod.get("status", {})
    for container in status.get("containerStatuses", ()):
        if waits := container.get("state", {}).get("waiting"):
            return f"{waits.get('reason', 'waiting')}: {waits.get('message', '')}".rstrip(": ")
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'waiting')}: {condition.get('message', '')}".rstrip(": ")
    return ""


def _own_namespace() -> str:
    return _ask("config", "view", "--minify", "-o", "jsonpath={..namespace}", may_fail=True) or "default"


def _where(job: LaunchedJob) -> list[str]:
    return [f"--namespace={job.place['namespace']}"]


def _selected(job: LaunchedJob) -> list[str]:
    return [f"--selector={JOBSET_LABEL}={job.id}"]


def _parsed(*words: str, text: str | None = None) -> Object:
    """Return the object that kubectl prints with these words; empty if it prints nothing. Raises: UserError."""
    said = _ask(*words, "-o", "json", text=text)
    try:
        found = json_of(said or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"--on kubernetes: kubectl says {said[:300]!r}, which is no object in JSON. Try it by hand.")
    return found


def _ask(*words: str, text: str | None = None, may_fail: bool = False) -> str:
    """Return what kubectl prints. Raises: UserError with what it says, if it fails."""
    if shutil.which("kubectl") is None:
        raise UserError("--on kubernetes: there is no kubectl here. Install it, and set it up for your cluster.")
    try:
        done: Any = subprocess.run(
            ["kubectl", *words],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",  # what pods have printed may be anything
            timeout=PROGRAM_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--on kubernetes: kubectl did not answer within {PROGRAM_ANSWER_S:.0f} s. Try again later."
        ) from None
    if done.returncode and not may_fail:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if "no matches for kind" in said or "the server doesn't have a resource type" in said:
            said += " (the cluster has no JobSet: an administrator installs it, see https://jobset.sigs.k8s.io)"
        raise UserError(f"--on kubernetes: kubectl refuses: {said.rstrip('.')}. Mend that, and launch again.")
    return str(done.stdout).strip() if not done.returncode else ""
