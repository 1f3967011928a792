"""Refusing a plan before any process starts, with the plans near it that would do."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.plan import AXES, MESH, Plan
from argosy.plan.quantities import divisors, factorizations, neighbours
from argosy.plan.rules import first_problem


def check_plan(plan: Plan, run: RunConfig, processes: int) -> None:
    """Refuse, before any process starts, a plan that cannot train this run. Raises: UserError."""
    check_size(str(plan), plan.world_size, run.launch, processes)
    if problem := first_problem(plan, run):
        near = ", ".join(f'"{other}"' for other in nearest(plan, run))
        raise UserError(f"{problem} Plans near it that would do: {near}." if near else problem)


def check_size(
    plan: str, size: int, launch: LaunchConfig, processes: int, origin: Callable[[str], str] = lambda key: ""
) -> None:
    """Refuse a plan for `size` processes where there are `processes`, on all nodes.

    origin: returns where a key gets its value from, in words. Raises: UserError.
    """
    if size == processes:
        return
    nodes, each = launch.nodes, launch.processes

    def said(key: str, value: int) -> str:
        where = origin(f"launch.{key}")
        return f"launch.{key} = {value}" + (f" ({where})" if where else "")

    if each and nodes * each == processes:
        product = f"{said('nodes', nodes)} x {said('processes', each)} make {processes}"
        there = product if nodes > 1 else said("processes", each)
    elif nodes > 1:
        there = f"{said('nodes', nodes)} machines of {processes // nodes} processes each have {processes}"
    else:
        there = f"there are {processes}"
    remedy = f"launch.processes = {size // nodes}" if size % nodes == 0 else "launch.nodes = 1"
    on_each = ", which counts on each machine" if nodes > 1 and size % nodes == 0 else ""
    where = origin("plan")
    raise UserError(
        f'plan = "{plan}"{f" ({where})" if where else ""} is for {size} processes, and {there}. '
        f'Try {remedy}{on_each}, or plan = "auto".'
    )


def nearest(plan: Plan, run: RunConfig, many: int = 3) -> list[Plan]:
    """Return the plans for as many processes that can train `run` and whose axes are nearest to those of `plan`.

    Of equally near plans, those that keep the microbatch come first, then those with more data parallelism, because it
    asks least of the model.
    """
    sizes_here = tuple(getattr(plan, axis) for axis in MESH)

    def distance(choice: tuple[Any, ...]) -> tuple[float, ...]:
        *sizes, shares, layers = choice
        doublings = sum(abs(math.log2(there / here)) for there, here in zip(sizes, sizes_here, strict=False))
        _, dp_replicate, dp_shard, *_, microbatch = sizes
        changes = microbatch != plan.microbatch, shares != plan.shares, layers != plan.layers
        return round(doublings, 6), *changes, -dp_shard, -dp_replicate, *sizes

    choices = (
        (*sizes, ep, microbatch, shares, layers)
        for sizes in factorizations(plan.world_size, len(AXES))
        for ep in {1, plan.ep, *neighbours(plan.ep, divisors(max(1, run.model.moe.experts)))}
        for microbatch in {1, plan.microbatch}
        for shares in {"", plan.shares}
        for layers in {"", plan.layers}
    )
    others = (
        plan.model_copy(update=dict(zip((*MESH, "microbatch", "shares", "layers"), choice, strict=True)))
        for choice in sorted(choices, key=distance)
    )
    return list(islice((other for other in others if first_problem(other, run) is None), many))
