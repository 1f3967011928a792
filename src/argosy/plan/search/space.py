"""The plans that a search looks at, as tables of columns that are crossed with one another.

Plans that cannot be best are left out: tensor parallelism stays inside a node, the ranks that share state are all ranks
of a replica or those of a node or of the first tier outside, and GPipe is tried only where 1F1B cannot run (GPipe is as
fast, and holds more). Keys that change the numbers of training, or that serve only if nothing fits (`offload`), have
one value. Pins open and close all of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError, counted
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.layer_spec import tensor_parts
from argosy.plan.layouts import PLAN_WORDS, Layouts, column_of
from argosy.plan.pipeline import INTERLEAVED, SCHEDULES
from argosy.plan.plan import MESH, MESH_AXES, Plan, word_of, words_of
from argosy.plan.quantities import divisors, factorizations, neighbours
from argosy.plan.rules import OF_MICROBATCHES, breaks_any, first_problem
from argosy.plan.sync import USUAL_OF_SITES

Mask = NDArray[np.bool_]
Table = dict[str, NDArray[Any]]
"""Columns of one length, as those of `Layouts`."""
Pins = Mapping[str, tuple[Any, ...]]
"""Key of a plan -> the values that it may have."""

MOST_MICROBATCH_TOKENS = 32_768
"""Most tokens of a microbatch on one rank; larger ones make no matmul faster."""
CONTEXT_TOKENS = 4096
"""Shorter pieces of a sequence are not worth a context-parallel rank."""
STAGES_PER_RANK = (2, 3, 4, 6, 8)
RECOMPUTE = (("none", 1), ("selective", 2), ("selective", 1), ("full", 4), ("full", 2), ("full", 1))
"""Kinds of recompute, in every n-th layer, from least to most."""
NEAREST = 3
"""Plans that are named in place of one that cannot be."""
FIRST_LOOKED_AT = 64
"""Plans, the nearest first, that are looked at together for those; then eight times as many, and so on."""
FEWER_TRIED = 64
"""Numbers of nodes below the cluster's that are tried if there is no plan for all of them."""


def parse_pins(text: str) -> Pins:
    """Read `"tp=2|4,recompute=selective"` as the values that each key may have. Raises: UserError, as `Plan.parse`."""
    pins: dict[str, tuple[Any, ...]] = {}
    for key, values in words_of(text, "--fix").items():
        if key == "auto":
            raise UserError(f'--fix "{text}": leave auto out; keys that are not fixed are chosen.')
        plans = [Plan.from_words({key: value.strip()}) for value in values.split("|")]
        pins[key] = tuple(dict.fromkeys(getattr(plan, key) for plan in plans))
    return pins


def pins_of(written: Plan, said: Collection[str], is_auto: bool) -> Pins:
    """Return the keys that may not be chosen, with their values: those that are said; without "auto", most others."""
    keys = said if is_auto else Plan.model_fields.keys() - ({"microbatch", "compile"} - set(said))
    return {key: (getattr(written, key),) for key in Plan.model_fields if key in keys}


