"""Which plan is best: all that a run and a cluster allow, as columns, their memory first, then the time of what fits.

What cannot matter is left out: tensor parallelism stays inside a node, ranks that share state are all of a replica's
or those of a node or of the first tier outside, GPipe is tried only where 1F1B cannot run (it is as fast, and holds
more), and a mesh whose leanest plan does not fit (smallest microbatch, most recompute) is not looked at further. What
changes the numbers of training, or what no formula prices yet (`offload`), has one value unless pins open it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.calibrate import constants_of, time_std
from argosy.plan.clusters import Cluster
from argosy.plan.constants import Constants, fitted
from argosy.plan.factors import Factors, calibrated
from argosy.plan.footprint import Footprint, MemoryModel
from argosy.plan.layouts import WORDS, Layouts
from argosy.plan.memory import INT8_BLOCK, MOMENTS
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import AXES, Plan, Precision, words_of
from argosy.plan.rates import Rates, System
from argosy.plan.rules import INTERLEAVED, OF_MICROBATCHES, breaks_any, divisors, first_problem, nearest
from argosy.plan.step_time import StepModel, StepTime
from argosy.plan.workload import Workload

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Table = dict[str, NDArray[np.int64]]
"""Columns of one length, words as their places in `layouts.WORDS`."""
Pins = Mapping[str, tuple[Any, ...]]
"""Key of a plan -> the values that it may have."""
CostT = TypeVar("CostT", StepTime, Footprint)

CHUNK = 4096
"""Plans that are computed at once: their columns stay in the cache."""
MICROBATCH_TOKENS = 32_768
"""Of one rank; larger microbatches make no matmul faster."""
CONTEXT_TOKENS = 4096
"""Shorter pieces of a sequence are not worth a context-parallel rank."""
STAGES_PER_RANK = (2, 3, 4, 6, 8)
RECOMPUTE = (("none", 1), ("selective", 2), ("selective", 1), ("full", 4), ("full", 2), ("full", 1))
"""What is computed again, in every n-th layer, from least to most."""
FEWER_TRIED = 64
"""Numbers of nodes below the cluster's that are tried where there is no plan for all of them."""
FAST_HALF = 1.5
"""bf16 is chosen where its matmuls are this much faster than fp32's, as `plan.auto` does."""
MORE = 0.1
"""Share of a device's memory by which a plan may miss it and still be timed, to say what more memory would bring."""
FITS_Z = 1.2816
"""Standard deviations of memory's logarithm that must be left: a plan that fits does so nine times of ten."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned."""

    run: RunConfig
    """Model, sequence length, global batch, optimizer; its plan is not looked at."""
    devices: int
    rates: Rates
    tier: int
    """Devices of the first tier outside the node."""
    precision: Precision
    """That of the arithmetic, unless pinned."""
    constants: Constants
    time_std: float
    """Standard deviation of the logarithm of measured over predicted."""
    memory_std: float
    factors: Factors = field(default_factory=dict)
    """What finished runs on this cluster took, over the prediction without them."""

    @classmethod
    def of(cls, run: RunConfig, cluster: Cluster) -> Problem:
        """The run on all devices of the cluster, in bf16 (or fp16) where the slowest has fast matmuls of it.

        Constants and standard deviations are those that fit published runs, or what a probe found in their place.
        """
        device, tiers = cluster.device, cluster.tiers
        _, spread = fitted()
        half: Precision = "bf16" if "bf16" in device.formats else "fp16"
        fast = half in device.formats and (
            "fp32" not in device.formats
            or device.matmul_flops_per_s(half) > FAST_HALF * device.matmul_flops_per_s("fp32")
        )
        return cls(
            run=run,
            devices=cluster.devices,
            rates=Rates.of(cluster),
            tier=tiers[1].devices if len(tiers) > 1 else cluster.devices_per_node,
            precision=half if fast else "fp32",
            constants=constants_of(cluster),
            time_std=time_std(cluster, experts=run.model.moe.experts > 0),
            memory_std=spread.memory,
            factors=cluster.factors,
        )

    def on(self, run: RunConfig, devices: int) -> Problem:
        """The same devices, another number of them, for another run."""
        return replace(self, run=run, devices=devices)

    @cached_property
    def workload(self) -> Workload:
        """What a step computes."""
        return Workload.of(self.run)

    @cached_property
    def system(self) -> System:
        """Argosy, with the run's optimizer."""
        optimizer = self.run.optimizer
        of_moment = 4.0 if optimizer.state == "fp32" else 1.0 + 4 / INT8_BLOCK
        return System(moment_bytes=MOMENTS[optimizer.kind] * of_moment)

    @property
    def memory_bytes(self) -> float:
        """What a prediction may come to, so that it fits nine times of ten."""
        return float(self.rates.memory_bytes) / math.exp(FITS_Z * self.memory_std)

    @property
    def tokens_per_step(self) -> int:
        """Of all devices."""
        return self.run.train.global_batch * self.run.data.seq_len


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    problem: Problem
    looked_at: int
    """Plans whose memory was computed."""
    plans: Layouts
    """Those that fit; of none, this is empty."""
    memory: Footprint
    time: StepTime
    leanest: Plan
    """The plan that needs least memory, whether it fits or not."""
    roomier_step_s: float
    """The fastest step, were the memory of each device a tenth larger."""

    @cached_property
    def step_s(self) -> Floats:
        """Of each plan."""
        return np.asarray(self.time.step)

    @cached_property
    def memory_bytes(self) -> Floats:
        """Of each plan, on the rank that needs most."""
        return np.asarray(self.memory.total)

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def devices(self) -> NDArray[np.int64]:
        """Of each plan."""
        return np.broadcast_to(self.plans.world_size, len(self))

    def best(self, score: Floats, many: int) -> NDArray[np.int64]:
        """The rows with the lowest score, of equal ones the leanest, one for each mesh."""
        order = np.lexsort((self.memory_bytes, score))
        axes = np.stack([getattr(self.plans, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")])
        _, first = np.unique(axes[:, order], axis=1, return_index=True)
        return order[np.sort(first)[:many]]

    def pareto(self, many: int = 8) -> NDArray[np.int64]:
        """Rows that no other beats in step time, memory and devices at once; the fastest first."""
        order = np.lexsort((self.memory_bytes, self.devices, self.step_s))
        return _thinned(_front(order, self.devices[order], self.memory_bytes[order]), many)


def _front(order: NDArray[np.int64], devices: NDArray[np.int64], memory: Floats) -> NDArray[np.int64]:
    """Of rows in the order of their time, those that need fewer devices or less memory than all before."""
    keep = np.zeros(len(order), bool)
    for count in np.unique(devices):
        fewer = np.minimum.accumulate(np.where(devices <= count, memory, np.inf))
        before = np.concatenate([[np.inf], fewer[:-1]])
        keep |= (devices == count) & (memory < before * 0.999)
    return order[keep]


def _thinned(rows: NDArray[np.int64], many: int) -> NDArray[np.int64]:
    if len(rows) <= many:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, many).round().astype(int))]


