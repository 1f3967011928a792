"""The schedule of several jobs: times with chances, what being late costs, and the commands for the clusters' own
schedulers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from argosy.config.layers import preset_names
from argosy.config.schema import RunConfig
from argosy.errors import UserError, counted
from argosy.files import expanded
from argosy.plan.cost.economy import price_per_device_h
from argosy.plan.cost.estimate import DAY, INTERVAL_Z, Estimate
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.jobs_file import ClusterSpec, JobsFile, JobSpec, named_in
from argosy.plan.report.report import PlanRequest, describe
from argosy.plan.report.request import in_keys
from argosy.plan.report.within import best_by_size
from argosy.plan.search.candidates import Candidate
from argosy.plan.search.schedule import JobPlacement, JobSize, PlannedJob, Stint, again, schedule

JOB_DRAWS = 200
"""Draws of how long jobs take, for the chance of being in time."""
IN_COMMON = 0.5
"""Share of the variance of predictions' errors that all jobs have in common: one model predicts them."""
PRIORITY_STEP = 1000
"""Between the priorities of jobs that follow each other, as SLURM's --nice and Kueue count them."""


@dataclass(frozen=True)
class JobCommand:
    """Commands for a cluster's scheduler."""

    at_s: float
    """Seconds from now."""
    lines: tuple[str, ...]
    """Comments begin with #."""


@dataclass(frozen=True)
class ScheduledJob:
    """A job with its place in the schedule."""

    name: str
    cluster: str
    stints: tuple[Stint, ...]
    is_elastic: bool
    begin_s: float
    """Seconds from now."""
    end_s: Estimate
    """Nine times of ten it ends from the first to the last."""
    deadline_s: float | None
    late_s: float
    """Seconds after the deadline, in the middle."""
    in_time: float | None
    """Chance of being in time; None without a deadline."""
    late_cost: float | None
    """Expected cost of being late; None: nobody says what a day costs."""
    device_hours: float
    money: float | None
    """Price of its device-hours; None if it is unknown."""
    commands: tuple[JobCommand, ...]
    """Commands for the cluster's scheduler."""


@dataclass(frozen=True)
class JobSchedule:
    """All jobs, in the order in which they begin."""

    jobs: tuple[ScheduledJob, ...]
    clusters: Mapping[str, int]
    """Name -> devices."""
    described: Mapping[str, str]
    """Name -> what it is made of."""
    currency: str
    end_s: float
    """The time at which all have ended."""
    late_cost: float
    """Expected cost of being late, of jobs that say what a day costs."""
    once: tuple[str, ...]
    """Commands that come before those of jobs."""
    used: Mapping[str, float]
    """Name -> share of its device-hours until then that jobs use."""


def scheduled(file: JobsFile, request_of: Callable[[JobSpec, ClusterSpec], PlanRequest], path: Path) -> JobSchedule:
    """Return the schedule. Raises: UserError if a cluster is not known, or a job fits none that it may run on.

    request_of: returns the request to the planner about a job on a cluster; path: the file, for errors.
    """
    places = {}
    for i, spec in enumerate(file.clusters):
        try:
            places[spec.name] = Cluster.parse(spec.cluster)
        except UserError as error:
            raise UserError(f'{named_in(path, "clusters", i, "cluster")} = "{spec.cluster}": {error}') from None
    currencies = {place.currency for place in places.values()}
    if len(currencies) > 1:
        raise UserError(f"{path}: clusters have prices in {', '.join(sorted(currencies))}. Give all in one currency.")
    choices = {job.name: _choices(i, file, places, request_of, path) for i, job in enumerate(file.jobs)}
    jobs = {job.name: _planned(job, choices[job.name]) for job in file.jobs}
    devices = {name: place.devices for name, place in places.items()}
    found = schedule(list(jobs.values()), devices)
    drawn = _drawn(jobs, devices, found, choices)
    shown = [
        _shown(each, file, jobs[each.job], choices[each.job][each.cluster], places[each.cluster], drawn[:, i], rank)
        for i, (each, rank) in enumerate(zip(found, _ranks(found), strict=True))
    ]
    end_s = max(each.end_s for each in found)
    used = {name: sum(job.device_hours for job in shown if job.cluster == name) for name in devices}
    return JobSchedule(
        jobs=tuple(sorted(shown, key=lambda job: (job.begin_s, job.name))),
        clusters=devices,
        described={name: describe(place) for name, place in places.items()},
        currency=next(iter(currencies)),
        end_s=end_s,
        late_cost=sum(job.late_cost or 0.0 for job in shown),
        once=tuple(_once(file, [job.cluster for job in shown])),
        used={name: hours * 3600 / end_s / devices[name] for name, hours in used.items()},
    )


