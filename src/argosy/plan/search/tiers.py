"""The tiers in which replicas sum gradients, chosen for the plans of a search: neighbours of a node or a site first.

They change no number but by the order of a sum. A plan stays plain unless tiers save `WORTH` of its step: where nodes
have fast adapters, a ring through all ranks is as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.step_time import StepTime
from argosy.plan.layouts import Ints, Layouts
from argosy.plan.rules import breaks_any
from argosy.plan.search.space import Pins

WORTH = 0.03
"""Share of a step that tiers must save: predictions do not tell plans apart by less (`plan.search.best`)."""
OURS = ("sum_inside", "sum_between")


def with_tiers(costs: CostModel, plans: Layouts, time: StepTime, pins: Pins) -> tuple[Layouts, StepTime]:
    """Return the plans with the tiers that make each fastest, if that saves `WORTH` of its step, and their times.

    time: that of `plans`. Plans that could not become as fast as the fastest of all are left as they are.
    """
    if not len(plans) or any(key in pins for key in OURS):
        return plans, time
    total = np.array(time.total)
    without = total - np.asarray(time.gradients)
    could = (np.asarray(time.gradients) > WORTH * total) & (without < total.min())
    columns = {f.name: np.array(np.broadcast_to(getattr(plans, f.name), len(plans))) for f in fields(plans)}
    best = total.copy()
    for inside, between in _tiers(costs, plans):
        rows = np.flatnonzero(could & _divides(plans, inside, between))
        tiered = replace(plans[rows], sum_inside=inside[rows], sum_between=between[rows])
        legal = ~np.broadcast_to(breaks_any(tiered, costs.run), len(rows))
        rows, tiered = rows[legal], tiered[legal]
        if not len(rows):
            continue
        tiered = tiered if "bucket_mb" in pins else costs.with_buckets(tiered)
        timed = costs.predict_time(tiered)
        saves = np.asarray(timed.total) < np.minimum(best[rows], (1 - WORTH) * total[rows])
        better = rows[saves]
        best[better] = np.asarray(timed.total)[saves]
        for key in (*OURS, "bucket_mb"):
            columns[key][better] = np.broadcast_to(getattr(tiered, key), len(rows))[saves]
        for f in fields(StepTime):
            getattr(time, f.name)[better] = getattr(timed, f.name)[saves]
    return Layouts(**columns), time


def _tiers(costs: CostModel, plans: Layouts) -> Iterator[tuple[Ints, Ints]]:
    """Yield sizes of the inner tiers, one for each plan: those of a node, of a site, and of a node in a site."""
    of_node, of_site = (_replicas_in(int(unit), plans) for unit in (costs.rates.node, costs.rates.site))
    alone = np.ones_like(of_node)
    yield of_node, alone
    if costs.rates.site < costs.devices:
        yield of_site, alone
        yield of_node, of_site // of_node


def _replicas_in(devices: int, plans: Layouts) -> Ints:
    """Return how many replicas lie next to each other on so many devices; 1 where they do not come out even."""
    apart = plans.tp * plans.shares_state
    return np.broadcast_to(np.where(devices % apart == 0, np.maximum(1, devices // apart), 1), len(plans))


def _divides(plans: Layouts, inside: Ints, between: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    unit = inside * between
    return (inside > 1) & (unit < plans.replicas) & (plans.replicas % unit == 0)