def parse_pins(text: str) -> Pins:
    """`"tp=2|4,recompute=selective"` -> the values that each key may have. Raises: UserError, as `Plan.parse`."""
    pins: dict[str, tuple[Any, ...]] = {}
    for key, values in words_of(text).items():
        if key == "auto":
            raise UserError(f'--fix "{text}": leave auto out; what is not fixed is chosen.')
        plans = [Plan.from_words({key: value.strip()}) for value in values.split("|")]
        pins[key] = tuple(dict.fromkeys(getattr(plan, key) for plan in plans))
    return pins


def search(problem: Problem, pins: Pins, counts: Sequence[int] | None = None) -> Found:
    """All plans for `counts` devices (default: all there are), those that fit with their predicted time.

    Raises: UserError if no plan is legal, with the rule in the way.
    """
    space = Space(problem, pins)
    meshes = _joined([space.meshes(count) for count in counts or [problem.devices]])
    lean = space.plans(_crossed(meshes, space.pipelines(), space.leanest()), any_microbatch=True)
    lean_bytes = np.asarray(predict_memory(problem, lean).total)
    fitting = lean[lean_bytes <= problem.memory_bytes]
    plans = space.plans(_crossed(_columns(fitting), space.microbatches(), space.recomputes()))
    memory = predict_memory(problem, plans)
    memory_bytes = np.asarray(memory.total)
    near = memory_bytes <= problem.memory_bytes * (1 + MORE)
    fits = memory_bytes[near] <= problem.memory_bytes
    time = predict_time(problem, plans[near])
    return Found(
        problem=problem,
        looked_at=len(lean) + len(near),
        plans=plans[near][fits],
        memory=rows(rows(memory, near), fits),
        time=rows(time, fits),
        leanest=space.leanest_of(lean, lean_bytes),
        roomier_step_s=float(np.min(time.step, initial=np.inf)),
    )