@dataclass(frozen=True)
class JobChoices:
    """A way in which a job could run on a cluster."""

    run: RunConfig
    """The plan, with the batch and the length of sequences that were assumed."""
    sizes: tuple[Candidate, ...]


def _choices(
    index: int,
    file: JobsFile,
    places: Mapping[str, Cluster],
    request_of: Callable[[JobSpec, ClusterSpec], PlanRequest],
    path: Path,
) -> dict[str, JobChoices]:
    """Return the sizes that a job could have on each cluster; those on which nothing fits are left out."""
    job = file.jobs[index]
    found: dict[str, JobChoices] = {}
    problems, blamed = [], ""
    for spec in file.clusters:
        if job.clusters and spec.name not in job.clusters:
            continue
        try:
            request, _, sizes = best_by_size(request_of(job, spec))
        except UserError as error:
            problems.append(f"{spec.name}: {in_keys(str(error))}")
            continue
        most = job.most_devices or max(size.devices for size in sizes)
        node = places[spec.name].devices_per_node
        whole = [size for size in sizes if size.devices % node == 0] or sizes  # parts of nodes would leave holes
        able = [size for size in whole if job.least_devices <= size.devices <= most]
        if able:
            found[spec.name] = JobChoices(request.run, tuple(able))
        else:
            blamed = "least_devices" if job.least_devices > 1 else "most_devices"
            sizes_there = ", ".join(str(size.devices) for size in sizes[:12])
            problems.append(
                f"{spec.name}: no plan {_of_size(job)} of its {counted(places[spec.name].devices, 'device')}; "
                f"there are plans for {sizes_there}"
            )
    if not found:
        key = named_in(path, "jobs", index, *([blamed] if blamed else []))
        value = f" = {getattr(job, blamed)}" if blamed else ""
        raise UserError(
            f'{key}{value}: job "{job.name}" runs on no cluster. Change it or add a cluster:\n  '
            + "\n  ".join(problems)
        )
    return found


def _of_size(job: JobSpec) -> str:
    if job.most_devices is None:
        return f"on {job.least_devices} or more"
    return f"on {job.least_devices} to {job.most_devices}"


def _planned(job: JobSpec, choices: Mapping[str, JobChoices]) -> PlannedJob:
    return PlannedJob(
        name=job.name,
        sizes={
            name: [JobSize(size.devices, float(size.run.time_s.mid), size.plan) for size in each.sizes]
            for name, each in choices.items()
        },
        priority=job.priority,
        ready_s=job.not_before,
        deadline_s=float("inf") if job.deadline is None else job.deadline,
        late_per_day=job.late_per_day,
        after=job.after,
        elastic=job.elastic,
    )


