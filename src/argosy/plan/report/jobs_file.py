"""JOBS.toml: several runs with deadlines and priorities, and the clusters that one has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from argosy.config.layers import place_in
from argosy.config.load import build_file
from argosy.config.section import Section, count_of, dotted, seconds_of


def _duration(value: object) -> object:
    return seconds_of(value) if isinstance(value, str) else value


def _count(value: object) -> object:
    return float(count_of(value)) if isinstance(value, str) else value


Duration = Annotated[NonNegativeFloat, BeforeValidator(_duration)]
"""Seconds, or a text such as "12h"."""
Tokens = Annotated[PositiveFloat, BeforeValidator(_count)]
"""A count, or a text such as "200B"."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$")]


class ClusterSpec(Section):
    """A cluster that jobs may run on."""

    name: Name
    """The name by which jobs refer to it."""
    cluster: str
    """NxDEVICE, a preset, or a file, as --cluster of `argosy plan`."""
    on: Literal["slurm", "kubernetes", "ray"] = "slurm"
    """Its scheduler, for which commands are written."""
    options: tuple[str, ...] = ()
    """More options of `argosy launch`, e.g. ["--partition", "gpu"]."""


class JobSpec(Section):
    """A run that is to be made."""

    name: Name
    """Its name."""
    run: str = ""
    """A run file, or the name of a run preset; or use model."""
    model: str = ""
    """A model preset, a Hugging Face folder, or its config.json."""
    tokens: Tokens | None = None
    """Tokens to train on, e.g. "200B"; default: the run's, or 20 for each active parameter."""
    seq_len: PositiveInt | None = None
    """Tokens of a sequence."""
    global_batch: PositiveInt | None = None
    """Sequences in a step."""
    clusters: tuple[str, ...] = ()
    """Clusters that it may run on; default: all."""
    least_devices: PositiveInt = 1
    """It takes no fewer devices."""
    most_devices: PositiveInt | None = None
    """It takes no more; default: all of a cluster."""
    elastic: bool = True
    """Its devices may change while it runs, where that pays."""
    priority: PositiveFloat = 1.0
    """Weight among jobs without late_per_day: twice as much, twice as urgent."""
    not_before: Duration = 0.0
    """Time from now before which it may not begin, e.g. "2d"."""
    deadline: Duration | None = None
    """Time from now by which it is to be done, e.g. "30d"."""
    late_per_day: NonNegativeFloat | None = None
    """Cost of each day after that, in the clusters' currency."""
    after: tuple[str, ...] = ()
    """Jobs that must have ended before it begins."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if bool(self.run) == bool(self.model):
            raise ValueError(f'job "{self.name}": give either run or model, e.g. model = "llama3-8b"')
        if self.late_per_day is not None and self.deadline is None:
            raise ValueError(f'late_per_day of job "{self.name}" needs a deadline, e.g. deadline = "30d"')
        if self.deadline is not None and self.deadline <= self.not_before:
            raise ValueError(f'deadline of job "{self.name}" is not after not_before; make it later')
        if self.most_devices is not None and self.most_devices < self.least_devices:
            raise ValueError(f'most_devices of job "{self.name}" is less than least_devices; make it more')
        return self


class JobsFile(Section):
    """JOBS.toml: runs, and the clusters that one has."""

    clusters: tuple[ClusterSpec, ...] = ()
    """The clusters."""
    jobs: tuple[JobSpec, ...] = ()
    """The runs."""

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        places, names = [each.name for each in self.clusters], [job.name for job in self.jobs]
        for key, found, example in (
            ("clusters", places, 'cluster = "64xh100"'),
            ("jobs", names, 'model = "llama3-8b"'),
        ):
            if not found:
                raise ValueError(f'{key} is empty; add [[{key}]] with name = "a", {example}')
            if twice := next((i for i, name in enumerate(found) if name in found[:i]), 0):
                raise ValueError(f'{key}[{twice}].name = "{found[twice]}" is the name of two; rename one')
        for i, job in enumerate(self.jobs):
            for key, given, known in (("clusters", job.clusters, places), ("after", job.after, names)):
                if strange := next((name for name in given if name not in known), None):
                    raise ValueError(
                        f'jobs[{i}].{key} of job "{job.name}" names "{strange}"; there are {", ".join(known)}'
                    )
        _check_order(self.jobs)
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the file. Raises: UserError that names every wrong key, with its line."""
        return build_file(cls, path)


def _check_order(jobs: Sequence[JobSpec]) -> None:
    ended: set[str] = set()
    while len(ended) < len(jobs):
        able = {job.name for job in jobs if job.name not in ended and ended.issuperset(job.after)}
        if not able:
            i, circle = next((i, job) for i, job in enumerate(jobs) if job.name not in ended)
            raise ValueError(f'jobs[{i}].after of job "{circle.name}" leads back to it; leave one of the names out')
        ended |= able


def named_in(path: Path, *key: str | int) -> str:
    """Return a key of a file of jobs as an error names it, with its line."""
    return place_in(path, key) + dotted(key)
