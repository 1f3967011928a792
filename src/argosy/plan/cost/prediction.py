"""The prediction for one plan of a run on a cluster. When the run ends, it is compared with what was measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator, TypeAdapter, ValidationError

from argosy.config.lines import read_table
from argosy.config.schema import RunConfig
from argosy.errors import first_error
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import Estimate, seconds
from argosy.plan.cost.exact_state import state_bytes
from argosy.plan.cost.sites import bytes_of_step, rounds_of, sent_bytes, updates_of
from argosy.plan.cost.traffic import traffic
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.sync import LOCAL

LARGEST_FIGURE = 2**63
"""No figure is as large."""
TABLE = "prediction"
"""Table of plan.toml that holds a prediction."""

Figure = Annotated[float, Field(ge=0, lt=LARGEST_FIGURE)]
_ENDS = TypeAdapter(tuple[Figure, Figure, Figure])
Interval = Annotated[Estimate, PlainValidator(lambda ends: Estimate(*_ENDS.validate_python(ends)))]
"""An estimate; in a file [low, mid, high]."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for one step of one plan; with 90 % intervals."""

    cluster: str
    """Name of the cluster that it is made for."""
    step_s: Interval
    seconds: dict[str, Annotated[float, Field(gt=-LARGEST_FIGURE, lt=LARGEST_FIGURE)]]
    """Seconds by category (`plan.cost.step_time.StepTime`); their sum is the middle of `step_s`. What matmuls take
    beyond the ideal is below zero where they are faster than the device is said to be."""
    memory_bytes: Interval
    """Peak of the rank that needs most."""
    memory: dict[str, Figure]
    """Bytes by category (`plan.cost.memory_model.Footprint`), the state exact; their sum is the middle."""
    traffic: dict[str, Annotated[int, Field(ge=0, lt=LARGEST_FIGURE)]]
    """Axis of the mesh -> bytes that the first rank sends in a step."""
    update: dict[str, Figure] = field(default_factory=dict)
    """An update of a worker of asynchronous training: its seconds, and the bytes that it sends and receives."""
    rounds: dict[str, Figure] = field(default_factory=dict)
    """The rounds of a run with sites whose links are known: the figures of `plan.cost.sites.RoundCosts`, and as step_s
    what agreeing takes of a step on average; the prediction's `step_s` is without that."""

    def in_words(self) -> str:
        """Return both totals, e.g. 410 ms a step, 310 MB a rank."""
        return f"{seconds(self.step_s.mid)} a step, {float(self.memory_bytes.mid) / 1e6:,.0f} MB a rank"

    def toml(self) -> str:
        """Return the tables of plan.toml that `load` reads."""
        lines = [f"[{TABLE}]", f"cluster = {json.dumps(self.cluster)}"]
        for name in ("step_s", "memory_bytes"):
            estimate = getattr(self, name)
            lines.append(f"{name} = {[_short(end) for end in (estimate.low, estimate.mid, estimate.high)]}  # 90 %")
        for name in ("seconds", "memory", "traffic"):
            told = {key: value for key, value in getattr(self, name).items() if value}
            lines += _table(name, told)
        for name in ("update", "rounds"):
            if found := getattr(self, name):
                lines += _table(name, found)
        return "\n".join(lines) + "\n"

    @staticmethod
    def load(path: Path) -> Prediction | None:
        """Read the prediction of a plan.toml; None if it has none. Raises: ValueError if `toml` wrote no such one."""
        table = read_table(path).get(TABLE) if path.exists() else None
        if table is None:
            return None
        try:
            return _IN_FILE.validate_python(table)
        except ValidationError as problem:
            raise ValueError(f"{TABLE}: {first_error(problem)}") from None


_IN_FILE = TypeAdapter(Prediction)


def predict(plan: Plan, run: RunConfig, cluster: Cluster, joined: Cluster | None = None) -> Prediction:
    """Predict a step of `run` on `cluster` with this plan, calibrated by the cluster's factors.

    joined: of a run that is a site, the cluster of all sites, whose links rounds and updates go over.
    """
    costs, row = CostModel.of(run, cluster).as_started(), Layouts.of([plan])
    by_category = costs.predict_time(row).by_category(0)
    memory = costs.predict_memory(row).by_category(0)
    memory |= _state(plan, costs, cluster, last=plan.pp > 1 and memory["logits"] > 0)
    inside_s, is_worker = sum(by_category.values()), plan.has_servers and bool(run.sites)
    update = _update(run, joined or cluster, inside_s) if is_worker else {}
    if update and run.sync.local_steps == 1:  # else a typical step has no push
        by_category["sites"] = update["seconds"] - inside_s
    return Prediction(
        cluster=cluster.name or str(cluster.devices),
        step_s=costs.time_of(by_category),
        seconds=by_category,
        memory_bytes=costs.memory_of(memory),
        memory=memory,
        traffic=_by_axis(plan, run),
        update=update,
        rounds=_rounds(plan, costs, joined, inside_s),
    )


def _update(run: RunConfig, cluster: Cluster, step_s: float) -> dict[str, float]:
    """Return what an update costs the worker that the run names, or the slowest."""
    found = updates_of(run, cluster, step_s)
    names = [site.name for site in run.sites]
    mine = found.worker_s[names.index(run.site)] if run.site in names else max(map(float, found.worker_s))
    sent, received = found.sent_bytes, found.received_bytes
    return {"seconds": float(mine), "sent_bytes": sent, "received_bytes": received}


def _rounds(plan: Plan, costs: CostModel, joined: Cluster | None, step_s: float) -> dict[str, float]:
    if joined is None or not joined.links or not costs.run.sites or plan.sync not in LOCAL:
        return {}
    found = rounds_of(costs, joined, step_s)
    return asdict(found) | {"step_s": float(found.step_s)}


def _state(plan: Plan, costs: CostModel, cluster: Cluster, last: bool) -> dict[str, float]:
    """Return the exact bytes of what is always there on the first rank of the first pipeline stage, or of the last.

    Gradients come and go: the memory model says how many of them there are at the peak.
    """
    rank = (plan.pp - 1) * (plan.world_size // plan.pp) if last else 0
    state = state_bytes(plan, costs.run, rank)
    elsewhere = plan.is_("offload", "optimizer", "all") and cluster.device.kind != "cpu"
    return {"weights": float(state.parameters), "optimizer": 0.0 if elsewhere else float(state.optimizer)}


def _by_axis(plan: Plan, run: RunConfig) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for (axis, _), sent in traffic(plan, run).items():
        sums[axis] += sent
    if run.sites and plan.sync in LOCAL:
        sums["sites"] = round(bytes_of_step(run))
    elif run.sites and plan.has_servers:
        sums["sites"] = round(sent_bytes(run) / run.sync.local_steps)
    return dict(sums)


def _table(name: str, figures: Mapping[str, float]) -> list[str]:
    return ["", f"[{TABLE}.{name}]", *(f"{key} = {_short(value)}" for key, value in figures.items())]


def _short(value: Any) -> float | int:
    """Round to six figures: a prediction knows no more."""
    return value if isinstance(value, int) else float(f"{float(value):.6g}")