def _drawn(
    jobs: Mapping[str, PlannedJob],
    devices: Mapping[str, int],
    found: Sequence[JobPlacement],
    choices: Mapping[str, Mapping[str, JobChoices]],
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return the ends of jobs where each takes as long as its prediction allows. Shape: (JOB_DRAWS, jobs)."""
    random, ends = np.random.default_rng(0), []
    stds = []
    for each in found:
        time_s = next(s for s in choices[each.job][each.cluster].sizes if s.devices == each.most).run.time_s
        stds.append(float(np.log(time_s.high / time_s.low)) / 2 / INTERVAL_Z)
    for _ in range(JOB_DRAWS):
        common = random.standard_normal() * np.sqrt(IN_COMMON)
        own = random.standard_normal(len(found)) * np.sqrt(1 - IN_COMMON)
        factors = {
            each.job: float(np.exp(std * (common + own[i])))
            for i, (each, std) in enumerate(zip(found, stds, strict=True))
        }
        ends.append([each.end_s for each in again(jobs, devices, found, factors)])
    return np.array(ends)


def _ranks(found: Sequence[JobPlacement]) -> list[int]:
    """Return each job's place among those of its cluster, by their beginning: 0 is the first."""
    order = sorted(range(len(found)), key=lambda i: (found[i].begin_s, found[i].end_s))
    return [sum(1 for j in order[: order.index(i)] if found[j].cluster == found[i].cluster) for i in range(len(found))]


def _shown(
    each: JobPlacement,
    file: JobsFile,
    job: PlannedJob,
    choice: JobChoices,
    cluster: Cluster,
    ends: np.ndarray[tuple[int], np.dtype[np.float64]],
    rank: int,
) -> ScheduledJob:
    spec = next(one for one in file.jobs if one.name == each.job)
    place = next(one for one in file.clusters if one.name == each.cluster)
    late_s = np.maximum(0.0, ends - job.deadline_s)
    low, high = np.quantile(ends, (0.05, 0.95))
    hours = sum((stint.end_s - stint.begin_s) / 3600 * stint.devices for stint in each.stints)
    price = price_per_device_h(cluster)
    return ScheduledJob(
        name=each.job,
        cluster=each.cluster,
        stints=each.stints,
        is_elastic=len(each.stints) > 1,
        begin_s=each.begin_s,
        end_s=Estimate(min(float(low), each.end_s), each.end_s, max(float(high), each.end_s)),
        deadline_s=spec.deadline,
        late_s=job.late_s(each.end_s),
        in_time=None if spec.deadline is None else float((late_s == 0).mean()),
        late_cost=None if spec.late_per_day is None else float(late_s.mean()) / DAY * spec.late_per_day,
        device_hours=hours,
        money=None if price is None else hours * float(price.mid),
        commands=tuple(_commands(each, spec, place, choice, cluster, rank, float(high - each.begin_s))),
    )


def _commands(
    each: JobPlacement,
    spec: JobSpec,
    place: ClusterSpec,
    choice: JobChoices,
    cluster: Cluster,
    rank: int,
    longest_s: float,
) -> list[JobCommand]:
    """Return the commands that give a job to its cluster's scheduler: that one starts it, when it has room."""
    found = []
    for k, stint in enumerate(each.stints):
        lines = [f"# {after_now(stint.begin_s)}: {each.job} on {counted(stint.devices, 'device')} of {place.name}"]
        if spec.model and not _model_words(spec.model):
            why = f"no command: {spec.model} has no weights to start from; write its sizes to a run file, and give run"
            found.append(JobCommand(stint.begin_s, (*lines, f"# {why}")))
            continue
        if k:
            lines.append(f"argosy stop runs/{each.job}")
        elif spec.model:
            lines[0] += "; add its data, --data.sources ..."
        words = _launch(stint, spec, place, choice, cluster)
        if place.on == "slurm":
            words += ["--time", _slurm_time(longest_s), f"--extra=--nice={PRIORITY_STEP * rank}"]
            words += [f"--extra=--begin=now+{stint.begin_s:.0f}"] if stint.begin_s and not k else []
        elif place.on == "kubernetes":
            words.append(shlex.quote(f'--extra={{"priorityClassName": "argosy-{rank}"}}'))
        found.append(JobCommand(stint.begin_s, (*lines, " ".join(words))))
    return found


def _launch(stint: Stint, spec: JobSpec, place: ClusterSpec, choice: JobChoices, cluster: Cluster) -> list[str]:
    """Return the words of `argosy launch` for a stint, without what its scheduler is told of time and priority."""
    machines = -(-stint.devices // cluster.devices_per_machine)
    words = [
        "argosy",
        "launch",
        *([shlex.quote(spec.run)] if spec.run else _model_words(spec.model)),
    ]
    words += ["--name", spec.name, "--on", place.on, "--nodes", str(machines)]
    words += ["--gpus-per-node", str(-(-stint.devices // machines))] if cluster.device.kind != "cpu" else []
    words += [shlex.quote(option) for option in place.options]
    if spec.model or spec.seq_len:
        words += ["--data.seq-len", str(choice.run.data.seq_len)]
    if spec.model or spec.global_batch:
        words += ["--train.global-batch", str(choice.run.train.global_batch)]
    if spec.model or spec.tokens:
        steps = next(size.run.steps for size in choice.sizes if size.devices == stint.devices)
        words += ["--train.steps", f"{float(steps):.0f}"]
    return [*words, "--plan", shlex.quote(stint.plan)]


def _model_words(model: str) -> list[str]:
    """Return the words that name a job's model; none for a Hugging Face folder that has no weights."""
    if model in preset_names("models"):
        return ["--model.preset", model]
    path = expanded(model)
    folder = path.parent if path.name == "config.json" else path
    return ["--model.weights", shlex.quote(str(folder))] if any(folder.glob("*.safetensors")) else []


def _slurm_time(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}"


def after_now(seconds: float) -> str:
    """Return a time from now: now, +20 min, +5.0 h, +3.2 d."""
    if seconds < 60:
        return "now"
    if seconds < 3600:
        return f"+{seconds / 60:.0f} min"
    return f"+{seconds / 3600:.1f} h" if seconds < 2 * DAY else f"+{seconds / DAY:.1f} d"


def _once(file: JobsFile, used: Sequence[str]) -> list[str]:
    """Return what Kubernetes and Ray must be told once. used: the cluster of each job."""
    lines = []
    for place in file.clusters:
        many = used.count(place.name)
        if place.on == "kubernetes" and many:
            lines.append(
                f"# {place.name}: Kueue takes a pod's priority class, and the LocalQueue that --partition names "
                "(without it: default)"
            )
            values = [(f"argosy-{rank}", PRIORITY_STEP * (many - rank)) for rank in range(many)]
            lines += [f"kubectl create priorityclass {name} --value={value}" for name, value in values]
        elif place.on == "ray" and many:
            lines.append(f"# {place.name}: Ray knows no priorities; give each command at its time")
    return lines
