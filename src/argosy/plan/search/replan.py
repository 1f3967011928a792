"""Re-planning: the best plan for the devices that are left, and the decision to migrate to another plan.

The numbers of a run stay: the global batch (fewer ranks accumulate more microbatches), the number formats (but for that
of sums where one replica is left), and, if any plan can, the format in which weights are gathered. The search that
`plan = "auto"` uses chooses everything else again; what the user wrote in the run's plan is given up last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from argosy.config.schema import RunConfig
from argosy.errors import UserError, counted
from argosy.plan.cost.breakdown import OF_TIME, slowed
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import resized
from argosy.plan.plan import NUMERICS, Plan, said_in
from argosy.plan.search.auto import costs_of
from argosy.plan.search.search import SearchResult, plainest, search_to_run, why_nothing_fits
from argosy.plan.search.space import Pins
from argosy.plan.sync import COMPRESSED

GIVEN_UP: tuple[tuple[str, ...], ...] = (
    ("dp_replicate", "dp_shard", "microbatch", "shares"),
    ("pp", "schedule", "stages_per_rank", "layers", "ep"),
    ("cp", "context"),
    ("tp",),
    ("zero", "recompute", "recompute_every", "offload"),
)
"""The user's keys are given up in this order: first those that follow from the number of ranks."""
LAYOUT_KEYS = tuple(key for keys in GIVEN_UP for key in keys)
"""Keys of a plan that a user may have written and that do not change the numbers."""
WORTH_A_PIN = 1.25
"""A pin of the user is kept if its steps take at most so many times the steps without it."""
COUNTS_TRIED = 16
"""Numbers of processes below the given one that are tried one by one, and then numbers of whole nodes."""
LEAST_WAITING = 0.001
"""Share of a predicted step below which its waits for links count as nothing."""
REPLAN_S = 300.0
"""Assumed cost of going on with another plan: saving, starting, compiling."""
LEAST_GAIN = 0.1
"""Share of the step that another plan must save: predictions for two plans of one machine are not more certain."""
MIGRATIONS_WORTH = 2.0
"""Times that the saving must make up for the migration: the machine may change again before the run ends."""


@dataclass(frozen=True)
class Replanned:
    """A plan for the devices that are left."""

    plan: Plan
    spares: int
    """Processes that the plan leaves idle."""
    step_s: float
    """Predicted seconds of a step."""
    notes: tuple[str, ...]
    """Changes and differences from what the user wrote, in words."""


def replan(run: RunConfig, plan: Plan, machine: Cluster, processes: int) -> Replanned:
    """Return the plan to go on with on `processes` processes of `machine`, where `plan` is in force.

    It has as many processes as is best: if a batch, a model or a mesh cannot be dealt out over all of them, some become
    spares. The pins of `run.plan` are all kept if that leaves no spares, or else as many of them as cost no more than
    `WORTH_A_PIN`.
    Raises: UserError if nothing fits, or there are no processes.
    """
    if processes < 1:
        raise UserError("no process is left. Start some, and run the same command again.")
    kept: Pins = {key: (getattr(plan, key),) for key in NUMERICS}
    try:
        freest, pinned = _best(run, plan, machine, processes, kept), _pinned(run)
    except UserError:
        if plan.sync not in COMPRESSED:
            raise
        return replan(run, plan.model_copy(update={"sync": "exact"}), machine, processes)  # one replica sums nothing
    for given_up in range(len(GIVEN_UP)):
        pins = {key: values for key, values in pinned.items() if not any(key in keys for keys in GIVEN_UP[:given_up])}
        if not pins:
            break
        try:
            found = _best(run, plan, machine, processes, {**kept, **pins})
        except UserError:
            continue
        all_of_it = not given_up and not found.spares
        if all_of_it or found.step_s <= WORTH_A_PIN * freest.step_s:
            return _noted(found, plan, run)
    return _noted(freest, plan, run)


def step_with_slow_rank_s(run: RunConfig, plan: Plan, machine: Cluster, times: float) -> float:
    """Predict the seconds of a step in which one rank's work takes `times` times as long; the others wait."""
    factors = slowed(machine.factors, times, "compute", "optimizer")
    return float(predict(plan, run, machine.model_copy(update={"factors": factors})).step_s.mid)


def with_slow_link(run: RunConfig, plan: Plan, machine: Cluster, times: float) -> Cluster:
    """Return the machine with links so slow that a step of `plan` takes so many times as long as predicted.

    Raises: UserError if the plan sends too little for slow links to explain that.
    """
    usual = predict(plan, run, machine)
    waits_s = sum(usual.seconds[name] for name in OF_TIME["network"])
    if waits_s < LEAST_WAITING * usual.step_s.mid:
        raise UserError(f'"{plan}" is not predicted to wait for any link: something else is slow.')
    slower = 1 + (times - 1) * float(usual.step_s.mid) / waits_s
    return machine.model_copy(update={"factors": slowed(machine.factors, slower, "network")})


