"""The planner for programs: one call, as `argosy plan` on the command line."""

from __future__ import annotations

from typing import Any

from argosy.config.schema import RunConfig
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.report import PlanReport, plan_report
from argosy.plan.report.request import Question, of_model, of_run


def best_plans(what: RunConfig | str, cluster: str, **asked: Any) -> PlanReport:
    """Rank the plans for a run, or for the model preset of this name, on a cluster such as "8xh100" or a cluster file.

    asked: fields of `Question`, such as seq_len=8192, objective="cost", fix="tp=2" or top=3.
    The best plan is `report.choices[0].plan`, which can be a run's `plan`.

    Raises: UserError if nothing is legal or nothing fits, or for an unknown model or cluster.
    """
    question = Question(**asked)
    request = (
        of_run(what, Cluster.parse(cluster), question)
        if isinstance(what, RunConfig)
        else of_model(what, cluster, question)
    )
    return plan_report(request)