class Space:
    """The plans that a search looks at, as tables of columns to be crossed."""

    def __init__(self, problem: Problem, pins: Pins):
        self.problem, self.pins, self.run = problem, pins, problem.run

    def _of(self, key: str, *usual: Any) -> tuple[Any, ...]:
        return self.pins.get(key, usual)

    def meshes(self, devices: int) -> Table:
        """Ways to lay the axes over so many devices, with the ZeRO stage and the kind of context parallelism."""
        keys = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "context")
        rows = list(self._meshes(devices))
        context = WORDS["context"]
        numbers = np.array([(*row[:-1], context.index(row[-1])) for row in rows], np.int64).reshape(-1, len(keys))
        return dict(zip(keys, numbers.T, strict=True))

    def _meshes(self, devices: int) -> Iterator[tuple[Any, ...]]:
        run, model = self.run, self.run.model
        node = int(self.problem.rates.node)
        longest = max(1, run.data.seq_len // CONTEXT_TOKENS)
        for tp in self._of("tp", *(n for n in divisors(devices) if n <= node and model.heads % n == 0)):
            for cp in self._of("cp", *(n for n in divisors(devices) if n <= longest)):
                for pp in self._of("pp", *(n for n in divisors(devices) if n <= model.layers)):
                    dp, left_over = divmod(devices, tp * cp * pp)
                    if left_over or not dp or run.train.global_batch % dp:
                        continue
                    for context in self._of("context", *(("ring", "ulysses") if cp > 1 else ("ring",))):
                        for shared in self._shared(dp, cp, tp):
                            yield pp, dp // shared[0], shared[0], cp, tp, *shared[1:], context

    def _shared(self, dp: int, cp: int, tp: int) -> Iterator[tuple[int, int, int]]:
        """(dp_shard, ep, zero) of `dp` data-parallel ranks."""
        experts = self.run.model.moe.experts
        near = {self.problem.rates.node // (tp * cp), self.problem.tier // (tp * cp), dp}
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
        """Schedules, with what they ask for."""
        rows = []
        for schedule in self._of("schedule", *SCHEDULES):
            turns = STAGES_PER_RANK if schedule in INTERLEAVED else (Plan().stages_per_rank,)
            compiled = not SCHEDULES[schedule].splits_backward
            rows += [
                (WORDS["schedule"].index(schedule), turn, int(compiles))
                for turn in self._of("stages_per_rank", *turns)
                for compiles in self._of("compile", compiled)
            ]
        return _table(("schedule", "stages_per_rank", "compile"), rows)

    def microbatches(self) -> Table:
        """Sizes of a microbatch, as many sequences as divide the batch."""
        return _table(("microbatch",), [(n,) for n in self._microbatches()])

    def _microbatches(self) -> tuple[int, ...]:
        run = self.run
        most = MICROBATCH_TOKENS * max(1, run.data.seq_len // CONTEXT_TOKENS) // run.data.seq_len
        sizes = [n for n in divisors(run.train.global_batch) if n <= max(1, most)]
        return self._of("microbatch", *sizes)

    def recomputes(self) -> Table:
        """What is computed again, from least to most."""
        return _table(("recompute", "recompute_every"), self._recomputes())

    def _recomputes(self) -> list[tuple[int, int]]:
        words = WORDS["recompute"]
        pinned, every = self.pins.get("recompute"), self.pins.get("recompute_every")
        usual = {word: [n for w, n in RECOMPUTE if w == word] for word in words}
        return [
            (words.index(word), n) for word in words if pinned is None or word in pinned for n in every or usual[word]
        ]

    def leanest(self) -> Table:
        """The tail of a plan that needs least memory: one row."""
        return _crossed(_table(("microbatch",), [(min(self._microbatches()),)]), self.leanest_recompute())

    def leanest_recompute(self) -> Table:
        """The most that may be recomputed: one row."""
        most = max(self._recomputes(), key=lambda row: (row[0], -row[1]))
        return _table(("recompute", "recompute_every"), [most])

    def plans(self, table: Table, any_microbatch: bool = False) -> Layouts:
        """The rows of a table that are plans, each once, that can train the run.

        any_microbatch: also those that could with another one.
        """
        rest = {
            "offload": self._of("offload", "none"),
            "precision": self._of("precision", self.problem.precision),
            "weights": self._of("weights", "fp32"),
            "reduce": self._of("reduce", "fp32"),
        }
        for key, values in rest.items():
            if key not in table:
                table = _crossed(table, _table((key,), [(WORDS[key].index(value),) for value in values]))
        plans = Layouts(**table)
        broken = breaks_any(plans, self.run, besides=OF_MICROBATCHES if any_microbatch else ())
        return plans[~np.broadcast_to(broken, len(plans)) & self._worth_it(plans)]

    def leanest_of(self, lean: Layouts, memory_bytes: Floats) -> Plan:
        """The plan that needs least memory of those with the leanest tail. Raises: UserError if none is legal."""
        legal = np.flatnonzero(~np.broadcast_to(breaks_any(lean, self.run), len(lean)))
        if len(legal):
            return lean.plan(int(legal[np.argmin(memory_bytes[legal])]))
        others = self.plans(_crossed(_columns(lean), self.microbatches()))
        if not len(others):
            raise UserError(self.why_none())
        return others.plan(int(np.argmin(predict_memory(self.problem, others).total)))

    def _worth_it(self, plans: Layouts) -> Mask:
        """Not the same as another, nor slower than one that is as lean; and what is pinned plays a part."""
        batch, seq_len = self.run.train.global_batch, self.run.data.seq_len
        schedule = WORDS["schedule"].index(self._of("schedule", "1f1b")[0])
        turns = min(self._of("stages_per_rank", Plan().stages_per_rank))
        compiles = int(max(self._of("compile", True)))
        alone = (plans.schedule == schedule) & (plans.stages_per_rank == turns) & (plans.compile == compiles)
        worth = (plans.pp > 1) | alone
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
            worth &= (plans.microbatch * seq_len <= MICROBATCH_TOKENS * plans.cp) | (plans.microbatch == 1)
        return worth

    def why_none(self) -> str:
        """Why there is no plan at all: the first rule that the plainest plan breaks, and what would do."""
        devices = self.problem.devices
        fixed = ",".join(f"{key}={'|'.join(map(_word, values))}" for key, values in self.pins.items())
        where = f'--fix "{fixed}": ' if fixed else f"no plan for {devices} devices: "
        axes = {axis: min(self.pins[axis]) for axis in AXES if axis in self.pins}
        product = math.prod(axes.values())
        if devices % product:
            made = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
            near = [n for n in divisors(devices) if n <= product][-1]
            step = math.lcm(product, int(self.problem.rates.node))
            return (
                f"{where}{made} takes {product} devices at a time, which does not divide {devices}. "
                f"Try axes whose product is {near}, or a cluster of {-(-devices // step) * step} devices."
            )
        plainest = self._plainest(devices // product)
        if plainest is None:
            return f"{where}this is a plan for {product} devices, and the cluster has {devices}. Leave an axis open."
        batch = self.run.train.global_batch
        problem = first_problem(plainest, self.run) or (
            f"train.global_batch = {batch} cannot be dealt out over {devices} devices by any plan."
        )
        plans = [f'"{other}"' for other in nearest(plainest, self.run) if self._keeps(other)]
        fewer = self._fewer()
        remedies = [
            *([f"Plans that would do: {', '.join(plans)}."] if plans else []),
            *([f"With {fewer} devices there are plans."] if fewer else []),
        ]
        return " ".join([where + problem, *remedies])

    def _plainest(self, left: int) -> Plan | None:
        """A plan with what is pinned, and the devices that are left on the plainest axis; None if all are pinned."""
        first = {key: min(values) if key in AXES else values[0] for key, values in self.pins.items()}
        for key, axis in (("schedule", "pp"), ("context", "cp")):  # it only plays a part with its axis
            if key in first and axis not in first and left > 1:
                first[axis] = divisors(left)[1]
                left //= first[axis]
        free = next((axis for axis in ("dp_shard", "dp_replicate", "cp", "pp", "tp") if axis not in first), None)
        if left > 1 and free is None:
            return None
        return Plan(**{"precision": self.problem.precision, **first, **({free: left} if free else {})})

    def _fewer(self) -> int | None:
        """The largest smaller number of whole nodes for which there are plans, if one is near."""
        node = int(self.problem.rates.node)
        for count in range(self.problem.devices - node, 0, -node)[:FEWER_TRIED]:
            table = _crossed(self.meshes(count), self.pipelines(), self.microbatches(), self.leanest_recompute())
            if len(self.plans(table)):
                return count
        return None

    def _keeps(self, plan: Plan) -> bool:
        return all(getattr(plan, key) in values for key, values in self.pins.items())


def predict_memory(problem: Problem, plans: Layouts) -> Footprint:
    """Bytes of each plan."""
    raw = _in_chunks(
        plans, lambda some: MemoryModel(some, problem.workload, problem.system, problem.constants).predict(), Footprint
    )
    return calibrated(raw, problem.factors)


def predict_time(problem: Problem, plans: Layouts, rates: Rates | None = None) -> StepTime:
    """Seconds of each plan's step, with other `rates` than the problem's if given."""
    rates = rates or problem.rates
    raw = _in_chunks(
        plans,
        lambda some: StepModel(some, problem.workload, rates, problem.system, problem.constants).predict(),
        StepTime,
    )
    return calibrated(raw, problem.factors)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _in_chunks(plans: Layouts, predict: Callable[[Layouts], CostT], kind: type[CostT]) -> CostT:
    whole = {f.name: np.empty(len(plans)) for f in fields(kind)}
    for start in range(0, len(plans), CHUNK):
        some = plans[start : start + CHUNK]
        alone = some.dp_shard * some.cp == 1
        cost = predict(replace(some, zero=np.where(alone, 0, some.zero)))  # a rank alone shares nothing
        for name, column in whole.items():
            column[start : start + CHUNK] = getattr(cost, name)
    return kind(**whole)


def rows(cost: CostT, chosen: NDArray[Any]) -> CostT:
    """The cost of the plans that a mask or numbers choose."""
    return replace(cost, **{f.name: getattr(cost, f.name)[chosen] for f in fields(cost)})


def _table(keys: Sequence[str], rows: Sequence[tuple[int, ...]]) -> Table:
    columns = np.array(rows, np.int64).reshape(-1, len(keys)).T
    return dict(zip(keys, columns, strict=True))


def _columns(plans: Layouts) -> Table:
    return {f.name: getattr(plans, f.name) for f in fields(plans)}


def _joined(tables: Sequence[Table]) -> Table:
    return {key: np.concatenate([table[key] for table in tables]) for key in tables[0]}


def _crossed(*tables: Table) -> Table:
    """Every row of the first with every row of the next; a later table's columns take the place of an earlier's."""
    whole = tables[0]
    for table in tables[1:]:
        before, after = len(next(iter(whole.values()))), len(next(iter(table.values())))
        kept = {key: np.repeat(column, after) for key, column in whole.items() if key not in table}
        whole = kept | {key: np.tile(column, before) for key, column in table.items()}
    return whole
