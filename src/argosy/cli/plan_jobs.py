"""`argosy plan --jobs`: several runs on the clusters that one has; and files that options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.cli.documents import write, write_text
from argosy.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from argosy.plan.report.jobs import ClusterSpec, JobSpec
    from argosy.plan.report.report import PlanRequest

TOGETHER = ("jobs", "json", "html")
"""Options that --jobs goes with."""


def schedule_jobs(
    path: Path, request_about: Callable[[dict[str, Any], str], PlanRequest], html: Path | None, is_json: bool
) -> None:
    """Print the schedule of the jobs in a file, and write its page. Raises: UserError.

    request_about: returns the planner's request about these options on a cluster.
    """
    from argosy.plan.report import gantt
    from argosy.plan.report.jobs import JobsFile, scheduled

    def request_of(job: JobSpec, place: ClusterSpec) -> PlanRequest:
        sizes = {"tokens": job.tokens, "seq_len": job.seq_len, "global_batch": job.global_batch}
        return request_about({"run": job.run or None, "model": job.model or None, **sizes}, place.cluster)

    found = scheduled(JobsFile.load(path), request_of, str(path))
    if html is not None:
        write_text(html, gantt.page(found), "--html")
    if is_json:
        write("plan-jobs", found)
        return
    gantt.show(found)
    if html is not None:
        print(f"\n{html}")


def refuse_other_options(options: DataclassInstance, usual: DataclassInstance) -> None:
    """Raise UserError if an option is given that is about one run."""
    for name in (field.name for field in fields(options) if field.name not in TOGETHER):
        if (given := getattr(options, name)) != getattr(usual, name):
            said = str(given) if name == "run" else f"--{name.replace('_', '-')}"
            raise UserError(
                f"{said} is said of one run, and --jobs is a file of several. Leave it out, or write it there."
            )