def worth_migrating(predicted_now_s: float, predicted_new_s: float, steps_left: int, migration_s: float) -> bool:
    """Return True if migrating from the running plan to one that is predicted to be faster is worth its cost.

    predicted_now_s, predicted_new_s: a step of either, predicted for the machine as it is measured to be now (a rank
    that became slow, a link that was lost), so that an error of the model for this machine is in both.
    migration_s: seconds that training stands still for the migration: resharding, compiling, the first slow steps.

    The new plan must save at least `LEAST_GAIN` of a step, and over the remaining steps `MIGRATIONS_WORTH` times the
    cost of the migration. False if either step is unknown (not finite).
    """
    saved_s = predicted_now_s - predicted_new_s
    if not math.isfinite(saved_s):
        return False
    return saved_s >= LEAST_GAIN * predicted_now_s and saved_s * steps_left > MIGRATIONS_WORTH * migration_s


def _alike(found: SearchResult, plan: Plan) -> SearchResult:
    """Keep the plans that gather weights as `plan` does; keep all if none does."""
    plans = found.plans
    gathers = plans.shards_parameters
    alike = np.broadcast_to(gathers == _gathers_narrow(plan), len(found))
    if plan.precision == "fp32" or not alike.any():
        return found
    return replace(found, plans=plans[alike], memory=found.memory.rows(alike), time=found.time.rows(alike))


def _gathers_narrow(plan: Plan) -> bool:
    """Return True if all weights, also those of norms, are gathered and used in the arithmetic's format."""
    return plan.precision != "fp32" and plan.shards_parameters


def _pinned(run: RunConfig) -> Pins:
    """Return what the user wrote of the layout; without "auto", that is all but the microbatch."""
    words, is_auto, _ = said_in(run.plan)
    written = Plan.from_words(words)
    keys = [key for key in LAYOUT_KEYS if key in words or (not is_auto and key != "microbatch")]
    return {key: (getattr(written, key),) for key in keys}


def _best(run: RunConfig, plan: Plan, machine: Cluster, processes: int, pins: Pins) -> Replanned:
    """Return the fastest plan for so many processes, or for somewhat fewer. Raises: UserError."""
    refused: list[UserError] = []
    for counts in _counts(processes, machine):
        try:
            return _best_of(run, plan, machine, processes, counts, pins)
        except UserError as error:
            refused.append(error)
    raise refused[0]


def _counts(processes: int, machine: Cluster) -> Iterator[list[int]]:
    """Yield numbers of processes to choose from: down to a half of them, then, if these have no plan, smaller ones."""
    half = max(1, processes // 2)
    node = machine.devices_per_node
    near = range(processes, max(half, processes - COUNTS_TRIED) - 1, -1)
    nodes = range(processes // node * node, half - 1, -node)[:COUNTS_TRIED]
    yield sorted({*near, *nodes}, reverse=True)
    halves = {processes >> n for n in range(1, processes.bit_length())}
    if fewer := sorted({n for n in {*halves, *range(1, COUNTS_TRIED)} if n < half}, reverse=True):
        yield fewer


def _best_of(
    run: RunConfig, plan: Plan, machine: Cluster, processes: int, counts: Sequence[int], pins: Pins
) -> Replanned:
    """Return the best plan for one of these numbers of processes. Raises: UserError if none is legal, or fits."""
    costs = costs_of(run, resized(machine, processes), processes)
    found = search_to_run(costs, pins, counts)
    if not len(found):
        raise UserError(f"on the {counted(processes, 'process', 'es')} left {why_nothing_fits(costs, found)}")
    found = _alike(found, plan)
    row = plainest(found)
    best = found.plans.plan(row)
    return Replanned(best, processes - best.world_size, float(found.step_s[row]), ())


def _noted(found: Replanned, before: Plan, run: RunConfig) -> Replanned:
    plan, notes = found.plan, []
    words = said_in(run.plan).words
    written = Plan.from_words(words)
    lost = [f"{key}={words[key]}" for key in words if getattr(plan, key) != getattr(written, key)]
    if lost:
        notes.append(f'not kept of plan = "{run.plan}": {", ".join(lost)}.')
    if found.spares:
        notes.append(f"{found.spares} of {plan.world_size + found.spares} processes are spares: no plan gains by them.")
    if _gathers_narrow(plan) != _gathers_narrow(before):
        precision = plan.precision if _gathers_narrow(plan) else "fp32"
        notes.append(f"norms and routers compute in {precision} from here on, as weights are gathered or not (zero=3).")
    return replace(found, notes=tuple(notes))
