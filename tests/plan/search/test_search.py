"""The search finds the best plan there is, only plans that can run and fit, and says why there is none."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import WORDS, Layouts
from argosy.plan.quantities import divisors
from argosy.plan.rules import breaks_any, first_problem
from argosy.plan.search.search import SearchResult, search
from argosy.plan.search.space import parse_pins


def run_of(model: str, global_batch: int, seq_len: int, **overrides: object) -> RunConfig:
    sizes = {"train.global_batch": global_batch, "data.seq_len": seq_len, "model.vocab_size": 4096}
    return load(None, {"model.preset": model, **sizes, **overrides})


def costs_of(cluster: str, run: RunConfig, memory_gib: float | None = None) -> CostModel:
    costs = CostModel.of(run, Cluster.parse(cluster))
    if memory_gib is not None:
        costs = replace(costs, rates=replace(costs.rates, memory_bytes=memory_gib * 2**30))
    return costs


SMALL = run_of("llama-20m", 32, 8192)
EXPERTS = run_of("mixtral-10m", 32, 8192)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(costs_of("16xh100", run_of("llama3-8b", 64, 8192)), {})


def every_plan(costs: CostModel) -> Layouts:
    """All plans of a costs without experts, none left out, in its precision."""
    n, layers = costs.devices, costs.run.model.layers
    axes = [axes for axes in product(divisors(n), repeat=5) if np.prod(axes) == n]
    columns = {
        "axes": np.arange(len(axes)),
        "zero": np.arange(4),
        "schedule": np.arange(len(WORDS["schedule"])),
        "stages_per_rank": np.arange(2, layers + 1),
        "context": np.arange(2),
        "recompute": np.arange(3),
        "recompute_every": np.array([1, 2, 4]),
        "microbatch": np.array(divisors(costs.run.train.global_batch)),
        "compile": np.arange(2),
    }
    grid = dict(zip(columns, (g.ravel() for g in np.meshgrid(*columns.values())), strict=True))
    chosen = np.array(axes)[grid.pop("axes")].T
    fixed = {
        "precision": WORDS["precision"].index(costs.precision),
        "ep": 1,
        "offload": 0,
        "weights": 0,
        "reduce": 0,
        "sync": 0,
        "sum_inside": 1,
        "sum_between": 1,
        "bucket_mb": 4,
    }
    plans = Layouts(
        **dict(zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), chosen, strict=True)),
        **{key: np.array([value]) for key, value in fixed.items()},
        **grid,
    )
    return plans[~np.broadcast_to(breaks_any(plans, costs.run), len(plans))]


@pytest.mark.parametrize(
    ("cluster", "global_batch", "memory_gib"),
    [
        *(pytest.param("2x2xh100", 32, gib, marks=pytest.mark.slow) for gib in (80, 4.2, 2.8)),
        ("2x2xh100", 32, 2.4),
        ("3xh100", 18, 2.4),
    ],
)
def test_no_plan_that_fits_is_faster_than_what_is_found(cluster: str, global_batch: int, memory_gib: float) -> None:
    """Against all plans, those that the search passes over included: large microbatches, tp across nodes, GPipe, ..."""
    costs = costs_of(cluster, run_of("llama-20m", global_batch, 8192), memory_gib)
    plans = every_plan(costs)
    fitting = plans[np.asarray(costs.predict_memory(plans).total) <= costs.memory_bytes]
    found = search(costs, {})
    assert (len(found) == 0) == (len(fitting) == 0)
    assert first_problem(found.leanest, costs.run) is None
    if len(found):
        assert found.step_s.min() <= np.min(costs.predict_time(fitting).total) * 1.005
        leanest = np.min(costs.predict_memory(plans).total)
        # Single large microbatches can be leaner by what gradients of several would take: the search may miss that.
        assert np.min(costs.predict_memory(Layouts.of([found.leanest])).total) <= leanest * 1.03


@pytest.mark.parametrize(
    ("cluster", "run"), [("16xh100", SMALL), ("2x4xh100", EXPERTS), ("8xcpu", SMALL), ("12xh100-pcie", SMALL)]
)
def test_what_is_found_can_run_on_all_devices_and_is_there_once(cluster: str, run: RunConfig) -> None:
    costs = costs_of("3x4xh100-pcie" if cluster.startswith("12") else cluster, run)
    found = search(costs, {})
    plans = [found.plans.plan(row) for row in range(len(found))]
    assert len(found) > 50
    assert all(plan.world_size == costs.devices for plan in plans)
    assert len(set(plans)) == len(plans)
    assert {first_problem(plan, run) for plan in plans[:: len(plans) // 50]} == {None}
    assert (found.memory_bytes <= costs.memory_bytes).all()


@settings(deadline=None, max_examples=20)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tp": st.sampled_from(["1", "2", "2|4"]),
            "pp": st.sampled_from(["1", "2", "1|2"]),
            "zero": st.sampled_from(["1", "2|3"]),
            "schedule": st.sampled_from(["zbv", "1f1b|interleaved_1f1b", "gpipe"]),
            "recompute": st.sampled_from(["none|full", "selective"]),
            "recompute_every": st.sampled_from(["1", "3"]),
            "microbatch": st.sampled_from(["1", "4"]),
            "precision": st.sampled_from(["bf16|fp32", "fp16"]),
            "offload": st.sampled_from(["optimizer", "none|all"]),
            "weights": st.sampled_from(["fp32", "fp32|bf16"]),
        },
    )
)
def test_pins_hold(pins: dict[str, str]) -> None:
    text = ",".join(f"{key}={values}" for key, values in pins.items())
    try:
        found = search(costs_of("8xh100", SMALL), parse_pins(text))
    except UserError as refused:
        assert str(refused).startswith('--fix "')
        return
    for key, values in parse_pins(text).items():
        column = np.broadcast_to(getattr(found.plans, key), len(found))
        seen = {WORDS[key][number] if key in WORDS else number for number in np.unique(column)}
        assert seen <= set(values)


def test_the_ranking_has_each_mesh_once_and_the_best_first(found: SearchResult) -> None:
    rows = found.best(found.step_s, 10)
    meshes = [
        tuple(
            getattr(found.plans.plan(int(row)), axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        )
        for row in rows
    ]
    assert len(set(meshes)) == len(rows) == 10
    assert found.step_s[rows].tolist() == sorted(found.step_s[rows])
    assert found.step_s[rows[0]] == found.step_s.min()


def test_no_plan_is_better_in_all_than_one_of_the_pareto_front(found: SearchResult) -> None:
    rows = found.pareto(many=1000)
    assert rows[0] == np.lexsort((found.memory_bytes, found.step_s))[0]
    for row in rows:
        better = (found.step_s < found.step_s[row]) & (found.memory_bytes < found.memory_bytes[row] * 0.999)
        assert not better.any()
    assert len(found.pareto(many=3)) == 3


def test_fewer_devices_may_be_asked_for() -> None:
    found = search(costs_of("16xh100", SMALL), {}, [16, 4])
    assert set(found.devices.tolist()) == {16, 4}


def test_the_leanest_does_not_fit_where_nothing_does() -> None:
    costs = costs_of("8xh100", run_of("llama3-70b", 64, 8192))
    found = search(costs, {})
    assert len(found) == 0
    assert np.min(costs.predict_memory(Layouts.of([found.leanest])).total) > costs.memory_bytes


def test_precision_follows_the_device() -> None:
    assert costs_of("8xh100", SMALL).precision == "bf16"
    assert costs_of("8xv100", SMALL).precision == "fp16"
    assert costs_of("8xcpu", SMALL).precision == "fp32"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            "tp=3",
            "tp=3 takes 3 devices at a time, which does not divide 8. Try axes whose product is 2, or a cluster of 24",
        ),
        ("tp=8,pp=4", "pp=4 x tp=8 takes 32 devices at a time, which does not divide 8"),
        (
            "tp=2,pp=1,cp=1,dp_shard=2,dp_replicate=1",
            "is a plan for 4 devices, and the cluster has 8. Leave an axis open",
        ),
        ("ep=2", "plan.ep = 2, and the model has no experts"),
        ("precision=fp8,tp=2", "plan.precision = fp8 with plan.tp = 2"),
        ("microbatch=5", "is not a multiple of"),
        ("pp=8", "makes 8 stages, and model.layers = 6"),
    ],
)
def test_pins_that_cannot_be_say_which_rule_is_in_the_way(pins: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        search(costs_of("8xh100", SMALL), parse_pins(pins))
    assert str(refused.value).startswith(f'--fix "{pins}": ')
    assert message in str(refused.value)


def test_where_no_plan_uses_all_devices_it_says_with_how_many_there_are_some() -> None:
    costs = costs_of("37x8xh100", SMALL)
    with pytest.raises(UserError, match=r"no plan for 296 devices: .* With (\d+) devices there are plans") as refused:
        search(costs, {})
    count = int(str(refused.value).rsplit("With ", 1)[1].split()[0])
    assert len(search(costs.on(SMALL, count), {})) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2,tp=4", "tp is there twice"),
        ("tq=2", "unknown key 'tq'"),
        ("tp=two", 'plan.tp = "two"'),
        ("auto,tp=2", "leave auto out"),
        ("recompute=some", 'plan.recompute = "some"'),
    ],
)
def test_pins_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_pins(text)
    assert message in str(refused.value)