class Space:
    """The plans that a search looks at, as tables of columns to be crossed."""

    def __init__(self, costs: CostModel, pins: Pins):
        self.costs, self.pins, self.run = costs, pins, costs.run

    def _of(self, key: str, *usual: Any) -> tuple[Any, ...]:
        return self.pins.get(key, usual)

    def meshes(self, devices: int) -> Table:
        """Return the ways to lay the axes over so many devices, with ZeRO stage and kind of context parallelism."""
        keys = (*MESH, "zero", "context")
        rows = list(self._meshes(devices))
        context = PLAN_WORDS["context"]
        numbers = np.array([(*row[:-1], context.index(row[-1])) for row in rows], np.int64).reshape(-1, len(keys))
        return dict(zip(keys, numbers.T, strict=True))

    def _meshes(self, devices: int) -> Iterator[tuple[Any, ...]]:
        run, model = self.run, self.run.model
        node, parts = int(self.costs.rates.node), tensor_parts(model)
        longest = max(1, run.data.seq_len // CONTEXT_TOKENS)
        for tp in self._of("tp", *(n for n in divisors(devices) if n <= node and parts % n == 0)):
            for cp in self._of("cp", *(n for n in divisors(devices) if n <= longest)):
                for pp in self._of("pp", *(n for n in divisors(devices) if n <= model.layers)):
                    dp, left_over = divmod(devices, tp * cp * pp)
                    if left_over or not dp or run.train.global_batch % dp:
                        continue
                    for context in self._of("context", *(("ring", "ulysses") if cp > 1 else ("ring",))):
                        for shared in self._shared(dp, cp, tp):
                            yield pp, dp // shared[0], shared[0], cp, tp, *shared[1:], context

    def _shared(self, dp: int, cp: int, tp: int) -> Iterator[tuple[int, int, int]]:
        """Yield (dp_shard, ep, zero) for `dp` data-parallel ranks."""
        experts = self.run.model.moe.experts
        near = {self.costs.rates.node // (tp * cp), self.costs.tier // (tp * cp), dp}
        whole = divisors(dp)
        usual = sorted({1, *(int(n) for n in near if n in whole)})
        for shard in self._of("dp_shard", *usual):
            replicate, left_over = divmod(dp, shard)
            if left_over or replicate not in self._of("dp_replicate", replicate):
                continue
            for ep in self._of("ep", *(n for n in divisors(max(1, experts)) if shard * cp % n == 0)):
                stages = (Plan().zero,) if shard * cp == 1 else (1, 2, 3) if shard > 1 else (0, 1, 2, 3)
                for zero in self._of("zero", *stages):
                    yield shard, ep, zero

    def pipelines(self) -> Table:
        """Return the schedules, with the stages and the compilation that they ask for."""
        rows = []
        for schedule in self._of("schedule", *SCHEDULES):
            turns = STAGES_PER_RANK if schedule in INTERLEAVED else (Plan().stages_per_rank,)
            compiled = not SCHEDULES[schedule].splits_backward
            rows += [
                (PLAN_WORDS["schedule"].index(schedule), turn, int(compiles))
                for turn in self._of("stages_per_rank", *turns)
                for compiles in self._of("compile", compiled)
            ]
        return table_of(("schedule", "stages_per_rank", "compile"), rows)

    def microbatches(self) -> Table:
        """Return the sizes of a microbatch: numbers of sequences that divide the batch."""
        return table_of(("microbatch",), [(n,) for n in self._microbatches()])

    def _microbatches(self) -> tuple[int, ...]:
        run = self.run
        most = MOST_MICROBATCH_TOKENS * max(1, run.data.seq_len // CONTEXT_TOKENS) // run.data.seq_len
        sizes = [n for n in divisors(run.train.global_batch) if n <= max(1, most)]
        return self._of("microbatch", *sizes)

    def recomputes(self) -> Table:
        """Return what may be recomputed, from least to most."""
        return table_of(("recompute", "recompute_every"), self._recomputes())

    def _recomputes(self) -> list[tuple[int, int]]:
        words = PLAN_WORDS["recompute"]
        pinned, every = self.pins.get("recompute"), self.pins.get("recompute_every")
        usual = {word: [n for w, n in RECOMPUTE if w == word] for word in words}
        return [
            (words.index(word), n) for word in words if pinned is None or word in pinned for n in every or usual[word]
        ]

    def leanest(self) -> Table:
        """Return the rest of the plan that needs least memory: one row."""
        return crossed(table_of(("microbatch",), [(min(self._microbatches()),)]), self.leanest_recompute())

    def leanest_recompute(self) -> Table:
        """Return the most that may be recomputed: one row."""
        most = max(self._recomputes(), key=lambda row: (row[0], -row[1]))
        return table_of(("recompute", "recompute_every"), [most])

    def plans(self, table: Table, any_microbatch: bool = False) -> Layouts:
        """Return the rows of a table that are plans and can train the run, each once.

        any_microbatch: also return those that could with another microbatch.
        """
        usual = Plan(precision=self.costs.precision, sync=USUAL_OF_SITES if self.run.sites else "exact")
        for key, value in usual:
            if key not in table:
                table = crossed(table, {key: column_of(key, self._of(key, value))})
        plans = Layouts(**table)
        broken = breaks_any(plans, self.run, besides=OF_MICROBATCHES if any_microbatch else ())
        return plans[~np.broadcast_to(broken, len(plans)) & self._worth_it(plans)]

    def _worth_it(self, plans: Layouts) -> Mask:
        """Mask the plans that equal no other, are not slower than one as lean, and make use of every pin."""
        batch, seq_len = self.run.train.global_batch, self.run.data.seq_len
        schedule = PLAN_WORDS["schedule"].index(self._of("schedule", "1f1b")[0])
        turns = min(self._of("stages_per_rank", Plan().stages_per_rank))
        compiles = int(max(self._of("compile", True)))
        alone = (plans.schedule == schedule) & (plans.stages_per_rank == turns) & (plans.compile == compiles)
        worth = np.broadcast_to((plans.pp > 1) | alone, len(plans)).copy()
        if "schedule" not in self.pins:
            gpipe = plans.is_("schedule", "gpipe") & (plans.pp > 1)
            worth &= ~(gpipe & (plans.microbatches(batch) >= plans.pp))
        elif "pp" not in self.pins:
            worth &= plans.pp > 1
        if "context" in self.pins and "cp" not in self.pins:
            worth &= plans.cp > 1
        if "recompute_every" in self.pins and "recompute" not in self.pins:
            worth &= ~plans.is_("recompute", "none")
        if "microbatch" not in self.pins:
            worth &= (plans.microbatch * seq_len <= MOST_MICROBATCH_TOKENS * plans.cp) | (plans.microbatch == 1)
        return worth

    def why_none(self) -> str:
        """Explain why there is no plan at all: the first rule that the plainest plan breaks, and a remedy."""
        devices = self.costs.devices
        fixed = ",".join(f"{key}={'|'.join(map(word_of, values))}" for key, values in self.pins.items())
        where = f'--fix "{fixed}": ' if fixed else f"no plan for {counted(devices, 'device')}: "
        axes = {axis: min(self.pins[axis]) for axis in MESH_AXES if axis in self.pins}
        product = math.prod(axes.values())
        if devices % product:
            made = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
            near = [n for n in divisors(devices) if n <= product][-1]
            step = math.lcm(product, int(self.costs.rates.node))
            return (
                f"{where}{made} takes {product} devices at a time, which does not divide {devices}. "
                f"Try axes whose product is {near}, or a cluster of {-(-devices // step) * step} devices."
            )
        plainest = self._plainest(devices // product)
        if plainest is None:
            said = counted(product, "device")
            return f"{where}this is a plan for {said}, and the cluster has {devices}. Leave an axis open."
        batch = self.run.train.global_batch
        problem = first_problem(plainest, self.run) or (
            f"train.global_batch = {batch} cannot be dealt out over {counted(devices, 'device')} by any plan."
        )
        plans = [f'"{other}"' for other in nearest(plainest, self.run) if self._keeps(other)]
        fewer = self._fewer()
        remedies = [
            *([f"Plans that would do: {', '.join(plans)}."] if plans else []),
            *([f"With {counted(fewer, 'device')} there are plans."] if fewer else []),
        ]
        return " ".join([where + problem, *remedies])

    def _plainest(self, left: int) -> Plan | None:
        """Return a plan with the pins and the other devices on the plainest axis; None if all axes are pinned."""
        first = {key: min(values) if key in MESH_AXES else values[0] for key, values in self.pins.items()}
        for key, axis in (("schedule", "pp"), ("context", "cp")):  # the key means something only with its axis
            if key in first and axis not in first and left > 1:
                first[axis] = divisors(left)[1]
                left //= first[axis]
        free = next((axis for axis in ("dp_shard", "dp_replicate", "cp", "pp", "tp") if axis not in first), None)
        if left > 1 and free is None:
            return None
        return Plan(**{"precision": self.costs.precision, **first, **({free: left} if free else {})})

    def _fewer(self) -> int | None:
        """Return the largest smaller number of whole nodes for which there are plans, if one is near."""
        node = int(self.costs.rates.node)
        for count in range(self.costs.devices - node, 0, -node)[:FEWER_TRIED]:
            table = crossed(self.meshes(count), self.pipelines(), self.microbatches(), self.leanest_recompute())
            if len(self.plans(table)):
                return count
        return None

    def _keeps(self, plan: Plan) -> bool:
        return all(getattr(plan, key) in values for key, values in self.pins.items())


def table_of(keys: Sequence[str], rows: Sequence[tuple[int, ...]]) -> Table:
    columns = np.array(rows, np.int64).reshape(-1, len(keys)).T
    return dict(zip(keys, columns, strict=True))


def columns_of(plans: Layouts) -> Table:
    return {f.name: getattr(plans, f.name) for f in fields(plans)}


def joined(tables: Sequence[Table]) -> Table:
    """Return the rows of all tables, one table after the other."""
    return {key: np.concatenate([table[key] for table in tables]) for key in tables[0]}


def crossed(*tables: Table) -> Table:
    """Cross every row of the first table with every row of the next; later tables' columns replace earlier ones.

    A column of one value stays as short as that: most keys have one in most searches.
    """
    whole = tables[0]
    for table in tables[1:]:
        before, after = (max(map(len, some.values())) for some in (whole, table))
        has_rows = before > 0 and after > 0
        kept = {key: column for key, column in whole.items() if key not in table}
        whole = {
            **{key: c if has_rows and len(c) == 1 else np.repeat(c, after) for key, c in kept.items()},
            **{key: c if has_rows and len(c) == 1 else np.tile(c, before) for key, c in table.items()},
        }
    return whole


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
        on_one = counted(processes // nodes, "process", "es")
        there = f"{said('nodes', nodes)} machines of {on_one} each have {processes}"
    else:
        there = "there is 1" if processes == 1 else f"there are {processes}"
    remedy = f"launch.processes = {size // nodes}" if size % nodes == 0 else "launch.nodes = 1"
    on_each = ", which counts on each machine" if nodes > 1 and size % nodes == 0 else ""
    where, pinned = origin("plan"), f"auto,{plan}" if size == 1 and plan else "auto"
    raise UserError(
        f'plan = "{plan}"{f" ({where})" if where else ""} is for {counted(size, "process", "es")}, and {there}. '
        f'Try {remedy}{on_each}, or plan = "{pinned}".'
    )


def nearest(plan: Plan, run: RunConfig) -> list[Plan]:
    """Return `NEAREST` plans for as many processes that can train `run`, with the axes nearest to those of `plan`.

    Of equally near plans, those that keep the microbatch come first, then those with more data parallelism, because it
    asks least of the model.
    """
    here, moe = Layouts.of([plan]), run.model.moe
    others: dict[str, set[Any]] = {
        "ep": {1, plan.ep, *neighbours(plan.ep, divisors(max(1, moe.experts)))},
        "microbatch": {1, plan.microbatch},
        "shares": {"", plan.shares},
        "layers": {"", plan.layers},
    }
    axes = table_of(MESH_AXES, factorizations(plan.world_size, len(MESH_AXES)))
    table = crossed(axes, *({key: column_of(key, sorted(values))} for key, values in others.items()))
    plans = Layouts(**columns_of(here) | table)
    doublings = sum(np.abs(np.log2(getattr(plans, axis) / getattr(here, axis))) for axis in MESH)
    changes = [getattr(plans, key) != getattr(plan, key) for key in ("microbatch", "shares", "layers")]
    sizes = [getattr(plans, key) for key in (*MESH, "microbatch")]
    distance = [np.round(doublings, 6), *changes, -plans.dp_shard, -plans.dp_replicate, *sizes]
    order = np.lexsort([np.broadcast_to(column, len(plans)) for column in reversed(distance)])
    found: list[Plan] = []
    first, many = 0, FIRST_LOOKED_AT
    while first < len(order) and len(found) < NEAREST:
        some = plans[order[first : first + many]]
        legal = np.flatnonzero(~np.broadcast_to(breaks_any(some, run), len(some)))
        found += [some.plan(int(row)) for row in legal[: NEAREST - len(found)]]
        first, many = first + many, 8 * many
    return found
