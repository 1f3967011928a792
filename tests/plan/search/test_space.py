"""A plan that cannot train the run is refused, and what is proposed instead can."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings

from any_plans import ANY_PLAN, any_run, run
from argosy.config.launch import LaunchConfig
from argosy.errors import UserError
from argosy.plan.plan import Plan
from argosy.plan.rules import first_problem
from argosy.plan.search.space import check_plan, check_size, nearest

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")


@settings(deadline=None, max_examples=30)
@given(ANY_PLAN, any_run())
def test_what_is_proposed_is_for_as_many_processes_and_breaks_no_rule(plan, run_):
    proposed = nearest(plan, run_)
    assert len(set(map(str, proposed))) == len(proposed) <= 3
    for other in proposed:
        assert first_problem(other, run_) is None
        assert other.world_size == plan.world_size
        free = {*AXES, "microbatch"}
        assert other.model_dump(exclude=free) == plan.model_dump(exclude=free), (
            "only the axes and the microbatch change"
        )
    if first_problem(plan, run_) is None:
        assert proposed[0] == plan


def test_a_plan_that_fits_passes():
    check_plan(Plan(dp_replicate=2, microbatch=4), run(train={"global_batch": 16}), processes=2)


@pytest.mark.parametrize(
    ("plan", "processes", "message"),
    [
        (
            "ep=2",
            2,
            'is for 1 process, and there are 2. Try launch.processes = 1, or plan = "auto,ep=2,microbatch=1,',
        ),
        (
            "tp=3",
            3,
            "plan.tp = 3 does not divide model.heads = 4: each rank computes as many heads. Try plan.tp = 2 or 4. "
            'Plans near it that would do: "pp=3,microbatch=1,precision=fp32".',
        ),
        (
            "dp_replicate=4",
            2,
            'plan = "dp_replicate=4,microbatch=1,precision=fp32" is for 4 processes, and there are 2. '
            'Try launch.processes = 4, or plan = "auto".',
        ),
        (
            "dp_replicate=2,microbatch=5",
            2,
            "train.global_batch = 16 is not a multiple of 10 (2 data-parallel ranks x plan.microbatch = 5). "
            "Try 10 or 20.",
        ),
        ("microbatch=17", 1, "Try 17."),
    ],
)
def test_a_plan_that_cannot_train_this_run_is_refused_with_a_remedy(plan, processes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_plan(Plan.parse(plan), run(train={"global_batch": 16}), processes)


@pytest.mark.parametrize(
    ("size", "launch", "message"),
    [
        (
            4,
            {"processes": 2},
            "is for 4 processes, and launch.processes = 2 (run.toml:7). Try launch.processes = 4, or",
        ),
        (
            2,
            {"nodes": 2, "processes": 2},
            "is for 2 processes, and launch.nodes = 2 (--launch.nodes) x launch.processes = 2 (run.toml:7) make 4. "
            "Try launch.processes = 1, which counts on each machine, or",
        ),
        (
            3,
            {"nodes": 2},
            "is for 3 processes, and launch.nodes = 2 (--launch.nodes) machines of 2 processes each have 4. "
            "Try launch.nodes = 1, or",
        ),
    ],
)
def test_processes_are_told_with_nodes_and_with_the_places_that_say_so(size, launch, message):
    places = {"launch.nodes": "--launch.nodes", "launch.processes": "run.toml:7", "plan": "default"}
    settings = LaunchConfig(**launch)
    processes = settings.nodes * (settings.processes or -(-size // settings.nodes))
    with pytest.raises(UserError, match=re.escape(message)):
        check_size(f"dp_replicate={size}", size, settings, processes, places.__getitem__)


@settings(deadline=None, max_examples=30)
@given(ANY_PLAN, any_run())
def test_a_refusal_names_what_it_proposes_so_that_it_can_be_pasted(plan, run_):
    problem = first_problem(plan, run_)
    if problem is None:
        check_plan(plan, run_, plan.world_size)
        return
    with pytest.raises(UserError) as refused:
        check_plan(plan, run_, plan.world_size)
    message = str(refused.value)
    assert message.startswith(problem)
    pasted = [Plan.parse(text) for text in re.findall(r'"([^"]*)"', message.removeprefix(problem))]
    assert pasted == nearest(plan, run_)


@pytest.mark.parametrize(
    ("plan", "proposed"),
    [
        ("tp=8", ["dp_shard=2,tp=4", "dp_replicate=2,tp=4", "cp=2,tp=4"]),
        ("pp=8", ["pp=4,dp_shard=2", "pp=4,dp_replicate=2", "pp=4,tp=2"]),
        ("dp_shard=4,microbatch=3", ["dp_shard=4", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"]),
        ("dp_shard=16,microbatch=2", ["dp_shard=8,tp=2"]),
    ],
)
def test_the_nearest_come_first_and_of_those_the_ones_with_more_data_parallelism(plan, proposed):
    found = nearest(Plan.parse(plan), run())
    assert found[: len(proposed)] == [Plan.parse(text) for text in proposed]


def test_experts_are_offered_to_ranks_that_share_them_evenly_first():
    moe = run(model={"moe": {"experts": 8}})
    assert [other.ep for other in nearest(Plan.parse("dp_shard=4,ep=3"), moe)][:2] == [4, 2]


def test_a_microbatch_that_fits_is_kept():
    assert [other.microbatch for other in nearest(Plan.parse("tp=8,microbatch=4"), run())] == [4, 4, 4]


@pytest.mark.parametrize("plan", ["dp_shard=1024,tp=16", "pp=8,dp_shard=16,cp=16,tp=8,microbatch=3", "tp=16384"])
def test_a_proposal_for_a_large_cluster_takes_no_time_worth_mentioning(plan):
    sizes = {"layers": 128, "width": 16384, "heads": 128, "kv_heads": 8, "head_width": 128, "ffn_width": 53248}
    large = run(model=sizes | {"moe": {"experts": 256}}, data={"seq_len": 8192}, train={"global_batch": 2048})
    began = time.process_time()
    proposed = nearest(Plan.parse(plan), large)
    assert time.process_time() - began < 2
    assert len(proposed) == 3 and all(other.world_size == 16384 for other in proposed)


def test_that_there_is_no_proposal_at_all_is_soon_known():
    """For 60060 devices there are 46,875 meshes: looked at one by one, they took two seconds."""
    prime = run(train={"global_batch": 17}, model={"layers": 1})
    began = time.process_time()
    assert nearest(Plan(dp_shard=60060), prime) == []
    assert time.process_time() - began < 1
