"""The search looks at all plans worth it, keeps the ones that fit, and takes the plainest of the fastest."""

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
from argosy.plan.hardware.clusters import Cluster, NetworkTier, NodeGroup, SiteLink
from argosy.plan.hardware.devices import find_device
from argosy.plan.layouts import PLAN_WORDS, Layouts
from argosy.plan.plan import Plan
from argosy.plan.quantities import divisors
from argosy.plan.rules import breaks_any, first_problem
from argosy.plan.search.search import (
    AS_FAST,
    SearchResult,
    features,
    misfit,
    nearest_that_fits,
    plainest,
    search,
    search_to_run,
    why_nothing_fits,
)
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
        "schedule": np.arange(len(PLAN_WORDS["schedule"])),
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
        "precision": PLAN_WORDS["precision"].index(costs.precision),
        "ep": 1,
        "async_tp": 0,
        "overlap_experts": 0,
        "user_buffers": 0,
        "fp8_gather": 0,
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
        ("3xh100", 18, 2.3),
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
    ("cluster", "run"), [("8xh100", SMALL), ("2x2xh100", EXPERTS), ("8xcpu", SMALL), ("12xh100-pcie", SMALL)]
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
        seen = {PLAN_WORDS[key][number] if key in PLAN_WORDS else number for number in np.unique(column)}
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
        ("precision=fp16,weights=bf16", "plan.weights = bf16 with precision = fp16"),
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


def test_one_device_and_one_plan_are_told_as_one() -> None:
    checked = SMALL.model_copy(
        update={"resilience": SMALL.resilience.model_copy(update={"replay_check_every_steps": 5})}
    )
    with pytest.raises(UserError, match=r"^no plan for 1 device: resilience\.replay_check_every_steps = 5"):
        search(costs_of("1xh100", checked), {})
    costs = costs_of("1xh100", SMALL, memory_gib=0.1)
    found = search(costs, parse_pins("recompute=full,recompute_every=1,microbatch=1,offload=none,precision=bf16"))
    assert why_nothing_fits(costs, found).startswith('nothing fits: of 1 plan the leanest, "')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=2,tp=4", "tp is given twice"),
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


MBIT_S = 1e6 / 8
RING = {"pp": (1,), "tp": (1,), "dp_shard": (1,)}
"""Replicas only."""


def run(preset: str = "llama-5m", batch: int = 8, seq_len: int = 64) -> RunConfig:
    sizes = {"train.global_batch": batch, "data.seq_len": seq_len, "model.vocab_size": 4096}
    return load(None, {"model.preset": preset, **sizes})


def nodes(rate: float, many: int = 2, each: int = 2) -> Cluster:
    """CPU nodes of `each` processes behind a link of `rate` Mbit/s each."""
    network = NetworkTier(
        name="network", devices=many * each, bandwidth_bytes_per_s=rate * MBIT_S / each, latency_s=1e-4
    )
    group = NodeGroup(device=find_device("cpu"), nodes=many, devices_per_node=each)
    return Cluster(name="thin", groups=(group,), network=(network,))


def sites(rate: float) -> Cluster:
    """Two sites of two nodes of two processes."""
    group = NodeGroup(device=find_device("cpu"), nodes=2, devices_per_node=2, nic_bytes_per_s=1e9, site="a")
    link = SiteLink(sites=("a", "b"), bandwidth_bytes_per_s=rate * MBIT_S, latency_s=0.01)
    return Cluster(name="sites", groups=(group, group.model_copy(update={"site": "b"})), links=(link,))


def best(cluster: Cluster, asked: RunConfig, pins: dict[str, tuple[object, ...]] | None = None) -> Plan:
    found = search(CostModel.of(asked, cluster), pins or {})
    return found.plans.plan(plainest(found))


def test_replicas_of_a_node_behind_a_thin_link_sum_among_themselves_first() -> None:
    plan = best(nodes(100), run(), RING)
    assert (plan.dp_replicate, plan.sum_inside, plan.sum_between, plan.sync) == (4, 2, 1, "exact")


def test_tiers_take_the_share_of_a_ring_s_time_that_was_measured() -> None:
    """`benchmarks/results/tiers.md`: 0.69 at 100 Mbit/s, two sites of two processes."""
    costs = CostModel.of(run("llama-20m"), nodes(100))
    plans = [Plan.parse("dp_replicate=4"), Plan.parse("dp_replicate=4,sum_inside=2")]
    ring, tiers = costs.predict_time(Layouts.of(plans)).total
    assert tiers / ring == pytest.approx(0.69, abs=0.05)


def test_sites_of_one_world_sum_in_a_node_then_in_the_site_then_across() -> None:
    plan = best(sites(100), run(), RING)
    assert plan.world_size == 8
    assert plan.sum_inside * plan.sum_between == plan.replicas // 2


@pytest.mark.parametrize("cluster", ["8xh100", "256xh100", "8x8xa100"])
def test_plans_stay_plain_where_the_network_is_fast(cluster: str) -> None:
    asked = load(None, {"model.preset": "llama3-8b", "train.global_batch": 512, "data.seq_len": 4096})
    assert best(Cluster.parse(cluster), asked).sum_inside == 1


def test_a_pin_stays() -> None:
    assert best(nodes(100), run(), {"sum_inside": (1,)}).sum_inside == 1


def test_every_plan_with_tiers_can_run_and_is_as_fast_as_it_is_said_to_be() -> None:
    for asked in (run(), run("mixtral-10m")):
        costs = CostModel.of(asked, sites(100))
        found = search(costs, {})
        rows = np.flatnonzero(found.plans.sum_inside > 1)
        assert len(rows)
        assert all(first_problem(found.plans.plan(int(row)), asked) is None for row in rows)
        assert np.asarray(costs.predict_time(found.plans[rows]).total) == pytest.approx(found.step_s[rows])


def costs(preset: str, cluster: str = "8xh100") -> CostModel:
    sizes = {"train.global_batch": 64, "data.seq_len": 4096, "model.vocab_size": 32_000}
    return CostModel.of(load(None, {"model.preset": preset, **sizes}), Cluster.parse(cluster))


def test_features_are_what_a_plan_says_beside_plain_data_parallelism():
    plans = [
        "dp_replicate=8,microbatch=4,precision=bf16",
        "dp_shard=8,zero=1",
        "dp_shard=8",
        "dp_shard=8,recompute=full,recompute_every=2",
        "dp_replicate=2,pp=2,tp=2,schedule=zbv,compile=false",
    ]
    assert features(Layouts.of([Plan.parse(plan) for plan in plans])).tolist() == [0, 1, 2, 4, 3]


def test_the_plainest_is_about_as_fast_as_the_fastest_and_no_plan_as_fast_is_plainer():
    found = search(costs("llama3-8b"), {})
    row = plainest(found)
    near = found.step_s <= (1 + AS_FAST) * found.step_s.min()
    assert near[row]
    counts = features(found.plans)
    assert counts[row] == counts[near].min()
    assert found.step_s[row] == found.step_s[near & (counts == counts[row])].min()


def test_state_goes_to_the_host_only_where_nothing_fits_without():
    roomy = costs("llama3-8b", "1xh200")
    assert not np.any(~search_to_run(roomy, {}).plans.is_("offload", "none"))
    tight = replace(roomy, rates=replace(roomy.rates, memory_bytes=80e9))
    assert not np.any(search_to_run(tight, {}).plans.is_("offload", "none"))
    assert len(search_to_run(tight, {"offload": ("none",)})) == 0


def test_what_does_not_fit_is_said_in_figures():
    large = costs("llama3-70b")
    said = why_nothing_fits(large, search(large, {}))
    assert "GiB" in said and "leanest" in said


PLAN = Plan.parse("pp=2,dp_shard=4,tp=2,zero=1,recompute=selective,precision=bf16")


def costs_with(cluster: str = "16xh100", model: str = "llama3-8b") -> CostModel:
    run = load(None, {"model.preset": model, "train.global_batch": 64, "data.seq_len": 8192})
    return CostModel.of(run, Cluster.parse(cluster))


def test_a_misfit_says_by_how_much_and_in_what() -> None:
    costs, plan = costs_with("8xh100"), Plan.parse("dp_replicate=8,zero=0,precision=bf16")
    missing = misfit(costs, plan)
    assert missing is not None
    memory = costs.predict_memory(Layouts.of([plan]))
    assert missing.excess_bytes == pytest.approx(float(np.asarray(memory.total)[0]) - costs.memory_bytes)
    assert missing.largest == "optimizer"
    assert missing.largest_bytes == float(np.asarray(memory.optimizer)[0])
    assert misfit(costs, PLAN) is None


def test_the_nearest_to_a_plan_that_fits_is_itself() -> None:
    found = search(costs_with(), parse_pins("cp=1"))
    for row in (0, len(found) // 2, len(found) - 1):
        assert nearest_that_fits(found.plans.plan(row), found) == row


def test_the_nearest_differs_in_as_little_as_can_be() -> None:
    found = search(costs_with("8xh100"), {})
    wanted = Plan.parse("dp_shard=8,zero=0,recompute=full,precision=bf16")
    row = nearest_that_fits(wanted, found)
    assert row is not None
    near = found.plans.plan(row)
    assert near.model_dump(exclude={"zero"}) == wanted.model_dump(exclude={"zero"})


def test_nothing_is_near_where_nothing_fits() -> None:
    assert nearest_that_fits(PLAN, search(costs_with("8xh100", "llama3-70b"), {})) is None


def with_host_memory(host_gib: float, device: str = "") -> CostModel:
    costs = costs_with("8xh100", "llama3-70b")
    costs = replace(costs, rates=replace(costs.rates, host_memory_bytes=host_gib * 2**30))
    return replace(costs, rates=replace(costs.rates, host_waits=1.0)) if device == "cpu" else costs


def test_plans_whose_offload_exceeds_the_hosts_memory_are_ruled_out() -> None:
    pins = {"offload": ("optimizer", "all")}
    roomy, tight = search(with_host_memory(250), pins), search(with_host_memory(50), pins)
    assert len(roomy) and not len(tight)
    some = search(with_host_memory(90), pins)
    assert 0 < len(some) < len(roomy)
    costs = with_host_memory(90)
    assert (costs.predict_host_memory(some.plans) <= 90 * 2**30).all()
    assert (costs.predict_host_memory(roomy.plans) > 90 * 2**30).any()


def test_what_is_offloaded_is_named_where_the_host_has_no_room() -> None:
    costs = with_host_memory(50)
    found = search(costs, {"offload": ("optimizer", "all")})
    assert "of the host's memory for each device" in why_nothing_fits(costs, found)
    plan = search(with_host_memory(250), {"offload": ("optimizer",)}).plans.plan(0)
    missing = misfit(costs, plan)
    assert missing is not None and missing.largest == "what is offloaded"
    assert missing.needs_bytes > missing.has_bytes
    assert misfit(with_host_memory(250), plan) is None


def test_on_a_cpu_what_is_offloaded_takes_the_same_memory() -> None:
    plan = Plan.parse("tp=8,offload=optimizer,precision=bf16")
    costs = with_host_memory(float("inf"), "cpu")
    whole = misfit(costs, plan.model_copy(update={"offload": "none"}))
    offloaded = misfit(costs, plan)
    assert whole is not None and offloaded is not None
    assert offloaded.needs_bytes == pytest.approx(whole.needs_bytes)
